"""attention_fp8 beside our attention in bf16 and FlashAttention-3's fp8: forward TFLOP/s, and errors against fp64.

Quantising is not timed: a model would write q, k and v in fp8. Errors are of the last sequence's last KV head, relative
to the norm of exact attention of the quantised numbers; bf16's are of the numbers before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .exact import HeadSlice, exact_attention
from .ranks import Ranks
from .results import Recorder
from .runner import DTYPES, Run, chosen_cases, generator
from .shapes import AttentionCase

OURS, BF16, FA3 = "fdattn/fp8", "fdattn", "fa3_fp8"  # the names in the results


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    run = Run.of(options, ranks, recorder)
    run.cases(chosen_cases(options), lambda case, _: measure(run, case))
    return True


@torch.no_grad()
def measure(run: Run, case: AttentionCase) -> None:
    samplers: dict[str, Callable[[], float]] = {}
    for name, call, exact in _calls(case, run.timer.device):
        with run.guard(case.name, name, "first call"):
            found = HeadSlice(case.heads // case.kv_heads).queries(call())
            error = (found.double() - exact).norm() / exact.norm()
            run.recorder.add(case.name, name, "rel_err", error.item())
            samplers[name] = run.timer.sampler(call)
    run.record(case.name, "fwd_TFLOPs", samplers, lambda us: case.forward_flops / us / 1e6)


def _calls(
    case: AttentionCase, device: torch.device
) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """Names, calls that return (B, H, S, D), and what is exact of the last head."""
    import torch_fdattn

    made, dtype = generator(device, 0), DTYPES[case.dtype]
    heads = (case.heads, case.kv_heads, case.kv_heads)
    inputs = [
        torch.randn(
            case.batch, n, case.seq_len, case.head_dim, generator=made, device=device, dtype=dtype
        )
        for n in heads
    ]
    stored, scales = zip(*map(torch_fdattn.quantise_per_head, inputs), strict=True)
    dequantised = [
        x.float() * scale[..., None, None] for x, scale in zip(stored, scales, strict=True)
    ]
    exact, exact_of_stored = (_exact(case, *tensors) for tensors in (inputs, dequantised))

    def ours() -> Tensor:
        return torch_fdattn.attention_fp8(*stored, *scales, causal=case.causal)[0]

    yield OURS, ours, exact_of_stored
    yield BF16, lambda: torch_fdattn.attention(*inputs, causal=case.causal)[0], exact
    yield FA3, _flash_attention_3(case, stored, scales), exact_of_stored


def _exact(case: AttentionCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    part = HeadSlice(case.heads // case.kv_heads)
    return exact_attention(part.queries(q), part.keys(k), part.keys(v), causal=case.causal).out


def _flash_attention_3(
    case: AttentionCase, stored: tuple[Tensor, ...], scales: tuple[Tensor, ...]
) -> Callable[[], Tensor]:
    """Its scales are of KV heads: those of q's groups must be equal, so cases have none."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in stored)
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))

    def call() -> Tensor:
        from flash_attn_interface import flash_attn_func

        out = flash_attn_func(q, k, v, causal=case.causal, **descales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call
