"""The page in the system's Chromium, by Playwright: `make test-browser`.

Chromium: the program that FDATTN_CHROMIUM names, else `chromium` or `google-chrome` on the path. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("playwright", reason="needs the extra browser")

from playwright.async_api import Page, async_playwright, expect

from tests.server.fake_engine import FakeEngine
from tests.server.running import run, served, until

REPLY = "<think>Let me see.</think>Tokyo.\n```python\nprint('<b>hi</b>')\n```\n"
CHROMIUM = os.environ.get("FDATTN_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@contextlib.asynccontextmanager
async def opened(engine: FakeEngine, *, key: str | None = None, **given) -> AsyncIterator[Page]:
    """The page in a browser that lets it load nothing from elsewhere, and reports its errors."""
    if CHROMIUM is None:
        pytest.fail("needs Chromium: apt-get install chromium, or FDATTN_CHROMIUM=/its/path")
    async with served(engine, api_key=key) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], env=dict(os.environ)
        )
        try:
            page = await browser.new_page(**given)
            errors, requested = [], []
            page.on("pageerror", lambda x: errors.append(x))
            page.on("request", lambda x: requested.append(x.url))
            await page.goto(url)
            yield page
            assert not errors
            assert not [x for x in requested if not x.startswith((url, "data:"))]
        finally:
            await browser.close()


async def ask(page: Page, text: str = "What is the capital of Japan?") -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


def test_a_reply_streams_in() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda prompt: REPLY, delay=0.005)
        async with opened(engine) as page:
            await expect(page.locator("#model")).to_have_text("fake")
            await page.get_by_label("Temperature").fill("0.25")
            await page.get_by_label("Seed").fill("7")
            await page.get_by_label("System message").fill("Be brief.")
            await ask(page)
            reply = page.get_by_label("Model", exact=True)
            await expect(reply.locator(".body")).to_contain_text("Tokyo.")
            await expect(reply.locator("pre")).to_have_text("print('<b>hi</b>')")
            await expect(reply.locator("summary")).to_have_text("Reasoning")
            await expect(reply.locator(".thoughts")).to_have_text("Let me see.")
            measured = re.compile(rf"first token \d+ ms · {len(REPLY)} tokens · [\d.]+ tokens/s")
            await expect(reply.locator(".measured")).to_have_text(measured)
            prompt, params = engine.seen[0]
            assert (params.temperature, params.seed, params.max_tokens) == (0.25, 7, 512)
            assert engine.llm.tokenizer.decode(prompt).startswith("system: Be brief.\nuser: What")
            await ask(page, "And of France?")
            await expect(page.get_by_label("Model", exact=True)).to_have_count(2)
            await expect(page.locator(".measured")).to_have_count(2)
            second = engine.llm.tokenizer.decode(engine.seen[1][0])
            assert "assistant: Tokyo." in second
            assert "Let me see." not in second  # reasoning is no part of the history
            await page.get_by_role("button", name="New chat").click()
            await expect(page.get_by_label("Model", exact=True)).to_have_count(0)

    run(test)


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_frees_the_pages(how: str) -> None:
    async def test() -> None:
        engine = FakeEngine(lambda prompt: "word " * 1000, delay=0.01)
        async with opened(engine) as page:
            await ask(page)
            await expect(page.locator(".message.assistant .body")).to_contain_text("word word")
            if how == "button":
                await page.get_by_role("button", name="Stop").click()
            else:
                await page.keyboard.press("Escape")
            await until(lambda: not engine.pages)
            await expect(page.locator(".measured")).to_contain_text("stopped")
            await expect(page.get_by_role("button", name="Send")).to_be_visible()

    run(test)


def test_the_picture_follows_the_engine() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda prompt: "word " * 400, delay=0.005, num_pages=20)
        async with opened(engine) as page:
            await page.locator("[name=max_tokens]").fill("200")
            await ask(page)
            await expect(page.locator("#rate .value")).to_have_text(re.compile(r"[1-9]\d*tokens/s"))
            await expect(page.locator("#queue .value")).to_have_text("1, 0")
            await expect(page.locator("#cache .value")).to_have_text(re.compile(r"[1-9][\d.]*%"))
            await expect(page.locator("#ttft .value")).to_have_text(re.compile(r"\d+ms"))
            label = await page.locator("#rate svg").get_attribute("aria-label")
            assert re.fullmatch(r"Tokens: \d+tokens/s", label)
            await expect(page.locator("#rate .line")).to_have_attribute("d", re.compile("L"))

    run(test)


def test_errors_are_shown() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda prompt: "word " * 400, delay=0.02)
        async with opened(engine) as page:
            await page.get_by_label("Top p").fill("7")
            await ask(page)
            await expect(page.get_by_role("alert")).to_contain_text("top_p must be")
            await expect(page.get_by_label("Message", exact=True)).to_have_value(
                re.compile("Japan")
            )
            await page.get_by_label("Top p").fill("1")
            await ask(page)
            await expect(page.locator(".message.assistant .body")).to_contain_text("word")
            engine.kill()
            await expect(page.get_by_role("alert")).to_have_count(2)
            await expect(page.locator("#status")).to_have_text("the engine has failed")

    run(test)


def test_a_key_is_asked_for() -> None:
    async def test() -> None:
        async with opened(FakeEngine(lambda prompt: "Hi."), key="secret") as page:
            await expect(page.locator("#status")).to_have_text("needs the API key")
            await page.get_by_label("API key").fill("secret")
            await page.get_by_label("API key").blur()
            await expect(page.locator("#status")).to_have_text("ready")
            await ask(page)
            await expect(page.locator(".message.assistant .body")).to_have_text("Hi.")

    run(test)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme: str) -> None:
    """WCAG's contrast of 4.5 for all text that is shown."""
    contrast = """() => {
        const luminance = color => color.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
            .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
            .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
        const ground = node => {
            for (; node; node = node.parentElement) {
                const color = getComputedStyle(node).backgroundColor;
                if (!color.endsWith(", 0)")) return color;
            }
            return "rgb(255, 255, 255)";
        };
        const low = [];
        for (const node of document.querySelectorAll("body *")) {
            const texts = [...node.childNodes].filter(x => x.nodeType === 3 && x.data.trim());
            if (!texts.length || !node.checkVisibility() || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
            const [a, b] = [getComputedStyle(node).color, ground(node)].map(luminance);
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (ratio < 4.5) low.push([node.tagName, texts[0].data.trim(), ratio]);
        }
        return low;
    }"""

    async def test() -> None:
        async with opened(FakeEngine(lambda prompt: REPLY), color_scheme=scheme) as page:
            await ask(page)
            await expect(page.locator(".measured")).to_contain_text("tokens")
            assert await page.evaluate(contrast) == []
            names = "() => [...document.querySelectorAll('input, textarea, button')].filter(x => !x.labels?.length && !x.textContent.trim() && !x.ariaLabel).length"
            assert await page.evaluate(names) == 0
            await page.get_by_role("button", name="Light or dark").click()
            assert await page.evaluate("document.documentElement.dataset.theme") != scheme
            assert await page.evaluate(contrast) == []

    run(test)
