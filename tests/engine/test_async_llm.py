"""Requests from coroutines: streaming, closing, aborting, errors, and the end of the engine."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.expected import expect_greedy
from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.engine import LLM, AsyncLLM, EngineDead, PromptError, SamplingParams, async_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture
def llm(device):
    return LLM(random_model(device), max_model_len=128, pages=40, cuda_graph=False)


def run(llm, main):
    """main(engine) on an event loop, within a minute; the engine is closed in any case."""

    async def bounded():
        engine = AsyncLLM(llm)
        try:
            return await asyncio.wait_for(main(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(bounded())


async def last(stream):
    return [output async for output in stream][-1]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def idle(engine) -> bool:
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_many_at_the_same_time(llm):
    async def main(engine):
        prompts = [prompt for prompt in PROMPTS for _ in range(4)]
        streams = [engine.generate(x, GREEDY, str(i)) for i, x in enumerate(prompts)]
        return await asyncio.gather(*map(last, streams))

    model = llm.model
    for output in run(llm, main):
        assert output.finished
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    assert llm.stats().pages_used == 0


def test_a_step_wakes_each_event_loop_once(llm, monkeypatch):
    """Of two, whose requests run side by side: not once for each request."""
    steps, wakes = [], []
    step = llm.step
    monkeypatch.setattr(llm, "step", lambda: steps.append(1) or step())

    async def ask(engine, names):
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(function, *arguments):
            if function is async_llm._set_all:
                wakes.append(len(arguments[0]))
            return wake(function, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        streams = [engine.generate(PROMPTS[0], LONG, name) for name in names]
        return await asyncio.gather(*map(last, streams))

    async def main(engine):
        other = asyncio.to_thread(asyncio.run, ask(engine, "abc"))
        return await asyncio.gather(ask(engine, "defgh"), other)

    for outputs in run(llm, main):
        assert all(len(x.outputs[0].token_ids) == 100 for x in outputs)
    assert max(wakes) == 5
    assert len(wakes) <= 2 * len(steps)
    assert sum(wakes) == 8 * 100


def test_outputs_are_cumulative_and_a_slow_reader_gets_the_newest(llm):
    async def main(engine):
        seen = []
        async for output in engine.generate(PROMPTS[0], LONG, "a"):
            seen.append(output)
            if len(seen) == 1:
                await until(lambda: idle(engine))
        return seen

    first, second = run(llm, main)
    assert not first.finished
    assert second.finished
    tokens = second.outputs[0].token_ids
    assert tokens[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
    assert len(tokens) == 100


def test_closing_the_iterator_aborts(llm):
    async def main(engine):
        stream = engine.generate(PROMPTS[0], LONG, "a")
        await anext(stream)
        await stream.aclose()
        await until(lambda: idle(engine))
        made = engine.stats().generated_tokens
        assert made < 100
        # A task that is cancelled while it waits for its first output closes its iterator too.
        task = asyncio.ensure_future(last(engine.generate(PROMPTS[0], LONG, "a")))
        await until(lambda: engine.stats().running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: idle(engine))
        return await last(engine.generate(PROMPTS[0], GREEDY, "a"))

    assert run(llm, main).finished


def test_abort_ends_the_iterator(llm):
    async def main(engine):
        stream = engine.generate(PROMPTS[0], LONG, "a")
        await anext(stream)
        await engine.abort("a")
        assert idle(engine)
        await engine.abort("unknown")
        return await last(stream)

    output = run(llm, main)
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"


def test_what_is_refused_reaches_its_caller_alone(llm):
    async def main(engine):
        other = asyncio.ensure_future(last(engine.generate(PROMPTS[0], LONG, "a")))
        await until(lambda: engine.stats().running)
        with pytest.raises(PromptError, match="prompt must have at least one token"):
            await last(engine.generate([], GREEDY, "b"))
        with pytest.raises(ValueError, match="request_id must be of no unfinished request"):
            await last(engine.generate([1], GREEDY, "a"))
        return await other

    assert run(llm, main).finished


def test_an_error_in_a_step_reaches_all_and_the_log(llm, monkeypatch, caplog):
    async def main(engine):
        tasks = [asyncio.ensure_future(last(engine.generate(x, LONG, str(x)))) for x in PROMPTS]
        await until(lambda: engine.stats().running == len(PROMPTS))

        def fail(*_):
            raise ZeroDivisionError("of a step")

        monkeypatch.setattr(llm, "_read", fail)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineDead, match="a step failed: ZeroDivisionError"):
            await last(engine.generate([1], GREEDY, "late"))
        with pytest.raises(EngineDead):
            await engine.abort("0")
        with pytest.raises(EngineDead):  # by which a server sees it while nobody asks
            engine.stats()
        return found

    errors = run(llm, main)
    assert [type(x) for x in errors] == [EngineDead] * len(PROMPTS)
    assert all(isinstance(x.__cause__, ZeroDivisionError) for x in errors)
    assert "of a step" in caplog.text
    assert llm.stats().pages_used == 0


def test_closing_the_engine_reaches_all(llm):
    async def main(engine):
        task = asyncio.ensure_future(last(engine.generate(PROMPTS[0], LONG, "a")))
        await until(lambda: engine.stats().running)
        await engine.close()
        with pytest.raises(EngineDead, match="the engine was closed"):
            await task
        await engine.close()  # twice is once

    run(llm, main)


def test_what_had_ended_before_the_engine_was_closed_is_there(llm):
    async def main(engine):
        stream = engine.generate(PROMPTS[0], GREEDY, "a")
        first = await anext(stream)
        await until(lambda: idle(engine))
        await engine.close()
        return first if first.finished else await last(stream)

    assert run(llm, main).finished


@pytest.mark.slow
def test_nothing_leaks(llm):
    """A thousand requests of which a third is cancelled: pages, tasks, mailboxes."""

    async def main(engine):
        gate, tasks = asyncio.Semaphore(40), len(asyncio.all_tasks())

        async def one(i):
            async with gate:
                stream = engine.generate([i % 64] * (1 + i % 40), GREEDY, str(i))
                if i % 3:
                    return await last(stream)
                await anext(stream)
                await stream.aclose()

        await asyncio.gather(*map(one, range(1000)))
        await until(lambda: idle(engine))
        assert len(engine._running) == len(engine._waiting) == 0
        assert len(asyncio.all_tasks()) == tasks

    run(llm, main)
    assert llm.stats().pages_used == 0
