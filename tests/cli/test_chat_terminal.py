"""`fdattn chat` at a terminal, a pseudo one: Ctrl-C, line editing, history, the opening line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")
pytest.importorskip("jinja2", reason="chat templates need jinja2")

from tests.tiny_model import save_tiny_model

TEMPLATE = "{% for message in messages %}{{ message.content }}a{% endfor %}"
#: The command line on a model that takes 0.05 s a token, so that a reply is long enough to be stopped.
PROGRAM = """
import sys, time
from torch_fdattn.engine import LLM

step = LLM.step
def slow_step(*arguments):
    time.sleep(0.05)
    return step(*arguments)
LLM.step = slow_step

from torch_fdattn.cli import app
app(sys.argv[1:])
"""
CTRL_C, CTRL_A, UP = "\x03", "\x01", "\x1b[A"


def _take_terminal() -> None:
    """In the new process. Shells ignore Ctrl-C for what they start in the background, and so would this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A program whose standard streams are a terminal.

    Attributes:
        shown: what it has written so far.
    """

    def __init__(self, *command: str) -> None:
        self._screen, stream = os.openpty()
        self.process = subprocess.Popen(
            command, stdin=stream, stdout=stream, stderr=stream, start_new_session=True,
            cwd=Path(__file__).parents[2], env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull},
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(stream)
        self.shown, self._seen = "", 0

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """The text up to the end of the pattern, from where the last one ended."""
        end = time.monotonic() + seconds
        while True:
            if found := re.compile(pattern).search(self.shown, self._seen):
                text, self._seen = self.shown[self._seen : found.end()], found.end()
                return text
            if not select.select([self._screen], [], [], max(0, end - time.monotonic()))[0]:
                pytest.fail(f"no {pattern!r} in {self.shown[self._seen :]!r}")
            with contextlib.suppress(OSError):  # what Linux says where the program has ended
                if more := os.read(self._screen, 1 << 16):
                    self.shown += more.decode("utf-8", "replace")
                    continue
            pytest.fail(f"it has ended without {pattern!r}: {self.shown[self._seen :]!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture(scope="module")
def terminal(tmp_path_factory) -> Iterator[Terminal]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"), TEMPLATE)
    terminal = Terminal(
        sys.executable, "-c", PROGRAM, "chat", "--model", str(folder), "--device", "cpu",
        "--max-new-tokens", "90",
    )  # fmt: skip
    yield terminal
    terminal.close()


def test_a_conversation_at_a_terminal(terminal):
    opening = terminal.expect("> ")
    assert "/help says what is possible, Ctrl-C stops a reply" in opening

    terminal.type("aaa\r")
    terminal.expect("aaa\r\n[^\r\n]")
    terminal.type(CTRL_C)
    answer = terminal.expect("> $")
    assert "\r\nfdattn: stopped; what there is of the reply stays in the conversation\r\n" in answer

    # The line before comes back, and is edited at its beginning.
    terminal.type(f"{UP}{CTRL_A}/")
    terminal.type("\r")
    assert "fdattn: /aaa is no command" in terminal.expect("> $")

    # At the prompt Ctrl-C ends it, as a shell's programs end by it.
    # A signal between the prompt and readline's wait is seen with the next key alone.
    time.sleep(0.3)
    terminal.type(CTRL_C)
    assert terminal.process.wait(timeout=30) == 130
