"""Message latency: our one-sided all-gather beside NCCL's and torch's one-shot all-reduce.

Each row is a size in bytes per rank. In a CUDA graph (so that no host time is counted) and eager, the
slowest rank's; on a CPU wall time alone, where the exchange is interpreted over shared memory and `gloo`
stands in NCCL's place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ..ranks import Ranks, StepFailed, all_gather, together
from ..results import Recorder
from ..runner import generator
from ..timing import Rounds
from .shards import gathered

SIZES = tuple(4 ** (1 + i) for i in range(10))  # 4 B to 1 MiB
CPU_SIZES = (4, 1024, 65536)
OURS, TORCH = "fdattn/one_sided", "torch_symm"
_ALIKE = 4  # calls a round of a graph: the host's part of a replay weighs nothing among many rounds


Call = Callable[[], Tensor]


def measure(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """Whether every exchange gave what it should."""
    on_gpu = ranks.device.type == "cuda"
    makers = {OURS: _one_sided, "nccl" if on_gpu else "gloo": _collective}
    if on_gpu:
        makers[TORCH] = _one_shot
    holds = True
    for size in SIZES if on_gpu else CPU_SIZES:
        case = f"message {size} B" + ("" if on_gpu else " cpu")
        rounds = Rounds(case, ranks, recorder)
        made = generator(ranks.device, ranks.rank)
        # Small whole numbers: a sum over ranks is exact in any order.
        x = torch.randint(0, 1000, (size // 4,), generator=made, device=ranks.device).float()
        parts = gathered(x, ranks)
        for name, maker in makers.items():
            try:
                _prepare(name, maker, x, parts.sum(0) if name == TORCH else parts, ranks, rounds)
            except StepFailed as failure:
                recorder.error(case, name, str(failure))
                rounds.drop(name)
                holds &= not failure.wrong and (name != OURS or failure.refused)
        rounds.sample(options.repeats)
        rounds.clear()
        recorder.save()
        if ranks.rank == 0:
            print(case, file=sys.stderr, flush=True)
    return holds


def _prepare(
    name: str, maker: Callable[[Tensor, Ranks], Call], x: Tensor, right: Tensor, ranks: Ranks,
    rounds: Rounds,
) -> None:  # fmt: skip
    call = together(ranks, "first call", lambda: maker(x, ranks))

    def check(found: Tensor) -> None:
        assert torch.equal(found, right), "other values than the ranks sent"

    together(ranks, "first call", lambda: check(call()))
    last = rounds.prepare(name, [call] * _ALIKE, in_graph=True)
    if last is not None:
        together(ranks, "graph", lambda: check(last))


def _one_sided(x: Tensor, ranks: Ranks) -> Call:
    from torch_fdattn.dist import one_sided_all_gather

    return lambda: one_sided_all_gather(x, ranks.group_name)


def _collective(x: Tensor, ranks: Ranks) -> Call:
    received = x.new_empty((ranks.size, *x.shape))

    def call() -> Tensor:
        all_gather(received, x, ranks)
        return received

    return call


def _one_shot(x: Tensor, ranks: Ranks) -> Call:
    """The message lies in symmetric memory already: no copy is counted, as in BASELINES' figures."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(buffer, ranks.group_name)
    buffer.copy_(x)
    return lambda: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", ranks.group_name)
