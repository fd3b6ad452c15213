"""`set_deterministic`: where the seeds come from that dropout draws when it is given none; `ordered`: one call's backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

#: (enabled, seed), and the generators made for it, by device.
_setting: tuple[bool, int | None] = (False, None)
_generators: dict[torch.device, torch.Generator] = {}


def set_deterministic(enabled: bool, seed: int | None = None) -> None:
    """The same bits on every run.

    Every forward has the same bits on every run whatever is set here, and every backward but that of Hopper's kernel
    up to head dim 128: its tiles add to dQ in the order in which they come. With `enabled`, or torch.use_deterministic_algorithms(True),
    dQ has a launch of its own, and one order; what it costs is in docs/notes/hopper-backward.md.

    What is left to chance are the seeds that dropout draws where it is given none. By default they come from torch's generator of the device, and `torch.manual_seed` repeats them; with a seed here they come
    from a generator of their own, which each such call of `set_deterministic` starts anew and which no other
    consumer of random numbers advances. It is read when a call runs: compiled graphs follow it. (Under CUDA
    graph capture, and where activation checkpoints recompute dropout, give `dropout_seed` instead: captures and
    checkpoints know torch's generators alone. A checkpoint's recomputation, which would draw other seeds and give
    wrong gradients, raises RuntimeError.)

    Args:
        enabled: False goes back to torch's generator.
        seed: of the seeds, as `torch.Generator.manual_seed` takes it; None: torch's generator.

    Examples:
        >>> q = torch.randn(1, 2, 16, 16)
        >>> torch_fdattn.set_deterministic(True, seed=1)
        >>> first, _ = torch_fdattn.attention(q, q, q, dropout_p=0.5)
        >>> torch_fdattn.set_deterministic(True, seed=1)  # anew
        >>> second, _ = torch_fdattn.attention(q, q, q, dropout_p=0.5)
        >>> torch.equal(first, second)
        True
        >>> torch_fdattn.set_deterministic(False)
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {enabled!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int or None, got {seed!r}")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be from -2**63 to 2**64 - 1, got {seed}")
    global _setting
    _setting = (enabled, seed)
    _generators.clear()


#: Tests replace it, which turn torch's setting on for another reason.
asked_of_torch = torch.are_deterministic_algorithms_enabled


#: Whether a backward that runs here, or a forward's, is to be ordered; of a thread.
_ordered: ContextVar[bool] = ContextVar("ordered", default=False)


@contextmanager
def ordered() -> Iterator[None]:
    """Backwards of the eager calls in it have one order of sums, whenever they run, as under set_deterministic(True)."""
    token = _ordered.set(True)
    try:
        yield
    finally:
        _ordered.reset(token)


def is_ordered() -> bool:
    """Whether the call runs within `ordered`: what a forward notes for its backward."""
    return _ordered.get()


def is_set() -> bool:
    """Whether every backward must give the same bits on every run; as torch's own ops, with `warn_only` too."""
    return _setting[0] or asked_of_torch()


def is_deterministic() -> bool:
    """Whether a backward that runs here must."""
    return is_set() or _ordered.get()


def seed_generator(device: torch.device) -> torch.Generator | None:
    """The generator for a device's seeds; None stands for torch's own."""
    enabled, seed = _setting
    if not enabled or seed is None:
        return None
    # Checkpoints set back torch's generators before they recompute, which they do while a backward runs.
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "dropout_seed must be given to calls with dropout in a backward under set_deterministic(True, seed): "
            "one that a checkpoint recomputes would draw another seed than in its forward, got None"
        )
    if device not in _generators:
        _generators[device] = torch.Generator(device).manual_seed(seed)
    return _generators[device]
