"""The loop over cases that every benchmark shares: budget, availability, failures, saving.

Nothing that was asked for vanishes: what cannot run, fails or comes too late has a row that says
so.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from .results import Recorder, describe
from .timing import DeviceLost, Sample, Timer, interleave

if TYPE_CHECKING:
    from .peers import Implementation


class Case(Protocol):
    @property
    def name(self) -> str: ...


@dataclass
class Budget:
    """Seconds after which no new case starts; None is unbounded."""

    seconds: float | None
    clock: Callable[[], float] = time.monotonic
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._begin

    @property
    def over(self) -> bool:
        return self.seconds is not None and self.spent >= self.seconds


@dataclass
class Run:
    """What a benchmark measures with and where it writes."""

    timer: Timer
    recorder: Recorder
    implementations: Sequence[Implementation]
    repeats: int
    budget: Budget

    def cases(
        self,
        cases: Sequence[Case],
        measure: Callable[[Case, Sequence[Implementation]], None],
        floors: Sequence[str] = (),
    ) -> None:
        """Calls `measure` for each case with the implementations that can run here."""
        usable: list[Implementation] = []
        for impl in self.implementations:
            reason = impl.available(self.timer.device)
            if reason is None:
                usable.append(impl)
            else:
                for case in cases:
                    self.recorder.error(case.name, impl.name, f"not available: {reason}")
        usable_names = [*floors, *(impl.name for impl in usable)]
        self.recorder.expect((case.name for case in cases), usable_names)
        self.recorder.save()
        stop: str | None = None
        for case in cases:
            if stop is None and self.budget.over:
                stop = f"budget of {self.budget.seconds:g} s was spent"
            if stop is not None:
                self.recorder.came(case.name)
                for name in usable_names:
                    self.recorder.not_measured(case.name, name, stop)
                continue
            begin = self.budget.spent
            try:
                measure(case, usable)
            except DeviceLost as lost:
                stop = f"device lost in {case.name}: {describe(lost)}"
            except Exception as failure:
                for name in usable_names:
                    self.recorder.error(case.name, name, f"case: {describe(failure)}")
            if stop is None:
                self._release()
            self.recorder.came(case.name)
            self.recorder.save()
            taken = self.budget.spent - begin
            print(f"{case.name}: {taken:.1f} s", file=sys.stderr, flush=True)
        self.recorder.save()

    def interleave(
        self, case: str, samplers: Mapping[str, Callable[[], float]], step: str
    ) -> dict[str, Sample]:
        """Samples in turns; failures become error rows."""
        samples, failures = interleave(samplers, self.repeats)
        for name, failure in failures.items():
            self.recorder.error(case, name, f"{step}: {describe(failure)}")
            self.timer.check_device(failure)
        return samples

    def _release(self) -> None:
        """Give memory back between cases; graphs hold theirs in reference cycles."""
        if self.timer.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
