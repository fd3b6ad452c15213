"""Decode: one query token against a cache. Time in a CUDA graph, eager, on the host; GB/s; error.

Memory-bound, so the floor is a kernel that only reads K and V, timed on the same rotated inputs.
Ours gets its lengths as a tensor on the device, as an engine calls it. Errors are of the last
sequence's last KV head against fp64. On a CPU there are no graphs and no floor: only eager and host
time are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import PURE_READ, DecodeCase
from .exact import HeadSlice, exact_attention, max_abs_err
from .floors import best_pure_read
from .peers import Implementation
from .runner import DTYPES, Run, generator
from .timing import RotatedGraph, calls_within, copies_needed

HOST_CALLS = 40  # few enough never to fill the launch queue


@dataclass(frozen=True)
class Copies:
    """The rotated inputs: stacked on a first dimension, one copy each."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv_lens: Tensor

    @classmethod
    def make(cls, case: DecodeCase, device: torch.device, copies: int) -> Copies:
        made = generator(device, 0)
        dtype = DTYPES[case.dtype]
        q_shape = (copies, case.batch, case.heads, 1, case.head_dim)
        kv_shape = (copies, case.batch, case.kv_heads, case.kv_len, case.head_dim)
        q, k, v = (
            torch.randn(shape, generator=made, device=device, dtype=dtype)
            for shape in (q_shape, kv_shape, kv_shape)
        )
        lens = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=device)
        return cls(q, k, v, lens)

    def laid_out(self, memory: str) -> Copies:
        """These inputs with K and V in another order of dimensions in memory."""
        if memory == "BHSD":
            return self
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (self.q, self.k, self.v))
        return Copies(q, k, v, self.kv_lens)

    def calls(self, decode: Callable[..., Tensor]) -> list[Callable[[], Tensor]]:
        return [
            functools.partial(decode, self.q[i], self.k[i], self.v[i], self.kv_lens)
            for i in range(self.q.shape[0])
        ]


def measure(run: Run, cases: Sequence[DecodeCase]) -> None:
    """Measures `cases`."""
    floors = (PURE_READ,) if run.timer.device.type == "cuda" else ()
    with torch.no_grad():
        run.cases(cases, lambda case, impls: _measure_case(run, case, impls), floors)


def _measure_case(run: Run, case: DecodeCase, implementations: Sequence[Implementation]) -> None:
    timer, recorder = run.timer, run.recorder
    on_gpu = timer.device.type == "cuda"
    copies = copies_needed(case.kv_bytes, timer.l2_bytes)
    inputs = {"BHSD": Copies.make(case, timer.device, copies)}
    first = inputs["BHSD"]
    part = HeadSlice(case.heads // case.kv_heads)
    exact = exact_attention(part.queries(first.q[0]), part.keys(first.k[0]), part.keys(first.v[0]))

    graphs: dict[str, Callable[[], float]] = {}
    if on_gpu:
        with recorder.guard(case.name, PURE_READ, "floor", timer.check_device):
            graphs[PURE_READ] = best_pure_read(
                timer, list(zip(first.k, first.v, strict=True))
            ).sample
    eager: dict[str, Callable[[], float]] = {}
    host: dict[str, Callable[[], float]] = {}
    for impl in implementations:
        with recorder.guard(case.name, impl.name, "first call", timer.check_device), impl.session():
            if impl.memory not in inputs:
                inputs[impl.memory] = first.laid_out(impl.memory)
            calls = inputs[impl.memory].calls(impl.decode(case, timer.device))
            error = max_abs_err(part.queries(calls[0]()), exact.out)
            recorder.add(case.name, impl.name, "max_abs_err", error)
            timer.eager_us(calls, 3)
            count = calls_within(timer.eager_us(calls, 3), 50e3, 3, HOST_CALLS)
            eager[impl.name] = _in_session(impl, functools.partial(timer.eager_us, calls, count))
            host[impl.name] = _in_session(impl, functools.partial(timer.host_us, calls, count))
            if on_gpu:
                graphs[impl.name] = RotatedGraph(timer, calls).sample

    for name, sample in run.interleave(case.name, graphs, "graph_us").items():
        recorder.add_sample(case.name, name, "graph_us", sample.median, sample.spread)
        recorder.add(case.name, name, "GBps", case.kv_bytes / sample.median / 1e3)
    for metric, samplers in (("eager_us", eager), ("host_us", host)):
        for name, sample in run.interleave(case.name, samplers, metric).items():
            recorder.add_sample(case.name, name, metric, sample.median, sample.spread)


def _in_session(impl: Implementation, sample: Callable[[], float]) -> Callable[[], float]:
    def sampled() -> float:
        with impl.session():
            return sample()

    return sampled
