"""The implementations that are compared: ours and each peer behind one small adapter.

An adapter gives a function of (q, k, v) for a case; what it needs to prepare (a compiled function,
a block mask) is prepared before anything is timed. `available` gives the reason why it cannot run
here, or None; a peer that was asked for and cannot run becomes an error row, never a gap.

Peers are called the way their users are told to call them: SDPA under `sdpa_kernel` with
enable_gqa, FlexAttention compiled with a block mask for causal, FlashAttention-3 in its own (B, S,
H, D) memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import AttentionCase, DecodeCase

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Decode = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Implementation:
    """One way to compute attention."""

    name = ""
    memory = "BHSD"  # or BSHD: the order of dimensions in memory that it is meant for
    differentiable = True
    # Time forward with gradients on even alone: for those that would compile a second time without.
    forward_with_grad = False

    def available(self, device: torch.device) -> str | None:
        """Why it cannot run on `device`, or None."""
        return None if device.type == "cuda" else "needs a CUDA device"

    def session(self) -> contextlib.AbstractContextManager:
        """State that its calls need; entered around timing, so no part of host time."""
        return contextlib.nullcontext()

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        raise NotImplementedError(f"{self.name} has no prefill adapter")

    def decode(self, case: DecodeCase, device: torch.device) -> Decode:
        raise NotImplementedError(f"{self.name} has no decode adapter")


class Fdattn(Implementation):
    """Ours, through the public entry points, lse included; decode is given lengths."""

    name = "fdattn"

    def available(self, device: torch.device) -> str | None:
        try:
            import torch_fdattn  # noqa: F401
        except ImportError as failure:
            return f"torch_fdattn does not import: {failure}"
        return None

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        from torch_fdattn import attention

        return lambda q, k, v: attention(q, k, v, causal=case.causal)[0]

    def decode(self, case: DecodeCase, device: torch.device) -> Decode:
        from torch_fdattn import decode

        return lambda q, k, v, kv_lens: decode(q, k, v, kv_lens)[0]


class Sdpa(Implementation):
    """scaled_dot_product_attention held to one of torch's backends."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = name
        self._backend = backend

    def session(self) -> contextlib.AbstractContextManager:
        return sdpa_kernel(self._backend)

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        gqa = case.heads != case.kv_heads
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, enable_gqa=gqa
        )

    def decode(self, case: DecodeCase, device: torch.device) -> Decode:
        gqa = case.heads != case.kv_heads
        return lambda q, k, v, kv_lens: F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)


class Flex(Implementation):
    """FlexAttention through torch.compile, its lse output off."""

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

    def decode(self, case: DecodeCase, device: torch.device) -> Decode:
        flex, gqa = self._compiled(), case.heads != case.kv_heads
        return lambda q, k, v, kv_lens: flex(q, k, v, enable_gqa=gqa)


class FlashAttention3(Implementation):
    """FlashAttention-3 where its wheel is installed: forward only."""

    name = "fa3"
    memory = "BSHD"
    differentiable = False

    def available(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("flash_attn_interface") is None:
            return "flash_attn_interface is not installed"
        return super().available(device)

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        from flash_attn_interface import flash_attn_func

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return _first(flash_attn_func(q, k, v, causal=case.causal)).transpose(1, 2)

        return call

    def decode(self, case: DecodeCase, device: torch.device) -> Decode:
        from flash_attn_interface import flash_attn_with_kvcache

        def call(q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = flash_attn_with_kvcache(q, k, v, cache_seqlens=kv_lens)
            return _first(out).transpose(1, 2)

        return call


class Eager(Implementation):
    """The formula in plain torch: scores in memory, softmax in fp32."""

    name = "eager"

    def available(self, device: torch.device) -> str | None:
        return None

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        scores = case.batch * case.heads * case.seq_len**2
        # Scores, fp32 softmax, probabilities and their gradients, as counted on one forward +
        # backward.
        needed = scores * 16
        if device.type == "cuda" and needed > torch.cuda.mem_get_info(device)[0]:
            raise MemoryError(f"the N×N scores need about {needed / 2**30:.0f} GiB")
        mask = None
        if case.causal:
            ones = torch.ones(case.seq_len, case.seq_len, dtype=torch.bool, device=device)
            mask = ones.triu(1)
        return lambda q, k, v: _formula(q, k, v, mask)

    def decode(self, case: DecodeCase, device: torch.device) -> Decode:
        return lambda q, k, v, kv_lens: _formula(q, k, v, None)


def _formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    batch, _, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, queries, head_dim)
    scores = (grouped @ k.unsqueeze(2).transpose(-1, -2)) * head_dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return (weights @ v.unsqueeze(2)).reshape(q.shape)


def _first(out: Tensor | tuple) -> Tensor:
    """FA3's functions return (out, lse, ...) in some versions and out alone in others."""
    return out[0] if isinstance(out, tuple) else out


OURS = Fdattn()
PEERS: dict[str, Implementation] = {
    peer.name: peer
    for peer in (
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("fa2", SDPBackend.FLASH_ATTENTION),
        Flex(),
        FlashAttention3(),
        Eager(),
    )
}


def chosen(names: str) -> tuple[Implementation, ...]:
    """Ours and the comma-separated peers; `all` and `none` are understood."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == ["all"]:
        wanted = list(PEERS)
    elif wanted == ["none"]:
        wanted = []
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise ValueError(f"--vs must name peers of {sorted(PEERS)}, got {', '.join(unknown)}")
    return (OURS, *(PEERS[name] for name in dict.fromkeys(wanted)))
