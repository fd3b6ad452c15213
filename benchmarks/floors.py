"""Floors: what no attention kernel can beat on this machine, measured in the same run.

- `pure_read` only reads K and V, in the same rotated inputs and CUDA graph as decode: the floor of
  a memory-bound case. The best of a small sweep of its own, because the best tile depends on the
  size.
- `matmul`, bf16 8192³ through cuBLAS: what the tensor cores give, clocks and power included.

`python -m benchmarks floors` measures them alone, to see whether a machine is worth measuring on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ranks import Ranks
from .results import Recorder
from .runner import Run, chosen_cases
from .shapes import MATMUL, MATMUL_CASE
from .timing import RotatedGraph, Sample, Timer


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    from . import decode

    run = Run.of(options, ranks, recorder)
    if ranks.device.type == "cuda":
        record_matmul(recorder, run.timer, options.repeats)
    decode.measure(run, chosen_cases(options))
    return True


@dataclass(frozen=True)
class ReadConfig:
    """Words (of 4 bytes) of K and of V that a program reads at a time, warps, programs per SM.

    `programs_per_sm` 0 means one program per tile: no loop, the hardware schedules.
    """

    block: int
    num_warps: int
    programs_per_sm: int


READ_CONFIGS = (
    ReadConfig(1024, 4, 0),
    ReadConfig(2048, 4, 0),
    ReadConfig(4096, 8, 0),
    ReadConfig(1024, 4, 4),
    ReadConfig(2048, 4, 4),
    ReadConfig(4096, 8, 2),
    ReadConfig(4096, 4, 4),
    ReadConfig(8192, 8, 2),
)


@triton.jit
def _pure_read_kernel(k_ptr, v_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Adds up K and V as int32 words, one sum a program: the cheapest use that keeps the loads."""
    program = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(program * BLOCK, size, step):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < size
        k = tl.load(k_ptr + offsets, mask=inside, other=0)
        v = tl.load(v_ptr + offsets, mask=inside, other=0)
        total += k + v
    tl.store(out_ptr + program, tl.sum(total))


def pure_read(k: Tensor, v: Tensor, config: ReadConfig) -> Callable[[], Tensor]:
    """A call that reads all of k and v (contiguous, of one size) and gives their sums."""
    if not (k.is_contiguous() and v.is_contiguous() and k.numel() == v.numel()):
        raise ValueError(
            f"k and v must be contiguous and of one size, got shape {tuple(k.shape)} strides "
            f"{k.stride()} and shape {tuple(v.shape)} strides {v.stride()}"
        )
    k_int32, v_int32 = k.view(-1).view(torch.int32), v.view(-1).view(torch.int32)
    size = k_int32.numel()
    programs = triton.cdiv(size, config.block)
    if config.programs_per_sm:
        sms = torch.cuda.get_device_properties(k.device).multi_processor_count if k.is_cuda else 1
        programs = min(programs, sms * config.programs_per_sm)
    out = torch.empty(programs, dtype=torch.int32, device=k.device)

    def call() -> Tensor:
        _pure_read_kernel[(programs,)](
            k_int32, v_int32, out, size, BLOCK=config.block, num_warps=config.num_warps
        )
        return out

    return call


def best_pure_read(timer: Timer, copies: Sequence[tuple[Tensor, Tensor]]) -> RotatedGraph:
    """The graph of the fastest pure read over these copies of (K, V)."""
    best: tuple[float, RotatedGraph] | None = None
    for config in READ_CONFIGS:
        graph = RotatedGraph(timer, [pure_read(k, v, config) for k, v in copies])
        taken = graph.sample(replays=3)
        if best is None or taken < best[0]:
            best = (taken, graph)
    assert best is not None
    return best[1]


def matmul(device: torch.device) -> tuple[Callable[[], Tensor], float]:
    """(a call, its FLOPs) of the bf16 8192³ matmul."""
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return (lambda: a @ b), 2.0 * size**3


def record_matmul(recorder: Recorder, timer: Timer, repeats: int) -> None:
    """Adds the matmul floor's row."""
    with recorder.guard(MATMUL_CASE, MATMUL, "matmul", timer.check_device):
        call, flops = matmul(timer.device)
        sampler = timer.sampler(call)
        sample = Sample(tuple(flops / sampler() / 1e6 for _ in range(repeats)))
        recorder.add_sample(MATMUL_CASE, MATMUL, "TFLOPs_per_gpu", sample.median, sample.spread)
