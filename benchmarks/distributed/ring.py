"""Ring attention against one device: time, speed-up, largest difference; and against torch's own.

One process computes the whole sequence with our attention, all ranks together compute it sharded. FLOPs by
the usual convention (cases.py), per GPU. `torch_cp` is torch's context_parallel around
scaled_dot_product_attention, on the same shapes, in its own zigzag order.

With --documents the sequence is of packed documents, whose lengths are drawn, over balanced shards; `one_sequence` is
the first strategy over the same tokens as one sequence, which is what a user without packed documents runs.

Times are of single calls on idle GPUs, which wait for the host, and with --queued 8 of eight calls one after another as
well, each time divided by eight: as a model's layers follow each other.

peak_MiB is of torch's allocator: without symmetric memory, in which one_sided has K and V of the whole sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import sys
from collections.abc import Iterator

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

SINGLE, ONE_SEQUENCE = "single_device", "one_sequence"
table = parallel.table


def file_name(options: argparse.Namespace) -> str:
    heads = f"-H{options.heads}-{options.kv_heads}" if options.kv_heads else ""
    documents = f"-documents{options.documents}" if options.documents else ""
    return f"ring-{options.seq}{heads}{documents}"


def ring(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """Measures one sequence length; whether the results agree."""
    dtype = DTYPES[options.dtype]
    made = generator(ranks.device, 0)
    kv_heads = options.kv_heads or options.heads
    heads = (
        options.heads,
        kv_heads,
        kv_heads,
        options.heads,
    )  # q, k, v and the gradient of the result
    shapes = [(1, n, options.seq, options.dim) for n in heads]
    whole = [torch.randn(x, generator=made, device=ranks.device).to(dtype) for x in shapes]
    documents = _documents(options)
    of_one = shards = getattr(SequenceShards, options.shards)(options.seq, ranks.size)
    if documents:
        shards = SequenceShards.balanced(options.seq, ranks.size, cu_seqlens=documents)
    kind = "causal" if options.causal else "full"
    packed = f" documents{options.documents}" if documents else ""
    case = f"ring B1 H{options.heads}/{kv_heads} N{options.seq} D{options.dim} {kind}{packed} {options.dtype}"
    part, part_of_one = (
        [x.shard(tensor, ranks.rank, 2).contiguous() for tensor in whole] for x in (shards, of_one)
    )

    begins = torch.tensor(documents or (), dtype=torch.int32, device=ranks.device)

    def ours(strategy: str, *tensors: Tensor) -> Tensor:
        return ring_attention(
            *tensors, ranks.group_name, shards=shards, causal=options.causal, strategy=strategy, cu_seqlens=documents
        )[0]  # fmt: skip

    def one_sequence(*tensors: Tensor) -> Tensor:
        return ring_attention(
            *tensors, ranks.group_name, shards=of_one, causal=options.causal, strategy=options.strategy[0]
        )[0]  # fmt: skip

    def single(*tensors: Tensor) -> Tensor:
        if documents is None:
            return torch_fdattn.attention(*tensors, causal=options.causal)[0]
        tokens = [x[0].transpose(0, 1) for x in tensors]
        out, _ = torch_fdattn.varlen_attention(*tokens, begins, causal=options.causal)
        return out.transpose(0, 1)[None]

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
    lengths = [b - a for a, b in itertools.pairwise(documents or (0, options.seq))]
    pairs = sum(x**2 for x in lengths) / (2 if options.causal else 1)
    flops = 4 * options.heads * pairs * options.dim
    for name in passes:
        work = flops * (3.5 if name == "backward" else 1)
        calls = {
            f"fdattn/{s}": _call(lambda *x, s=s: ours(s, *x), part, name) for s in options.strategy
        }
        if options.single:
            calls[SINGLE] = _call(single, whole, name)
        if documents:
            calls[ONE_SEQUENCE] = _call(one_sequence, part_of_one, name)
        if ranks.device.type == "cuda":
            for impl, call in calls.items():
                recorder.add(f"{case} {name}", impl, "peak_MiB", _peak_mib(call, ranks))
        if options.vs_torch and documents:
            recorder.error(
                f"{case} {name}", "torch_cp", "torch's context_parallel has no packed documents"
            )
        for queued in dict.fromkeys((1, options.queued)):
            what = name if queued == 1 else f"{name} of {queued} queued"
            measure = functools.partial(
                compare, ranks, recorder, f"{case} {what}", repeats=options.repeats, queued=queued,
                alone={SINGLE} if ranks.device.type == "cpu" else (),
            )  # fmt: skip
            medians = {}
            if options.vs_torch and not documents:
                try:
                    with _context_parallel(options, ranks, whole, name) as call:
                        # On CPUs our own attention is torch's, which this context would shard too.
                        others = {} if ranks.device.type == "cpu" else calls
                        medians = measure({"torch_cp": call, **others})
                except Exception as failure:  # its own limits; ours stays measured
                    recorder.error(f"{case} {what}", "torch_cp", describe(failure))
            if not calls.keys() <= medians.keys():
                medians |= measure(calls)
            for impl, ms in medians.items():
                if impl == ONE_SEQUENCE:
                    continue  # most of its pairs are of two documents
                gpus = 1 if impl == SINGLE else ranks.size
                recorder.add(f"{case} {what}", impl, "TFLOPs_per_gpu", work / ms / 1e9 / gpus)
            if ranks.rank == 0:
                _print(what, medians, options, ranks, differences)
    tolerance = 1e-4 if options.dtype == "fp32" else 2e-2
    return all(difference <= tolerance for difference in differences.values())


def _documents(options: argparse.Namespace) -> list[int] | None:
    """Where documents of lengths drawn uniformly around the mean begin, and where the last one ends."""
    if not options.documents:
        return None
    rng, begins, quarter = random.Random(0), [0], options.documents // 4
    while begins[-1] < options.seq:
        length = rng.randint(max(quarter, 1), 2 * options.documents - quarter)
        begins.append(min(begins[-1] + length, options.seq))
    return begins


def _peak_mib(call: Call, ranks: Ranks) -> float:
    """Of the rank that has most allocated during a call, with what was there before."""
    call()
    torch.cuda.synchronize(ranks.device)
    torch.cuda.reset_peak_memory_stats(ranks.device)
    call()
    torch.cuda.synchronize(ranks.device)
    peak = torch.cuda.max_memory_allocated(ranks.device) / 2**20
    return largest(torch.tensor([peak], device=ranks.device))


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


@contextlib.contextmanager
def _context_parallel(
    options: argparse.Namespace, ranks: Ranks, whole: list[Tensor], name: str
) -> Iterator[Call]:
    """torch's attention inside its context_parallel, which shards the whole tensors in its own order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=options.causal, enable_gqa=grouped)

    backends = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    buffers = [x.clone() for x in whole]
    with (
        sdpa_kernel(backends[options.torch_backend]),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)),
    ):
        yield _call(sdpa, buffers, name)


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
