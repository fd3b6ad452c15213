"""`set_deterministic`: the backward without atomics, and where the seeds come from that dropout draws."""

from __future__ import annotations

import torch

#: (enabled, seed), and the generators made for it, by device.
_setting: tuple[bool, int | None] = (False, None)
_generators: dict[torch.device, torch.Generator] = {}


def set_deterministic(enabled: bool, seed: int | None = None) -> None:
    """The same bits on every run.

    Every forward is deterministic whatever is set here. attention's backward may add up dQ in any order, where
    that is faster (its last bits then differ from run to run); it does not after `set_deterministic(True)`, nor
    under `torch.use_deterministic_algorithms(True)`. The seeds that dropout draws where it is given none
    come from torch's generator of the device, and `torch.manual_seed` repeats them; with a seed here they come
    from a generator of their own, which each such call of `set_deterministic` starts anew and which no other
    consumer of random numbers advances. It is read when a call runs: compiled graphs follow it. (Under CUDA
    graph capture give `dropout_seed` instead: a capture knows torch's generators alone.)

    Args:
        enabled: False goes back to torch's generator.
        seed: of the seeds; None: torch's generator.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {enabled!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int or None, got {seed!r}")
    global _setting
    _setting = (enabled, seed)
    _generators.clear()


def deterministic_wanted() -> bool:
    """Whether sums must have one order: asked for here, or by torch's own setting."""
    return _setting[0] or torch.are_deterministic_algorithms_enabled()


def seed_generator(device: torch.device) -> torch.Generator | None:
    """The generator for a device's seeds; None stands for torch's own."""
    enabled, seed = _setting
    if not enabled or seed is None:
        return None
    if device not in _generators:
        _generators[device] = torch.Generator(device).manual_seed(seed)
    return _generators[device]
