"""The loop of `fdattn chat`: a line is a turn or a command; Ctrl-C stops a reply."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_fdattn.cli.terminal import any_text, greet, lines, note, write
from torch_fdattn.cli.world import World
from torch_fdattn.engine import Chat, PromptError

_COMMAND = re.compile(r"/[a-z]+", re.IGNORECASE)  # what a model is not asked
_HELP = (
    "a line is a turn; /reset forgets the conversation; /exit, or the input's end, ends it; Ctrl-C stops a reply, "
    "and at the prompt ends it all"
)


def converse(conversation: Chat, model_name: str, world: World) -> None:
    """Turns from rank 0's stdin to its end, replies to its stdout."""
    any_text()
    greet(f"{model_name} on {world.device}; /help says what is possible, Ctrl-C stops a reply", world)  # fmt: skip
    for line in lines(world):
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line == "/help":
            note(_HELP, world)
        elif _COMMAND.fullmatch(line):
            note(f"{line} is no command: /help, /reset, /exit", world)
        elif line:
            _reply(conversation, line, world)


def _reply(conversation: Chat, line: str, world: World) -> None:
    with _interrupts(world) as is_interrupted:
        try:
            for part in conversation.reply(line, is_interrupted):
                write(part, world)
            write("\n", world)
        except PromptError as error:  # too long a line: the next may be shorter
            note(str(error), world)
            return
        if is_interrupted():
            note("stopped; what there is of the reply stays in the conversation", world)


@contextmanager
def _interrupts(world: World) -> Iterator[Callable[[], bool]]:
    """Whether SIGINT has come, which ends nothing within this; a second one is a KeyboardInterrupt.

    Under torchrun it is left alone: there it ends all ranks.
    """
    count = 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    # Where it is ignored, as of programs in the background, it stays so.
    if world.group is not None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
