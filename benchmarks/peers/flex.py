"""FlexAttention through torch.compile, its lse output off; block masks are made beforehand."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import features
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

        if case.feature == "dropout":
            raise NotImplementedError("flex has no dropout")
        extras, length = features.extras_of(case, device), case.seq_len
        _, bias, slopes, sinks, window, cu_seqlens, kv_lens = extras
        document = extras.documents(length) if cu_seqlens is not None else None

        def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if bias is not None:
                return score + bias[0, h, q, k]
            if slopes is not None:
                return score - slopes[h] * (q - k)
            return features.SOFTCAP * torch.tanh(score / features.SOFTCAP)

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if document is not None:
                return (q >= k) & (document[q] == document[k])
            if kv_lens is not None:
                return (q >= k) & (k < kv_lens[0])
            return (q >= k) if window is None else (q >= k) & (q - k < window)

        mask = None
        if case.causal:
            # Not compiled: at 16k the whole mask is 256 MiB of bool for a moment, compiling takes longer.
            mask = create_block_mask(seen, None, None, length, length, device=device)
        modifies = bias is not None or slopes is not None or case.feature == "softcap"
        options = dict(block_mask=mask, enable_gqa=case.heads != case.kv_heads)
        options |= dict(score_mod=modified) if modifies else {}
        flex = self._compiled()
        if sinks is None:
            return lambda q, k, v: flex(q, k, v, **options)

        def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = flex(q, k, v, return_lse=True, **options)
            return out * torch.sigmoid(lse - sinks[:, None]).to(out.dtype)[..., None]

        return with_sinks

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
