"""What the runs of tensor-parallel layers and matmuls share: names, inputs, checks, timing.

`eager` is eager PyTorch with NCCL, `torch_symm` torch's own fused symmetric-memory ops (where there are GPUs),
`local` or `gemm_alone` the same work without its communication. Of ours, each strategy or method that was asked for.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.tensor_parallel.layers import TokenRows

from ..ranks import Ranks, StepFailed, largest, together
from ..report.tables import is_ours
from ..results import Recorder
from ..runner import DTYPES, generator
from ..timing import Rounds, compare
from . import timeline
from .models import config_named, require_memory

#: Calls of one implementation; where there are several, they differ in their weights' place alone.
Calls = Sequence[Callable[[], Tensor]]


class LayerRun:
    """One command's shapes, rows, tolerance.

    Attributes:
        strategy: "ag_rs" or "all_reduce".
        variants: of ours, the name of each and its keywords among `strategy` and `method`.
    """

    def __init__(self, options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> None:
        self.options, self.ranks, self.recorder = options, ranks, recorder
        self.config, self.dtype = config_named(options.model), DTYPES[options.dtype]
        self.strategy = "all_reduce" if options.use_allreduce else "ag_rs"
        self.variants = dict(
            (our_name("all_reduce", method), dict(method=method))
            if options.use_allreduce
            else (our_name("ag_rs", method), dict(strategy=method))
            for method in (options.allreduce_method if options.use_allreduce else options.strategy)
        )
        self._made = generator(ranks.device, 1)  # advances: no two tensors are alike

    def require(self, values: int, cache_bytes: int = 0) -> None:
        """Refuses what does not fit, before the first tensor is made; values: of unsharded weights and activations."""
        what = f"{self.options.name} of {self.options.model}"
        needed = values * self.dtype.itemsize + cache_bytes
        require_memory(what, needed, self.ranks.device, self.ranks.size)

    def case(self, *parameters: object) -> str:
        parts = (*parameters, self.options.model, self.options.dtype, f"x{self.ranks.size}")
        return marked(" ".join(map(str, (self.options.name, *parts))), self.ranks.device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._made, device=self.ranks.device, dtype=self.dtype)

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of the flattened tokens, or all of x, as the strategy wants it."""
        if self.strategy == "all_reduce":
            return x
        flat = x.flatten(0, -2)
        return flat.split(split_evenly(len(flat), self.ranks.size))[self.ranks.rank]

    def tokens(self, count: int) -> TokenRows:
        tokens = TokenRows()
        tokens.rows = split_evenly(count, self.ranks.size)
        return tokens

    @torch.inference_mode()
    def finish(
        self, case: str, ours: Mapping[str, Calls], others: Mapping[str, Calls],
        right: Callable[[], Tensor],
    ) -> bool:  # fmt: skip
        """Checks ours if asked, then times all; whether the checks hold.

        Who cannot run here is an `error` row with the reason; of ours that is a failure, unless it says that it
        has no such form.
        """
        exact = right().double() if self.options.check else None

        def right_here(name: str, actual: Tensor) -> bool:
            return exact is None or name not in ours or self._check(case, name, actual, exact)

        calls, holds = checked(case, self.ranks, self.recorder, {**others, **ours}, right_here)
        compare(
            self.ranks, self.recorder, case, {name: variant[0] for name, variant in calls.items()},
            repeats=self.options.repeats,
        )  # fmt: skip
        if self.ranks.device.type == "cuda":
            rounds = prepared(case, self.ranks, self.recorder, calls)
            rounds.sample(self.options.repeats)
            rounds.clear()
        if self.options.timeline:
            watched = {
                name: timeline.watch(self.ranks, variant[0]) for name, variant in calls.items()
            }
            if self.ranks.rank == 0:
                timeline.draw(self.options.timeline, case, self.recorder.results, watched)
        return holds

    def _check(self, case: str, name: str, actual: Tensor, exact: Tensor) -> bool:
        error, bound = error_and_bound(actual, exact)
        holds = error <= bound < math.inf
        self.recorder.add(case, name, "max_abs_err", error)
        if self.ranks.rank == 0:
            verdict = "ok" if holds else "WRONG"
            print(f"check: largest error {error:.2e}, bound {bound:.2e}: {verdict} ({name})")
        return holds


def checked(
    case: str, ranks: Ranks, recorder: Recorder, variants: Mapping[str, Calls],
    right: Callable[[str, Tensor], bool],
) -> tuple[dict[str, Calls], bool]:  # fmt: skip
    """Those whose first call works on all ranks, and whether ours are `right`: a refusal is no failure of ours.

    Who cannot run here, or raises StepFailed in `right`, is an `error` row with the reason.
    """
    calls, holds = {}, True
    for name, variant in variants.items():
        try:
            actual = together(ranks, "first call", variant[0])
            holds &= right(name, actual)
            calls[name] = variant
        except StepFailed as failure:
            recorder.error(case, name, str(failure))
            holds &= not is_ours(name) or failure.refused
    return calls, holds


def our_name(form: str, variant: str) -> str:
    """What rows call ours: the form alone for its default variant."""
    first = "nccl" if form == "all_reduce" else "auto"
    return f"fdattn/{form}" if variant == first else f"fdattn/{form}-{variant}"


def marked(case: str, device: torch.device) -> str:
    """A case's name; on a CPU it says so."""
    return f"{case} cpu" if device.type == "cpu" else case


def error_and_bound(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """(the largest error over all ranks, what it may be): relative to the typical value, since a few large ones must
    not excuse errors everywhere else."""
    error = largest((actual.double() - exact).abs())
    return error, (2e-5 if actual.dtype == torch.float32 else 0.1) * _rms(exact)


def _rms(x: Tensor) -> float:
    """Of all ranks' values; with few tokens a rank may have none."""
    sums = torch.stack([x.square().sum(), x.new_tensor(x.numel())])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt().item()


def prepared(case: str, ranks: Ranks, recorder: Recorder, calls: Mapping[str, Calls]) -> Rounds:
    """Their samplers, eager and in CUDA graphs; what fails has an `error` row, and may yet run eagerly."""
    rounds = Rounds(case, ranks, recorder)
    for name, variant in calls.items():
        for in_graph in (True, False) if ranks.device.type == "cuda" else (False,):
            try:
                rounds.prepare(name, variant, in_graph)
                break
            except StepFailed as failure:
                recorder.error(case, name, str(failure))
                rounds.drop(name)
    return rounds
