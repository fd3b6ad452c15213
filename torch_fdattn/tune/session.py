"""One run of `fdattn tune`: the device, the ranks, the time that is left, and whom to tell what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_fdattn.dist.symm.availability import unsupported_reason
from torch_fdattn.ops.attention import trials
from torch_fdattn.tune.timing import Call, Clock

#: What replaces the shipped choice must win by this much: less is the clock's noise.
GAIN = 1.02


class Measurement(NamedTuple):
    """One case: what the shipped table chooses, what was the fastest, and the µs of both."""

    section: str
    case: str
    shipped: str
    chosen: str
    shipped_us: float
    us: float


class Session:
    """
    Args:
        quick: tiny shapes and few candidates: to see that it runs.
        report: is told each measurement; note: a sentence of what is left out, and why.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, *, quick: bool = False,
        report: Callable[[Measurement], None] = lambda _: None, note: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.device, self.group, self.quick = device, group, quick
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.clock, self.report, self.note = Clock(device, group), report, note
        self._deadline = float("inf")

    @property
    def half(self) -> torch.dtype:
        """The dtype that stands for 16 bits: Triton's interpreter and old GPUs have no bfloat16."""
        has = self.clock.on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has else torch.float16

    def allow(self, seconds: float) -> None:
        """What follows may take this long."""
        self._deadline = time.monotonic() + seconds

    def expired(self) -> bool:
        """Whether the time is up on any rank; all ranks ask."""
        return self.clock.any_rank(time.monotonic() > self._deadline)

    def shares_memory(self, section: str) -> bool:
        """Whether the ranks share symmetric memory; a note says where they do not."""
        why_not = unsupported_reason(self.group.group_name, self.device)
        if why_not is not None:
            self.note(f"{section}: these ranks share no symmetric memory: {why_not}")
        return why_not is None

    def agreeing(
        self, about: str, candidates: Iterable[tuple[str, Sequence[Call]]]
    ) -> dict[str, Sequence[Call]]:
        """Of candidates and their calls, in turn, those that run on all ranks and whose result is the first one's; a note says
        which others there are."""
        right, agreed = None, {}
        for name, calls in candidates:
            result = self.clock.together(calls[0])
            if result is None:
                self.note(f"{about}: {name} is left out: it raised")
                continue
            right = result.clone() if right is None else right
            if self.clock.any_rank(trials.difference([result], [right]) is not None):
                self.note(f"{about}: {name} is left out: its result differs")
                continue
            agreed[name] = calls
        return agreed

    def choose(self, section: str, case: str, shipped: str, times: Mapping[str, float]) -> str:
        """The fastest by µs, told to `report`; what is shipped unless another one wins by GAIN."""
        best = min(times, key=times.__getitem__)
        before = times.get(shipped, float("inf"))
        chosen = best if times[best] * GAIN < before else shipped
        self.report(Measurement(section, case, shipped, chosen, before, times[chosen]))
        return chosen


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
