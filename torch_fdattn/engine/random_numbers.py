"""Random numbers that depend on a seed and a counter alone: no state, so nothing else in a batch moves them.

The hash is SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014),
which also is what xoshiro's authors seed by. The device computes it in int64, whose products wrap; the host's form, for one
number, is in Python's integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio, odd
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MASK = 2**64 - 1


def _signed(x: int) -> int:
    """The int64 of the same bits."""
    return (x & _MASK) - (2**64 if x & 2**63 else 0)


def hash64(x: Tensor) -> Tensor:
    """int64 of any shape -> int64, a bijection whose bits look random."""
    for shift, factor in _STEPS:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, _LAST_SHIFT)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """To the right, zeros from the left: torch's own shift is of a signed number."""
    return (x >> shift) & (2 ** (64 - shift) - 1)


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """int64 seeds and counters of one shape -> float64 in [0, 1), multiples of 2**-53."""
    mixed = hash64(hash64(seeds + _signed(_GOLDEN)) + counters * _signed(_GOLDEN))
    return _shifted(mixed, 11).to(torch.float64) * 2.0**-53


def seed_of_completion(seed: int, index: int) -> int:
    """The int64 seed of a request's completion of this index: the request's own for the first."""
    if index == 0:
        return seed
    return int(hash64(torch.tensor(_signed(seed + index * _GOLDEN))))
