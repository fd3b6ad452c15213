"""Many launches back to back, whose results are compared on the device: nothing waits between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from torch_fdattn.ops.library import launches

#: Of a module whose tests take an H100 some seconds each, most of which the first call compiles.
ON_HOPPER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of sm_90",
    ),
]
#: What a GPU that is shared may take for ten thousand launches.
LIMIT_S = 300


class Checked(NamedTuple):
    """A call, and the results that it must have to the bit: None where any are right."""

    call: Callable[[], Sequence[Tensor]]
    expected: Sequence[Tensor | None]

    def errors(self) -> Tensor:
        """The number of results' entries that are wrong, on the device."""
        return sum(
            (found != right).sum()  # of NaN, too
            for found, right in zip(self.call(), self.expected, strict=True)
            if right is not None
        )


def count_errors(calls: Sequence[Checked], times: int) -> int:
    """Wrong entries of so many launches, call after call."""
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(times):
        errors += calls[i % len(calls)].errors()
    return errors.item()


def repeated(kernel: str, calls: Sequence[Checked], times: int) -> None:
    """Asserts that so many launches are this kernel's, and right."""
    launches.clear()
    assert count_errors(calls, times) == 0
    assert launches == {kernel: times}


def in_time(work: Callable[[], object]) -> None:
    """Runs `work`, which waits for the device at its end, and fails where that takes too long."""
    failures = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=LIMIT_S)
    assert not thread.is_alive(), f"launches hang: nothing ended within {LIMIT_S} s"
    if failures:
        raise failures[0]
