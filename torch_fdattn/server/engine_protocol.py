"""What the server asks of an engine: `torch_fdattn.engine.AsyncLLM` as it is, or a test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from torch_fdattn.engine.outputs import EngineStats, RequestOutput
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.models import Tokenizer


class Model(Protocol):
    """The synchronous engine behind, of which the server reads these attributes."""

    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    page_size: int


class AsyncEngine(Protocol):
    """Requests that come and go; each method may raise `EngineDead`."""

    llm: Model

    def generate(
        self, prompt: str | list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Cumulative outputs; closing the iterator ends the request and frees its pages."""

    async def abort(self, request_id: str) -> None:
        """Ends a request: what its iterator gives last says "abort". Unknown ones are left alone."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
