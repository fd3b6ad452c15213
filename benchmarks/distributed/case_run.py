"""One case of sharded decode: each variant to compute it called, checked against fp64, and timed."""

from __future__ import annotations

import contextlib
import sys

import torch
from torch import Tensor

import torch_fdattn

from ..floors import best_pure_read
from ..ranks import Ranks, StepFailed, together
from ..results import Recorder
from ..shapes import PURE_READ, DecodeCase
from ..timing import GRAPH, Rounds, copies_needed
from . import variants
from .shards import Answer, check_equal_bits, make_shards, shard_bytes

CALLS = 2  # of one that is checked and not timed: both must give the same bits
_FIRST_CALL_S, _LATER_CALL_S = 30.0, 1.0  # that ranks wait for each other, on GPUs


class CaseRun:
    """Its inputs, its exact answer, its rows; `holds` is whether all that was computed is right."""

    def __init__(
        self, case: DecodeCase, name: str, ranks: Ranks, recorder: Recorder, timed: bool
    ) -> None:
        self.name, self.holds = name, True
        self.rounds = Rounds(self.name, ranks, recorder)
        self._ranks, self._recorder, self._timed = ranks, recorder, timed
        l2 = self.rounds.timer.l2_bytes
        shards = make_shards(case, ranks, copies_needed(shard_bytes(case, ranks.size), l2))
        self._answer = Answer(shards, ranks)
        # The first, whose answer is known, comes last: so a graph's last result can be checked.
        self._shards = [*shards[1:], shards[0]]
        #: What the strategy of that name takes here.
        self.auto = torch_fdattn.dist.chosen_strategy(shards[0].q, ranks.group_name)

    def take(self, variant: variants.Variant, stack: contextlib.ExitStack) -> None:
        """Calls it, checks it, and prepares its timing; a failure is a row."""
        if reason := variants.missing(variant):
            self._recorder.not_measured(self.name, variant.name, reason)
            return
        try:
            self._take(variant, stack)
        except StepFailed as failure:
            self._failed(variant, failure)
        if not self._timed:
            self._recorder.came(self.name, variant.name)
        self._recorder.save()

    def _take(self, variant: variants.Variant, stack: contextlib.ExitStack) -> None:
        ranks = self._ranks
        if ranks.device.type == "cuda":
            # A rank may compile for longer than another; later, what is stuck shall cost no minutes.
            torch_fdattn.dist.set_timeout(_FIRST_CALL_S)

        def first_calls() -> tuple[list[variants.Call], list[tuple[Tensor, Tensor]]]:
            calls = variant.calls(self._shards, ranks, stack)
            results = [calls[-1]() for _ in range(1 if self._timed else CALLS)]
            variants.check()
            return calls, results

        calls, results = together(ranks, "first call", first_calls)
        if variant.all_keys:
            self._recorder.add(
                self.name, variant.name, "max_abs_err", self._answer.error(results[0][0])
            )
            self._check(variant, results, "first call")
        if not self._timed:
            return
        if ranks.device.type == "cuda":
            torch_fdattn.dist.set_timeout(_LATER_CALL_S)
        last = self.rounds.prepare(variant.name, calls, variant.graph)
        together(ranks, "timing", variants.check)
        if variant.all_keys and last is not None:
            self._check(variant, [results[0], last], "graph")

    def _check(
        self, variant: variants.Variant, results: list[tuple[Tensor, Tensor]], step: str
    ) -> None:
        """The last result against the exact answer; ours has the same bits in all calls, on all ranks."""

        def right() -> None:
            out, lse = results[-1]
            self._answer.check(out, lse if variant.ours else None)
            for again in results[1:] if variant.ours else ():
                for name, one, other in zip(("out", "lse"), results[0], again, strict=True):
                    assert torch.equal(one, other), f"{name} differs between two calls"

        together(self._ranks, step, right)
        if variant.ours:
            together(self._ranks, step, lambda: check_equal_bits(self._ranks, *results[-1]))

    def take_floor(self) -> None:
        if self._ranks.device.type != "cuda":
            return
        copies = [(x.k, x.v) for x in self._shards]
        try:
            floor = together(
                self._ranks, "floor", lambda: best_pure_read(self.rounds.timer, copies)
            )
            self.rounds.add(PURE_READ, GRAPH, floor.next)
        except StepFailed as failure:
            self._recorder.error(self.name, PURE_READ, str(failure))

    def sample(self, repeats: int) -> dict[str, dict[str, float]]:
        """Times all that was taken, in turns; the medians by metric and name."""
        medians = self.rounds.sample(repeats)
        try:
            together(self._ranks, "timing", variants.check)
        except StepFailed as failure:
            self.holds = False
            self._recorder.error(self.name, "fdattn", str(failure))
        return medians

    def _failed(self, variant: variants.Variant, failure: StepFailed) -> None:
        """A wrong result of anybody's counts, and any failure of ours but a refusal."""
        self._recorder.error(self.name, variant.name, str(failure))
        self.holds &= not (failure.wrong or (variant.ours and not failure.refused))
        self.rounds.drop(variant.name)
        if self._ranks.rank == 0:
            print(f"{self.name}: {variant.name}: {failure}", file=sys.stderr, flush=True)
