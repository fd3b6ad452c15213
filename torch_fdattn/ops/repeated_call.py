"""Calls that are launches alone, past their checks and choices where their like was made before.

Checks, tiles and grids of a call follow from what is known without its tensors' values. What has come to direct
launches (`repeated_launch.py`) of the given tensors is these launches wherever the same is known again: such a call may
do nothing else to memory. Imports no triton.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.library import launches


class Step(NamedTuple):
    """A `DriverLaunch`, and which of a call's tensors it takes, by their places; None: all in order."""

    launch: Callable
    places: tuple[int, ...] | None


_known: dict[tuple, tuple[Step, ...]] = {}
#: Calls that are known at most; then all are forgotten.
MOST = 8192
_watching = threading.local()


def metadata(*tensors: Tensor | None) -> tuple:
    """All that is known of tensors but their addresses and values."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def find(key: tuple | None) -> tuple[Step, ...] | None:
    """The launches that such a call was, for `again`; it need not be checked then.

    key: all that decides what the call does: who asks, `metadata` of all tensors, options, settings. None: a call
    that is not to be known.
    """
    try:
        return None if checks.CHECK_VALUES else _known.get(key)  # None is no key
    except TypeError:  # an option that has no hash: what it should be is the checks' to say
        return None


def again(
    steps: tuple[Step, ...] | None, tensors: Sequence[Tensor | None], counter: str | None = None
) -> bool:
    """Launches what `find` found; False: there is nothing, or it is not for these tensors: run the call (`learn`).

    Args:
        tensors: all that kernels take, outputs and scratch memory too; None is left out.
        counter: of `library.launches`, which the call itself counts.
    """
    if steps is None:
        return False
    if not launched(steps, [x.data_ptr() for x in tensors if x is not None]):
        return False
    if counter is not None:
        launches[counter] += 1
    return True


def launched(steps: tuple[Step, ...], addresses: Sequence[int]) -> bool:
    """`again`, of the tensors' addresses."""
    first = steps[0].launch
    if not first.takes(addresses):
        return False
    note(None, ())  # a call around this one is not its own launches alone
    stream = torch._C._cuda_getCurrentRawStream(first.device_index)
    for launch, places in steps:
        launch(stream, addresses if places is None else [addresses[i] for i in places])
    return True


def learn(key: tuple | None, tensors: Sequence[Tensor | None], run: Callable[[], None]) -> None:
    """`run()`, remembered where it was direct launches of these tensors; as `find` and `again` have them."""
    if key is None:
        run()
        return
    note(None, ())
    around, seen = getattr(_watching, "seen", None), []
    _watching.seen = seen
    try:
        run()
    finally:
        _watching.seen = around
    addresses = [x.data_ptr() for x in tensors if x is not None]
    steps = tuple([_step(launch, taken, addresses) for launch, taken in seen])
    if steps and None not in steps:
        if len(_known) >= MOST:
            forget()
        with contextlib.suppress(TypeError):  # of an option without a hash: always run
            _known[key] = steps


def _step(launch: Callable | None, taken: list[int], addresses: list[int]) -> Step | None:
    """None where one does not know which tensor is meant, or that it is one of the call's."""
    if launch is None:
        return None
    if taken == addresses:
        return Step(launch, None)
    if len(set(addresses)) < len(addresses) or not set(taken) <= set(addresses):
        return None
    return Step(launch, tuple([addresses.index(address) for address in taken]))


def repeat(
    key: tuple, tensors: Sequence[Tensor | None], run: Callable[[], None], counter: str | None = None
) -> None:  # fmt: skip
    """`again`, or else `learn`."""
    if not again(find(key), tensors, counter):
        learn(key, tensors, run)


def note(launch: object | None, addresses: Sequence[int]) -> None:
    """Tells a `learn` around it of a launch: a `DriverLaunch`, or None for one through Triton."""
    seen = getattr(_watching, "seen", None)
    if seen is not None:
        seen.append((launch, addresses))


def forget() -> None:
    """Makes the next calls of all kinds new."""
    _known.clear()
