"""Requests on their way through the engine: admission, prompts of one request side by side, times, failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

from torch_fdattn.engine.async_llm import EngineDead
from torch_fdattn.engine.outputs import EngineStats, RequestOutput
from torch_fdattn.engine.prompts import PromptError, check_params, prompt_tokens
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.models import MissingExtra, ModelError
from torch_fdattn.server.engine_protocol import AsyncEngine
from torch_fdattn.server.errors import APIError, internal_error
from torch_fdattn.server.metrics import Metrics
from torch_fdattn.server.options import ServerOptions
from torch_fdattn.server.sampling import field_error

DEAD = "the engine has failed and the server ends: send the request to another one, or later"


class Service:
    """One engine behind one application.

    Attributes:
        is_draining: the server ends, and takes no more requests.
        on_dead: called each time that the engine is seen to have failed.
    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.tokenizer = engine.llm.tokenizer
        # What the pages can hold; a sequence's last token is not stored.
        capacity = engine.stats().pages_total * engine.llm.page_size + 1
        self.max_model_len = min(engine.llm.max_model_len, capacity)
        self.metrics = Metrics(self.stats)
        self.is_draining = False
        self.on_dead: Callable[[], None] = lambda: None
        self.num_sequences = 0  # in progress
        self._request_ids: set[str] = set()  # in progress, as the engine has them

    def stats(self) -> EngineStats | None:
        """None: the engine has failed."""
        try:
            return self.engine.stats()
        except EngineDead:
            self.on_dead()
            return None

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.options.model_name:
            raise APIError(
                404, f"model must be {self.options.model_name}, got {name}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def check_count(self, n: int | None, num_prompts: int = 1) -> None:
        """Before anything is made for each of them. An n that is none is refused with the other parameters."""
        limit = self.options.max_sequences
        if num_prompts > limit:
            raise APIError(400, f"prompt must hold at most {limit} prompts, got {num_prompts}", param="prompt")  # fmt: skip
        if (n or 1) * num_prompts > limit:
            raise APIError(
                400, f"n times the number of prompts must be at most {limit}, got {n} times {num_prompts}: "
                "ask for fewer in one request", param="n",
            )  # fmt: skip

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, made outside of the event loop, which a long text would hold up."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise APIError(400, f"{param} must be Unicode text, got half of a surrogate pair", param=param) from None  # fmt: skip
        try:
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
        except ModelError as error:
            raise APIError(400, f"{param} must be a text that the tokenizer takes: {error}", param=param) from None  # fmt: skip

    def check_prompt(self, ids: Sequence[int], param: str) -> None:
        limit = self.max_model_len - 1  # a token is to follow
        if self.options.max_prompt_tokens is not None:
            limit = min(limit, self.options.max_prompt_tokens)
        if not ids:
            raise APIError(400, f"{param} must have at least one token, got none", param=param)
        if len(ids) > limit:
            raise APIError(
                400, f"{param} must have at most {limit} tokens, got {len(ids)}: shorten it", param=param,
                code="context_length_exceeded",
            )  # fmt: skip
        try:
            prompt_tokens(ids, None, self.engine.llm.vocab_size, param)
        except PromptError as error:
            raise APIError(400, str(error), param=param) from None

    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        request_id: str,
        names: Mapping[str, str],
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, its cumulative output) as they come; closing it ends all of them.

        prompts: each has passed `check_prompt`.
        params: of each prompt, alike but for max_tokens.
        names: of the request's fields, by the engine's arguments, where they differ.

        Raises:
            APIError: 400 for what the engine refuses or cannot go on with, 429 where too much is in progress, 503 where the
                engine has failed or the server ends.
        """
        if self.is_draining:
            raise APIError(503, "the server ends and takes no more requests")
        try:  # the engine refuses a prompt when it adds it, and others may have begun by then
            eos_ids = () if self.tokenizer is None else self.tokenizer.eos_ids
            check_params(params[0], self.engine.llm.vocab_size, eos_ids, self.tokenizer is not None)
        except ValueError as error:
            raise field_error(error, names) from None
        sequences = sum(x.n for x in params)
        if self.num_sequences + sequences > self.options.max_sequences:
            raise APIError(
                429, f"{self.num_sequences} sequences of at most {self.options.max_sequences} are in progress: "
                "try again later",
                code="rate_limit_exceeded", headers={"Retry-After": "1"},
            )  # fmt: skip
        self.num_sequences += sequences
        ids = [f"{request_id}-{i}" for i in range(len(prompts))]
        self._request_ids.update(ids)
        sources = [
            self._timed(self.engine.generate(prompt, options, own_id))
            for prompt, options, own_id in zip(prompts, params, ids, strict=True)
        ]
        has_begun = False
        try:
            async with aclosing(_merged(sources)) as outputs:
                async for index, output in outputs:
                    has_begun = True
                    for completion in output.outputs:
                        if completion.finish_reason == "error":
                            raise field_error(ValueError(completion.error), names)
                    yield index, output
        except EngineDead:
            self.on_dead()
            raise APIError(503, DEAD) from None
        except (ValueError, NotImplementedError, MissingExtra) as error:
            raise (internal_error(error) if has_begun else field_error(error, names)) from None
        finally:
            self.num_sequences -= sequences
            self._request_ids.difference_update(ids)

    async def end_answers(self) -> None:
        """Ends what is in progress: clients get 503, or an error event where their answer has begun."""
        for request_id in tuple(self._request_ids):
            with suppress(EngineDead):
                await self.engine.abort(request_id)

    async def _timed(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """The outputs, measured as a client sees them."""
        start = before = time.monotonic()
        num_tokens = 0
        try:
            async for output in outputs:
                now, total = time.monotonic(), sum(len(x.token_ids) for x in output.outputs)
                if total > num_tokens:
                    if num_tokens == 0:
                        self.metrics.first_token.observe(now - start)
                    else:  # n sequences have each a token in a step
                        steps = max(1, (total - num_tokens) // len(output.outputs))
                        self.metrics.inter_token.observe((now - before) / steps)
                    num_tokens, before = total, now
                yield output
            self.metrics.request.observe(time.monotonic() - start)
        finally:
            await outputs.aclose()


async def _merged(sources: list[AsyncIterator]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """What several iterators give, as it comes; all are closed at the end, and at the first error."""
    if len(sources) == 1:  # the rule: without a task for each output
        async with aclosing(sources[0]) as source:
            async for output in source:
                yield 0, output
        return
    tasks = {asyncio.ensure_future(anext(source)): i for i, source in enumerate(sources)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.get):
                i = tasks.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                yield i, output
                tasks[asyncio.ensure_future(anext(sources[i]))] = i
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            await source.aclose()
