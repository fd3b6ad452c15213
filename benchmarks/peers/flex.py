"""FlexAttention through torch.compile, its lse output off; block masks are made beforehand."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..decode_inputs import DecodeInputs
from ..shapes import AttentionCase, DecodeCase
from .base import Attention, DecodeCall, Implementation


class Flex(Implementation):
    name = "flex"
    forward_with_grad = True

    def session(self) -> contextlib.AbstractContextManager:
        import torch._functorch.config as functorch_config

        # Backward is timed alone on one saved graph, which compiled code refuses for donated
        # buffers.
        return functorch_config.patch(donated_buffer=False)

    def _compiled(self) -> Callable[..., Tensor]:
        from torch.nn.attention.flex_attention import flex_attention

        # Every case is a new shape of the same code: without a reset they run into the recompile
        # limit.
        torch._dynamo.reset()
        return torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        from torch.nn.attention.flex_attention import create_block_mask

        def causal(b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
            return q_index >= kv_index

        mask = None
        if case.causal:
            # Not compiled: at 16k the whole mask is 256 MiB of bool for a moment, compiling takes
            # longer.
            mask = create_block_mask(causal, None, None, case.seq_len, case.seq_len, device=device)
        flex, gqa = self._compiled(), case.heads != case.kv_heads
        return lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=gqa)

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        from torch.nn.attention.flex_attention import create_block_mask

        # Pages exist only as torch's experimental PagedAttention, for pages as large as a mask block.
        self.refuse(case, paged=True, cache=True)
        kv_lens, mask = copies[0].kv_lens, None

        def valid(b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
            return kv_index < kv_lens[b]

        if case.ragged is not None:
            mask = create_block_mask(valid, case.batch, None, 1, case.kv_len, device=kv_lens.device)
        flex, gqa = self._compiled(), case.heads != case.kv_heads
        return [
            functools.partial(flex, x.q, x.k, x.v, block_mask=mask, enable_gqa=gqa) for x in copies
        ]
