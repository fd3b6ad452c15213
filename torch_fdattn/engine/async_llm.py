"""`LLM` behind coroutines: one thread steps it, any number of iterators wait for their outputs.

Iterators and the thread share two things: a queue of commands to the thread, and a mailbox for each request, which holds
the newest output alone. Outputs are cumulative, so a slow reader misses nothing but intermediate states, and takes no
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from torch_fdattn.engine.llm import LLM, Prompt
from torch_fdattn.engine.outputs import EngineStats, RequestOutput
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.engine.structured import Matcher

_log = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The engine's thread has ended, by an error in a step (`__cause__`) or by `AsyncLLM.close`.

    Examples:
        >>> issubclass(torch_fdattn.engine.EngineDead, RuntimeError)
        True
    """


class AsyncLLM:
    """Requests to an `LLM` from coroutines of one or several event loops.

    Args:
        llm: nobody else uses it from here on.

    Attributes:
        llm: the engine behind: its tokenizer, max_model_len and page_size are there to be read.

    Raises:
        NotImplementedError: llm runs on several ranks, where requests would come between other steps.

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
        if llm.num_ranks > 1:
            raise NotImplementedError(
                f"llm must run on one process, got one of {llm.num_ranks} ranks, on each of which requests would come "
                "between other steps: make the same calls of LLM itself on all of them"
            )
        self.llm, self._error = llm, None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}  # of the thread alone
        self._ended = False
        self._compiler = ThreadPoolExecutor(1, "torch_fdattn grammars")
        self._lock = threading.Lock()  # between the thread's end and those who send to it
        self._thread = threading.Thread(target=self._run, name="torch_fdattn engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as the request goes on, cumulative; the last one is finished.

        Closing the iterator (`aclose`, or cancelling what awaits it) aborts the request and frees its pages.

        Raises:
            PromptError, ValueError, TypeError: from the first `anext`: what `LLM.add_request` refuses.
            EngineDead: a step failed, or the engine was closed.
        """
        grammar = None
        if params.is_structured:
            grammar = await self._compile(params)
        mailbox = _Mailbox()
        self._send(lambda: self._add(request_id, prompt, params, grammar, mailbox))
        output = None
        try:
            while output is None or not output.finished:
                output = await mailbox.take()
                yield output
        finally:
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
            done.put(None)

        self._send(run)
        await done.take()

    def stats(self) -> EngineStats:
        """What the engine does now and has done so far.

        Raises:
            EngineDead: a step failed.
        """
        if self._error is not None:
            raise self._dead()
        return self.llm.stats()

    async def close(self) -> None:
        """Ends the thread after its current step; pending iterators get `EngineDead`."""
        with contextlib.suppress(EngineDead):
            self._send(None)
        self._compiler.shutdown(wait=False)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def _compile(self, params: SamplingParams) -> Matcher:
        """Not on the thread, where all others would wait for it; one after the other."""

        def run() -> Matcher:
            if self._ended:
                raise self._dead()
            return self.llm.compile_grammar(params)

        try:
            future = self._compiler.submit(run)
        except RuntimeError:  # it was shut down
            raise self._dead() from None
        return await asyncio.wrap_future(future)

    def _send(self, command: Callable[[], None] | None) -> None:
        with self._lock:
            if self._ended:
                raise self._dead()
            self._commands.put(command)

    def _dead(self) -> EngineDead:
        error = EngineDead(
            "the engine was closed" if self._error is None else f"a step failed: {self._error!r}"
        )
        error.__cause__ = self._error
        return error

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            if (device := self.llm.device).type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            while self._obey():
                for output in self.llm.step():
                    self._deliver(output.request_id, output)
        except Exception as error:
            self._error = error
            _log.error("the engine ends: a step failed", exc_info=error)
        with self._lock:
            self._ended = True
        pending = list(self._mailboxes)
        for request_id in pending:
            self._deliver(request_id, self._dead())
        while not self._commands.empty():  # their mailboxes must learn of it too
            if (command := self._commands.get()) is not None:
                command()
        for request_id in pending:
            self.llm.abort(request_id)

    def _obey(self) -> bool:
        """Runs the commands that there are, and waits for one while there is no other work; False: it is to end."""
        while not (self._commands.empty() and self.llm.has_unfinished):
            if (command := self._commands.get()) is None:
                return False
            command()
        return True

    def _add(
        self, request_id: str, prompt: Prompt, params: SamplingParams, grammar: Matcher | None,
        mailbox: _Mailbox,
    ) -> None:  # fmt: skip
        if self._ended:
            mailbox.put(self._dead())
            return
        try:
            self.llm.add_request(request_id, prompt, params, grammar)
        except Exception as error:  # the caller's: the engine goes on
            mailbox.put(error)
        else:
            self._mailboxes[request_id] = mailbox

    def _abort(self, request_id: str, mailbox: _Mailbox | None) -> None:
        """mailbox: None, or of the request that is meant: a later one may have its id."""
        if mailbox is not None and self._mailboxes.get(request_id) is not mailbox:
            return
        if (output := self.llm.abort(request_id)) is not None:
            self._deliver(request_id, output)

    def _deliver(self, request_id: str, result: RequestOutput | EngineDead) -> None:
        finished = isinstance(result, EngineDead) or result.finished
        mailbox = self._mailboxes.pop(request_id) if finished else self._mailboxes[request_id]
        mailbox.put(result)


class _Mailbox:
    """The newest result of a request, from any thread to the coroutine that made this."""

    def __init__(self) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        self._results: deque[RequestOutput | Exception | None] = deque(maxlen=1)

    def put(self, result: RequestOutput | Exception | None) -> None:
        self._results.append(result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def take(self) -> RequestOutput | None:
        while not self._results:  # an event may be that of a result which was taken already
            await self._event.wait()
            self._event.clear()
        result = self._results.pop()
        if isinstance(result, Exception):
            raise result
        return result
