"""An engine without a model: it writes a text that the test decides, a character a token, and counts pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from torch_fdattn.engine.async_llm import EngineDead
from torch_fdattn.engine.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.models import Tokenizer

#: Of Qwen3's form: tools, thoughts, and a variable of its own.
TEMPLATE = """{%- if tools %}{{- '<tools>' + (tools | tojson) + '</tools><tool_call>JSON</tool_call>\\n' }}{%- endif %}
{%- for message in messages %}{{- message.role + ': ' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""


class CharacterTokenizer(Tokenizer):
    """A token is a code point."""

    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1, *map(ord, text)] if add_special_tokens else list(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i > 1)

    def id_of(self, token: str) -> int | None:
        return ord(token) if len(token) == 1 else None


class FakeLLM:
    def __init__(self, chat_template: str | None, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = CharacterTokenizer(chat_template), max_model_len
        self.page_size, self.vocab_size = FakeEngine.PAGE_SIZE, 0x110000


class FakeEngine:
    """Interface of AsyncLLM.

    Args:
        reply: from the prompt's text to the completion's; the k-th of n gets k stars in front.
        delay: seconds a token.
    """

    PAGE_SIZE = 16

    def __init__(
        self, reply: Callable[[str], str] = lambda prompt: prompt[::-1], *, delay: float = 0.0,
        chat_template: str | None = TEMPLATE, max_model_len: int = 4096, num_pages: int = 1 << 20,
    ) -> None:  # fmt: skip
        self.llm = FakeLLM(chat_template, max_model_len)
        self.reply, self.delay, self.num_pages = reply, delay, num_pages
        self.pages: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.num_generated = self.num_prompt = 0
        self.is_closed = False
        self.raises: Exception | None = None  # in place of an answer
        self._dead = asyncio.Event()

    def kill(self) -> None:
        self._dead.set()

    async def abort(self, request_id: str) -> None:
        self._check_alive()
        self.aborted.add(request_id)

    async def generate(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        self._check_alive()
        if self.raises is not None:
            raise self.raises
        if not all(0 <= x < self.llm.vocab_size for x in prompt):
            raise ValueError(f"prompt must hold token ids from 0 to {self.llm.vocab_size - 1}")
        self.seen.append((prompt, params))
        self.num_prompt += len(prompt)
        text = self.reply(self.llm.tokenizer.decode(prompt))
        if params.json_schema is not None:
            text = '{"answer": 4}'
        texts = ["*" * k + text for k in range(params.n)]
        output = RequestOutput(
            request_id, list(prompt), None, [CompletionOutput(k, token_ids=[]) for k in range(params.n)]
        )  # fmt: skip
        try:
            while not output.finished:
                self.pages[request_id] = sum(
                    -(-(len(prompt) + len(x.token_ids)) // self.PAGE_SIZE) for x in output.outputs
                )
                await self._step()
                if request_id in self.aborted:
                    for completion in output.outputs:
                        completion.finish_reason = completion.finish_reason or "abort"
                for completion, target in zip(output.outputs, texts, strict=True):
                    if completion.finish_reason is None:
                        self._advance(completion, target, params)
                output.finished = all(x.finish_reason for x in output.outputs)
                yield output
        finally:
            self.pages.pop(request_id, None)

    def _advance(self, output: CompletionOutput, target: str, params: SamplingParams) -> None:
        at = len(output.token_ids)
        if at < len(target):
            token = ord(target[at])
            output.token_ids = [*output.token_ids, token]
            output.text = target[: at + 1]
            self.num_generated += 1
            if params.logprobs is not None:
                others = {
                    x: Logprob(-1.0 - k, k + 2, chr(x)) for k, x in enumerate(range(48, 48 + 5))
                }
                chosen = {token: Logprob(-0.5, 1, chr(token))}
                kept = dict(list((chosen | others).items())[: max(1, params.logprobs)])
                output.logprobs = [*(output.logprobs or []), kept]
        for stop in params.stop:
            if stop in output.text:
                output.text, output.finish_reason = output.text.partition(stop)[0], "stop"
        if output.finish_reason is None and len(output.token_ids) >= len(target):
            output.finish_reason = "stop"
        if output.finish_reason is None and len(output.token_ids) >= params.max_tokens:
            output.finish_reason = "length"

    async def _step(self) -> None:
        if self.delay:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dead.wait(), self.delay)
        else:
            await asyncio.sleep(0)
        self._check_alive()

    def _check_alive(self) -> None:
        if self._dead.is_set():
            raise EngineDead("a rank was killed")

    def stats(self) -> EngineStats:
        self._check_alive()
        return EngineStats(
            len(self.pages), 0, sum(self.pages.values()), self.num_pages, self.num_prompt, self.num_generated, 0, 0, 0,
            proposed_tokens=5, accepted_tokens=2,
        )  # fmt: skip

    async def close(self) -> None:
        self.is_closed = True
