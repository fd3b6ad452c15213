"""`LLM` behind coroutines: one thread steps it, any number of iterators wait for their outputs.

Iterators and the thread share two things: a queue of commands to the thread, and a mailbox for each request, which holds
the newest output alone. Outputs are cumulative, so a slow reader misses nothing but intermediate states, and takes no
memory. On several ranks the thread sends what it does to the others (`followers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.engine.followers import Followers
from torch_fdattn.engine.llm import LLM, Prompt
from torch_fdattn.engine.outputs import EngineStats, RequestOutput
from torch_fdattn.engine.rank_messages import RankLost
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.engine.structured import Matcher

_log = logging.getLogger(__name__)
_Result = RequestOutput | Exception | None


class EngineDead(RuntimeError):
    """The engine has ended, by an error in a step, the loss of a rank (`__cause__`), or by `AsyncLLM.close`.

    Examples:
        >>> issubclass(torch_fdattn.engine.EngineDead, RuntimeError)
        True
    """


class AsyncLLM:
    """Requests to an `LLM` from coroutines of one or several event loops.

    Args:
        llm: nobody else uses it from here on. Of several ranks the first one's; the others make a `Follower` of theirs at the
            same time.

    Attributes:
        llm: the engine behind: its tokenizer, max_model_len and page_size are there to be read.

    Raises:
        ValueError: llm is that of another rank than the first.

    Examples:
        >>> import asyncio
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> llm = torch_fdattn.engine.LLM(torch_fdattn.models.Transformer(config), pages=32)
        >>> async def main():
        ...     engine = torch_fdattn.engine.AsyncLLM(llm)
        ...     params = torch_fdattn.engine.SamplingParams(max_tokens=8)
        ...     async for output in engine.generate([5, 9, 33], params, "a"):
        ...         pass
        ...     await engine.close()
        ...     return len(output.outputs[0].token_ids)
        >>> asyncio.run(main())
        8
    """

    def __init__(self, llm: LLM) -> None:
        if llm.rank > 0:
            raise ValueError(
                f"llm must be that of rank 0, which alone takes requests, got that of rank {llm.rank} of {llm.num_ranks}: make a "
                "Follower of it"
            )
        self.llm, self._error = llm, None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[str, _Mailbox] = {}  # by request; of the thread alone
        self._waiting: set[_Mailbox] = set()  # all that are waited for
        self._has_ended = False
        self._lock = threading.Lock()  # of the two before
        self._compiler = ThreadPoolExecutor(1, "torch_fdattn grammars")
        self._grammar_numbers = itertools.count()
        self._followers = Followers(llm, self._end) if llm.num_ranks > 1 else None
        self._thread = threading.Thread(target=self._run, name="torch_fdattn engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as the request goes on, cumulative; the last one is finished.

        Closing the iterator (`aclose`, or cancelling what awaits it) aborts the request and frees its pages.

        Raises:
            PromptError, ValueError, TypeError: from the first `anext`: what `LLM.add_request` refuses.
            EngineDead: a step failed, a rank is lost, or the engine was closed.
        """
        number, grammar = None, None
        if params.is_structured:
            number = next(self._grammar_numbers)
            grammar = await self._compile(number, params)
        mailbox = _Mailbox()
        add = functools.partial(self._add, request_id, prompt, params, number, grammar, mailbox)
        self._send(add, mailbox)
        output = None
        try:
            while output is None or not output.finished:
                output = await mailbox.take()
                yield output
        finally:
            self._leave(mailbox)
            if output is None or not output.finished:
                with contextlib.suppress(EngineDead):
                    self._send(lambda: self._abort(request_id, mailbox))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator gets a last output, whose unfinished completions say "abort". Unknown ones are left
        alone. Its pages are free when this returns.

        Raises:
            EngineDead: as `generate`.
        """
        done = _Mailbox()

        def run() -> None:
            self._abort(request_id, None)
            self._put({done: None})

        self._send(run, done)
        try:
            await done.take()
        finally:
            self._leave(done)

    def stats(self) -> EngineStats:
        """What the engine does now and has done so far.

        Raises:
            EngineDead: a step failed, or a rank is lost.
        """
        if self._error is not None:
            raise self._dead()
        return self.llm.stats()

    async def close(self) -> None:
        """Ends the thread after its current step, and the other ranks; pending iterators get `EngineDead`."""
        with contextlib.suppress(EngineDead):
            self._send(None)
        self._compiler.shutdown(wait=False)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def _compile(self, number: int, params: SamplingParams) -> Matcher:
        """Not on the thread, where all others would wait for it; one after the other."""

        def run() -> Matcher:
            if self._has_ended:
                raise self._dead()
            return self.llm.compile_grammar(params)

        if (followers := self._followers) is not None:
            self._send(lambda: followers.compile(number, params))
        try:
            try:
                future = self._compiler.submit(run)
            except RuntimeError:  # it was shut down
                raise self._dead() from None
            return await asyncio.wrap_future(future)
        except BaseException:
            with contextlib.suppress(EngineDead):
                self._send(lambda: self._forget(number))
            raise

    def _send(self, command: Callable[[], None] | None, mailbox: _Mailbox | None = None) -> None:
        """To the thread; mailbox: where its result is waited for."""
        with self._lock:
            if self._has_ended:
                raise self._dead()
            if mailbox is not None:
                self._waiting.add(mailbox)
            self._commands.put(command)

    def _leave(self, mailbox: _Mailbox) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._waiting.discard(mailbox)

    def _dead(self) -> EngineDead:
        said = "the engine was closed"
        if self._error is not None:
            said = str(self._error) if isinstance(self._error, RankLost) else f"a step failed: {self._error!r}"  # fmt: skip
        error = EngineDead(said)
        error.__cause__ = self._error
        return error

    # What follows runs on the thread; _end where a rank is lost too, for which the thread may wait in vain.

    def _run(self) -> None:
        error = None
        try:
            if (device := self.llm.device).type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            with assume_equal_on_all_ranks():  # what rank 0 has sent to the others
                while self._obey():
                    if self._followers is not None:
                        self._followers.step()
                    self._deliver(self.llm.step())
        except Exception as raised:
            error = raised if self._followers is None else self._followers.cause_of(raised)
        self._end(error)
        for request_id in list(self._running):
            self._abort(request_id, None)
        self._running.clear()
        if self._followers is not None:
            self._followers.end(self._error)

    def _end(self, error: Exception | None) -> None:
        """The engine is dead: whoever waits for it, and whoever comes, is told so."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended, self._error = True, error
            _put_all({mailbox: self._dead() for mailbox in self._waiting})
            self._commands.put(None)  # the thread may wait for one
        if error is not None:
            told = None if isinstance(error, RankLost) else error
            _log.error("the engine ends: %s", error, exc_info=told)

    def _obey(self) -> bool:
        """Runs the commands that there are, and waits for one while there is no other work; False: it is to end."""
        while not (self._commands.empty() and self._has_work):
            if (command := self._commands.get()) is None:
                return False
            command()
        return True

    @property
    def _has_work(self) -> bool:
        has_commands = self._followers is not None and self._followers.has_commands
        return self.llm.has_unfinished or has_commands

    def _add(
        self, request_id: str, prompt: Prompt, params: SamplingParams, number: int | None,
        grammar: Matcher | None, mailbox: _Mailbox,
    ) -> None:  # fmt: skip
        """number: of the grammar."""
        try:
            self.llm.add_request(request_id, prompt, params, grammar)
        except Exception as error:  # the caller's: the engine goes on
            self._put({mailbox: error})
            if number is not None:
                self._forget(number)
            return
        self._running[request_id] = mailbox
        if self._followers is not None:
            self._followers.add(request_id, prompt, params, number)

    def _forget(self, number: int) -> None:
        if self._followers is not None:
            self._followers.forget(number)

    def _abort(self, request_id: str, mailbox: _Mailbox | None) -> None:
        """mailbox: None, or of the request that is meant: a later one may have its id."""
        if mailbox is not None and self._running.get(request_id) is not mailbox:
            return
        if (output := self.llm.abort(request_id)) is not None:
            if self._followers is not None:
                self._followers.abort(request_id)
            self._deliver([output])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        running = self._running
        mailboxes = [
            running.pop(x.request_id) if x.finished else running[x.request_id] for x in outputs
        ]
        self._put(dict(zip(mailboxes, outputs, strict=True)))

    def _put(self, results: dict[_Mailbox, _Result]) -> None:
        """Neither the engine's end nor a mailbox's last result is replaced by the other."""
        with self._lock:
            if self._has_ended:
                return
            _put_all(results)
            for mailbox, result in results.items():
                if not isinstance(result, RequestOutput) or result.finished:
                    self._waiting.discard(mailbox)


class _Mailbox:
    """The newest result of a request, from any thread (`_put_all`) to the coroutine that made this."""

    def __init__(self) -> None:
        self.loop, self.event = asyncio.get_running_loop(), asyncio.Event()
        self.results: deque[_Result] = deque(maxlen=1)

    async def take(self) -> RequestOutput | None:
        while not self.results:  # an event may be that of a result which was taken already
            await self.event.wait()
            self.event.clear()
        result = self.results.pop()
        if isinstance(result, Exception):
            raise result
        return result


def _put_all(results: dict[_Mailbox, _Result]) -> None:
    """Wakes each event loop once: to wake it is a system call, at which a thread hands Python's lock to the loop's."""
    events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for mailbox, result in results.items():
        mailbox.results.append(result)
        events.setdefault(mailbox.loop, []).append(mailbox.event)
    for loop, own in events.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_set_all, own)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
