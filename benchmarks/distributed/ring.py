"""Ring attention against one device: time, speed-up, largest difference; and against torch's own.

One process computes the whole sequence with our attention, all ranks together compute it sharded. FLOPs by
the usual convention (cases.py), per GPU. `torch_cp` is torch's context_parallel around
scaled_dot_product_attention, on the same shapes, in its own zigzag order.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fdattn
from torch_fdattn.dist import SequenceShards, ring_attention

from ..ranks import Ranks, largest
from ..report import parallel
from ..results import Recorder, describe
from ..runner import DTYPES, generator
from ..timing import Call, compare

SINGLE = "single_device"
table = parallel.table


def file_name(options: argparse.Namespace) -> str:
    return f"ring-{options.seq}"


def ring(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """Measures one sequence length; whether the results agree."""
    dtype = DTYPES[options.dtype]
    made = generator(ranks.device, 0)
    shape = (1, options.heads, options.seq, options.dim)
    whole = [torch.randn(shape, generator=made, device=ranks.device).to(dtype) for _ in range(4)]
    shards = getattr(SequenceShards, options.shards)(options.seq, ranks.size)
    kind = "causal" if options.causal else "full"
    case = f"ring B1 H{options.heads}/{options.heads} N{options.seq} D{options.dim} {kind} {options.dtype}"
    part = [shards.shard(x, ranks.rank, 2).contiguous() for x in whole]

    def ours(strategy: str, *tensors: Tensor) -> Tensor:
        return ring_attention(
            *tensors, ranks.group_name, shards=shards, causal=options.causal, strategy=strategy
        )[0]

    def single(*tensors: Tensor) -> Tensor:
        return torch_fdattn.attention(*tensors, causal=options.causal)[0]

    with torch.no_grad():
        right = shards.shard(single(*whole[:3]), ranks.rank, 2).double()
        differences = {
            f"fdattn/{s}": largest((ours(s, *part[:3]).double() - right).abs())
            for s in options.strategy
        }
    del right
    for impl, difference in differences.items():
        recorder.add(case, impl, "max_abs_err", difference)
    passes = ["forward", *(["backward"] if options.backward else [])]
    flops = 4 * options.heads * options.seq**2 * options.dim / (2 if options.causal else 1)
    for name in passes:
        work = flops * (3.5 if name == "backward" else 1)
        calls = {
            f"fdattn/{s}": _call(lambda *x, s=s: ours(s, *x), part, name) for s in options.strategy
        }
        if options.single:
            calls[SINGLE] = _call(single, whole, name)
        medians = compare(
            ranks, recorder, f"{case} {name}", calls, repeats=options.repeats,
            alone={SINGLE} if ranks.device.type == "cpu" else (),
        )  # fmt: skip
        if options.vs_torch:
            medians |= _measure_torch(options, ranks, recorder, f"{case} {name}", whole, name)
        for impl, ms in medians.items():
            gpus = 1 if impl == SINGLE else ranks.size
            recorder.add(f"{case} {name}", impl, "TFLOPs_per_gpu", work / ms / 1e9 / gpus)
        if ranks.rank == 0:
            _print(name, medians, options, ranks, differences)
    tolerance = 1e-4 if options.dtype == "fp32" else 2e-2
    return all(difference <= tolerance for difference in differences.values())


def _call(function, tensors: list[Tensor], name: str) -> Call:
    """Forward without gradients, or forward and backward ("backward")."""
    if name == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return function(*tensors[:3])

        return forward
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, tensors[3])

    return both


def _measure_torch(
    options: argparse.Namespace, ranks: Ranks, recorder: Recorder, case: str, whole: list[Tensor],
    name: str,
) -> dict[str, float]:  # fmt: skip
    """torch's context_parallel, which shards the whole tensors in its own order; its failure is a row."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=options.causal)

    backends = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    buffers = [x.clone() for x in whole]
    try:
        with (
            sdpa_kernel(backends[options.torch_backend]),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)),
        ):
            call = _call(sdpa, buffers, name)
            return compare(ranks, recorder, case, {"torch_cp": call}, repeats=options.repeats)
    except Exception as failure:  # its own limits; ours stays measured
        recorder.error(case, "torch_cp", describe(failure))
        return {}


def _print(
    name: str, medians: dict[str, float], options: argparse.Namespace, ranks: Ranks,
    differences: dict[str, float],
) -> None:  # fmt: skip
    where = f"{ranks.size} × {ranks.device.type}"
    print(f"ring attention {name}, sequence {options.seq}, dim {options.dim}, {where}")
    if SINGLE in medians:
        print(f"  single-device time    {medians[SINGLE]:10.3f} ms")
    for impl, ms in medians.items():
        if impl != SINGLE:
            print(f"  multi-device time     {ms:10.3f} ms  {impl}")
            if SINGLE in medians:
                print(f"  speed-up              {medians[SINGLE] / ms:10.2f}×")
            if impl in differences:
                print(f"  maximum difference    {differences[impl]:10.2e}")
    sys.stdout.flush()
