"""An `LLM` on several ranks, of which the first one alone hears of requests: the others do what its `AsyncLLM` does.

    rank 0      requests, aborts ──▶ commands ──▶ send ──────▶ step ──▶ outputs
    others      a thread receives ──▶ queue ────▶ commands ──▶ step

Before each step rank 0 sends what it has done to its `LLM` since the one before. Each rank then schedules, draws and ends
the same sequences, since all follows from the same calls and the tokens that rank 0 has drawn. What rank 0 has refused is not
sent. On every rank grammars are compiled on a thread of their own, while steps go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.engine.llm import LLM, Prompt
from torch_fdattn.engine.rank_messages import MessageKind, RankLost, RankMessage, RankMessages
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.engine.structured import Matcher

_END_SECONDS = 5.0  # in which ranks that were asked to end say that they do
#: After a step's error: the loss of a rank, of which it may come, is seen on another thread.
_NOTICE_SECONDS = 2.0


class Followers:
    """The other ranks of an `LLM`, each with its `Follower`, as rank 0 sees them. Of one thread.

    Args:
        llm: rank 0's.
        on_lost: called where one of them fails or is gone, on a thread of its own.
    """

    def __init__(self, llm: LLM, on_lost: Callable[[RankLost], None]) -> None:
        self._ranks, self._on_lost = range(1, llm.num_ranks), on_lost
        self._commands: list[list] = []
        self._lost, self._is_lost = None, threading.Event()
        self._messages = RankMessages(llm.group)
        self._watches = [
            threading.Thread(target=self._watch, args=(rank,), daemon=True, name=f"torch_fdattn rank {rank}")
            for rank in self._ranks
        ]  # fmt: skip
        for watch in self._watches:
            watch.start()

    @property
    def has_commands(self) -> bool:
        """Whether there are any that were not sent."""
        return bool(self._commands)

    def compile(self, number: int, params: SamplingParams) -> None:
        """The grammar of a request that may come; number: what `add` or `forget` will call it."""
        self._commands.append(["compile", number, dataclasses.asdict(params)])

    def forget(self, number: int) -> None:
        self._commands.append(["forget", number])

    def add(
        self, request_id: str, prompt: Prompt, params: SamplingParams, grammar: int | None
    ) -> None:
        """A request that this rank's `LLM` has taken. grammar: its number."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        self._commands.append(["add", request_id, prompt, dataclasses.asdict(params), grammar])

    def abort(self, request_id: str) -> None:
        self._commands.append(["abort", request_id])

    def step(self) -> None:
        """Before this rank's own step: sends the commands, behind which the others step.

        Raises:
            RankLost: one of them is gone.
        """
        commands, self._commands = self._commands, []
        self._messages.send(self._ranks, RankMessage(MessageKind.STEP, commands))

    def end(self, error: BaseException | None) -> None:
        """Ends the others, by an error where there is one."""
        if error is None:
            message = RankMessage(MessageKind.END, self._commands)
        else:
            message = RankMessage(MessageKind.FAILED, repr(error))
        try:
            self._messages.send(self._ranks, message)
        except RankLost:
            return  # its watch has told it
        if error is None:
            end = time.monotonic() + _END_SECONDS
            for watch in self._watches:
                watch.join(max(0.0, end - time.monotonic()))

    def cause_of(self, error: Exception) -> Exception:
        """Of a step's error: the loss of a rank, without which a collective fails, or itself."""
        return self._lost if self._is_lost.wait(_NOTICE_SECONDS) else error

    def _watch(self, rank: int) -> None:
        try:
            kind, said = self._messages.receive(rank)
            if kind is MessageKind.END:
                return
            error = RankLost(f"rank {rank} of the engine has failed: {said}")
        except RankLost as lost:
            error = lost
        if not self._is_lost.is_set():
            self._lost = error
            self._is_lost.set()
        self._on_lost(error)


class Follower:
    """What `AsyncLLM` on rank 0 does to its `LLM`, done to this rank's.

    All ranks make their `LLM`, then rank 0 an `AsyncLLM` and each of the others a `Follower` at the same time.

    Args:
        llm: nobody else uses it while `run` does.
        on_lost: called where rank 0 has failed or is gone, on a thread of its own: this rank may be in a collective, which
            waits for rank 0 as long as its backend lets it.

    Raises:
        ValueError: llm is not one of several ranks, or this is the first of them.
        RankLost: not all ranks came.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> llm = torch_fdattn.engine.LLM(torch_fdattn.models.Transformer(config), pages=32)
        >>> torch_fdattn.engine.Follower(llm)
        Traceback (most recent call last):
            ...
        ValueError: llm must be one of several ranks, and not the first, got rank 0 of 1: make an AsyncLLM of it
    """

    def __init__(self, llm: LLM, on_lost: Callable[[], None] = lambda: None) -> None:
        if llm.rank == 0:
            raise ValueError(
                f"llm must be one of several ranks, and not the first, got rank 0 of {llm.num_ranks}: make an AsyncLLM of it"
            )
        self._llm, self._on_lost = llm, on_lost
        self._messages = RankMessages(llm.group)
        self._received: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self._lost, self._is_lost = None, threading.Event()
        self._compiler = ThreadPoolExecutor(1, "torch_fdattn grammars")
        self._grammars: dict[int, Future[Matcher]] = {}
        self._commands = {
            "compile": self._compile, "forget": self._forget, "add": self._add, "abort": llm.abort
        }  # fmt: skip

    def run(self) -> None:
        """Steps with rank 0 until its `AsyncLLM` is closed.

        Raises:
            RankLost: rank 0 has failed, or its process is gone.
            Exception: what a step raises here alone. Rank 0 then ends by `EngineDead`.
        """
        threading.Thread(target=self._receive, daemon=True, name="torch_fdattn rank 0").start()
        try:
            with assume_equal_on_all_ranks():
                while (message := self._received.get()) is not None and self._lost is None:
                    self._obey(message)
        except BaseException as error:
            # Longer than rank 0 waits for this: an error of all ranks is no loss of one.
            if not self._is_lost.wait(2 * _NOTICE_SECONDS):
                self._say(RankMessage(MessageKind.FAILED, repr(error)))
                raise
            raise self._lost from error
        finally:
            self._compiler.shutdown(wait=False, cancel_futures=True)
        if self._lost is not None:
            raise self._lost
        self._say(RankMessage(MessageKind.END, []))

    def _obey(self, message: RankMessage) -> None:
        for name, *arguments in message.content:
            self._commands[name](*arguments)
        if message.kind is MessageKind.STEP:
            self._llm.step()

    def _compile(self, number: int, params: dict) -> None:
        self._grammars[number] = self._compiler.submit(self._llm.compile_grammar, _params(params))

    def _forget(self, number: int) -> None:
        self._grammars.pop(number).cancel()

    def _add(
        self, request_id: str, prompt: str | list[int], params: dict, number: int | None
    ) -> None:
        grammar = None if number is None else self._grammars.pop(number).result()
        self._llm.add_request(request_id, prompt, _params(params), grammar)

    def _say(self, message: RankMessage) -> None:
        with contextlib.suppress(RankLost):  # it ends as well
            self._messages.send([0], message)

    def _receive(self) -> None:
        """On a thread of its own: rank 0's messages, to its last one or its loss; then None."""
        message = RankMessage(MessageKind.STEP, [])
        while message.kind is MessageKind.STEP:
            try:
                message = self._messages.receive(0)
            except RankLost as lost:
                self._lost = lost
                break
            if message.kind is MessageKind.FAILED:
                self._lost = RankLost(f"rank 0 of the engine has failed: {message.content}")
            else:
                self._received.put(message)
        self._received.put(None)
        if self._lost is not None:
            self._is_lost.set()
            self._on_lost()


def _params(values: dict) -> SamplingParams:
    """From JSON, which has no tuples."""
    return SamplingParams(
        **{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
    )
