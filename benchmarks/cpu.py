"""Attention of CPU tensors: our ops beside torch's SDPA in eager calls, `backend="fdattn"` beside Inductor alone.

    causal, full      SDPA's own
    padded            four sequences, of n, 3n/4, n/2 and n/4 keys: SDPA by a boolean mask, ours by lengths
    window            the last 256 keys: SDPA by a boolean mask, ours by `window`
    varlen            documents packed one after the other: SDPA for each, ours by `varlen_attention`
    decode, paged     one query; pages are gathered for SDPA, which gets a mask of the lengths

Compiled, both backends get the code that calls SDPA; of varlen and paged the call of our own op is a third. A step is
forward and backward. Outputs must agree, or there is an error in place of figures.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .features import DOCUMENTS
from .ranks import Ranks
from .results import Recorder
from .runner import DTYPES, Run, chosen_cases, generator
from .shapes import CpuCase

WINDOW, PAGE = 256, 16
#: Keys up to which a step is measured, and the time of one sample.
STEP_KEYS, SAMPLE_US = 1024, 30e3
OURS, OUR_OP, EAGER, COMPILED = (
    "fdattn",
    "fdattn_op",
    "sdpa",
    "inductor",
)  # the names in the results


class Calls(NamedTuple):
    """The same attention as SDPA and as ours writes it, of q, k and v, which are `inputs`."""

    inputs: tuple[Tensor, ...]
    torchs: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    own_op: bool = False  #: whether a compiled program would rather call ours than SDPA


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    recorder.results.meta["gpu"] = processor()
    run = Run.of(options, ranks, recorder)
    run.cases(chosen_cases(options), lambda case, _: measure(run, case))
    return True


def processor() -> str:
    """What it is, its instructions, and the threads that torch uses."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"CPU {name} {capability} {torch.get_num_threads()} threads"


def measure(run: Run, case: CpuCase) -> None:
    torch._dynamo.reset()
    calls = calls_of(case)
    with torch.no_grad():
        eager = {EAGER: calls.torchs, OURS: calls.ours}
        _record(run, case, "eager_us", eager, calls.inputs)
        compiled = {
            COMPILED: torch.compile(calls.torchs, fullgraph=True),
            OURS: torch.compile(calls.torchs, backend="fdattn", fullgraph=True),
        }
        if calls.own_op:
            compiled[OUR_OP] = torch.compile(calls.ours, backend="fdattn", fullgraph=True)
        _record(run, case, "compiled_us", compiled, calls.inputs)
    if case.queries > 1 and case.kv_len <= STEP_KEYS:
        inputs = tuple(x.requires_grad_() for x in calls.inputs)
        steps = {name: functools.partial(_step, call) for name, call in eager.items()}
        _record(run, case, "step_ms", steps, inputs, 1e-3)


def _step(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    out = call(*inputs)
    torch.autograd.grad(out.sum(), inputs)
    return out.detach()


def _record(
    run: Run, case: CpuCase, metric: str, calls: dict[str, Callable], inputs: tuple, scale: float = 1.0
) -> None:  # fmt: skip
    samplers: dict[str, Callable[[], float]] = {}
    expected: Tensor | None = None
    for name, call in calls.items():
        with run.guard(case.name, name, metric):
            found = call(*inputs).float()
            expected = found if expected is None else expected
            error = ((found - expected).norm() / expected.norm()).item()
            if not error < (1e-4 if case.dtype == "fp32" else 2e-2):
                raise ValueError(f"differs from SDPA by {error:.3g} of its norm")
            samplers[name] = _sampler(run, functools.partial(call, *inputs))
    run.record(case.name, metric, samplers, lambda us: us * scale)


def _sampler(run: Run, call: Callable[[], object]) -> Callable[[], float]:
    """The median of as many single calls as `SAMPLE_US` holds."""
    run.timer.each_us(call, 2)
    count = max(1, round(SAMPLE_US / min(run.timer.each_us(call, 3))))
    return lambda: statistics.median(run.timer.each_us(call, min(count, 200)))


def calls_of(case: CpuCase) -> Calls:
    made = generator(torch.device("cpu"), 0)
    dtype, grouped = DTYPES[case.dtype], case.heads != case.kv_heads

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(case.batch, heads, length, case.head_dim, generator=made, dtype=dtype)

    q = normal(case.heads, case.queries)
    k, v = normal(case.kv_heads, case.kv_len), normal(case.kv_heads, case.kv_len)
    return _KINDS[case.kind](case, q, k, v, functools.partial(sdpa, enable_gqa=grouped))


def _plain(case: CpuCase, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> Calls:
    import torch_fdattn

    causal = case.kind == "causal"
    return Calls(
        (q, k, v),
        lambda q, k, v: attend(q, k, v, is_causal=causal),
        lambda q, k, v: torch_fdattn.attention(q, k, v, causal=causal)[0],
    )


def _padded(case: CpuCase, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> Calls:
    import torch_fdattn

    lens, seen = _lengths(case)
    return Calls(
        (q, k, v),
        lambda q, k, v: attend(q, k, v, attn_mask=seen),
        lambda q, k, v: torch_fdattn.attention(q, k, v, lens)[0],
    )


def _window(case: CpuCase, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> Calls:
    import torch_fdattn

    width = min(WINDOW, case.kv_len // 2)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(case.kv_len)
        distance = at[:, None] - at
        return attend(q, k, v, attn_mask=(distance >= 0) & (distance < width))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_fdattn.attention(q, k, v, causal=True, window=(width - 1, 0))[0]

    return Calls((q, k, v), torchs, ours)


def _varlen(case: CpuCase, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> Calls:
    import torch_fdattn

    ends = [0, *(round(part * case.kv_len) for part in DOCUMENTS)]
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    begins = torch.tensor(ends, dtype=torch.int32)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))  # (T, H, D)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        outs = [attend(*(x.transpose(0, 1)[None] for x in each), is_causal=True) for each in documents]  # fmt: skip
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_fdattn.varlen_attention(q, k, v, begins, causal=True)[0]

    return Calls((q, k, v), torchs, ours, own_op=True)


def _decode(case: CpuCase, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> Calls:
    import torch_fdattn

    return Calls((q, k, v), attend, lambda q, k, v: torch_fdattn.decode(q, k, v)[0])


def _paged(case: CpuCase, q: Tensor, k: Tensor, v: Tensor, attend: Callable) -> Calls:
    import torch_fdattn

    page = min(PAGE, case.kv_len // 3)
    pages = case.kv_len // page
    order = torch.randperm(case.batch * pages, generator=generator(torch.device("cpu"), 1))
    table = order.view(case.batch, pages).to(torch.int32)
    lens, seen = _lengths(case)

    def as_pages(x: Tensor) -> Tensor:  # (pages, H_kv, page, D), in the table's order
        split = x.unflatten(2, (pages, page)).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(split).index_copy_(0, order, split)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in (k, v))
        return attend(q, k, v, attn_mask=seen)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_fdattn.paged_decode(q, k, v, table, lens)[0]

    return Calls((q, as_pages(k), as_pages(v)), torchs, ours, own_op=True)


def _lengths(case: CpuCase) -> tuple[Tensor, Tensor]:
    """kv_lens of the four sequences, and the mask (B, 1, 1, N) that says the same."""
    lens = torch.tensor([case.kv_len * part // 4 for part in (4, 3, 2, 1)], dtype=torch.int32)
    return lens, (torch.arange(case.kv_len) < lens[:, None])[:, None, None]


_KINDS: dict[str, Callable[..., Calls]] = {
    "causal": _plain,
    "full": _plain,
    "padded": _padded,
    "window": _window,
    "varlen": _varlen,
    "decode": _decode,
    "paged": _paged,
}
