"""Prepared calls: what calls of equal metadata do, checked, chosen and bound once; imports no triton.

Checks, tiles and grids of a call follow from shapes, strides, dtypes, devices and options. So the cache's key is made of
these, its entry says that a call of this key has passed its checks, and the entry holds its launches bound to the call's
tensors: which tensor's address goes where. Everything else that a kernel takes is the same each time.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks

if TYPE_CHECKING:
    from torch_fdattn.launch.driver_launch import DriverLaunch
    from torch_fdattn.launch.launches import Launch

#: Calls that are remembered at most; then all are forgotten.
MAX_CALLS = 8192
_calls: dict[tuple, object] = {}


class Step(NamedTuple):
    """One launch, and where its addresses come from: (which of the call's tensors, bytes behind its first)."""

    launch: DriverLaunch
    places: tuple[tuple[int, int], ...] | None  #: None: all of them, in order


class PreparedCall:
    """The launches of calls that have a key in common; called with the tensors of one of them.

    The first call goes through Triton, and so does the second, whose launches are then bound: lengths that never come
    again pay for no binding. Calls that cannot be bound go on through Triton. Any thread and any stream may call it, and a stream may be capturing.
    """

    def __init__(self, owner: object = None, label: str = "") -> None:
        """owner: kept alive, since a key holds its id; label: the caller's name for what it launches."""
        self._owner = owner
        self.label = label
        self._runs = 0
        self._steps: tuple[Step, ...] = ()

    def by_driver(self, tensors: Sequence[Tensor | None]) -> bool:
        """Makes the call's launches by the driver; False: nothing was done, `run` them.

        tensors: all that the kernels take, in an order of the caller's, outputs and scratch memory too.
        """
        steps = self._steps
        if not steps:
            return False
        addresses = [x.data_ptr() for x in tensors if x is not None]
        first = steps[0].launch
        if not first.takes(addresses):
            return False
        stream = torch._C._cuda_getCurrentRawStream(first.device_index)
        for launch, places in steps:
            if places is None:
                launch(stream, addresses)
            else:
                launch(stream, [addresses[i] + offset for i, offset in places])
        return True

    def run(self, tensors: Sequence[Tensor | None], launches: Iterable[Launch]) -> None:
        """Makes the launches, which are of these tensors, through Triton."""
        made = [(launch, launch.through_triton()) for launch in launches]
        self._runs += 1
        # At runs 2, 4, 8 …: where nothing can be bound (k is v, a profiler watches), few calls pay for finding that.
        if not self._steps and self._runs > 1 and self._runs & (self._runs - 1) == 0:
            self._steps = _bound(made, [x for x in tensors if x is not None])


class _EachLaunch(PreparedCall):
    def run(self, tensors: Sequence[Tensor | None], launches: Iterable[Launch]) -> None:
        from torch_fdattn.launch.launches import run

        run(launches)


def _bound(made: list[tuple[Launch, object]], tensors: list[Tensor]) -> tuple[Step, ...]:
    """The launches by the driver; none where one of them is Triton's alone to make, or not of these tensors only."""
    steps = []
    for launch, compiled in made:
        places = _places(launch.tensors(), tensors)
        by_driver = None if places is None else launch.by_driver(compiled)
        if by_driver is None:
            return ()
        in_order = places == tuple((i, 0) for i in range(len(tensors)))
        steps.append(Step(by_driver, None if in_order else places))
    return tuple(steps)


def _places(taken: list[Tensor], tensors: list[Tensor]) -> tuple[tuple[int, int], ...] | None:
    """Which of the call's tensors each of a launch's is, or lies in; None where that is not certain.

    Two of the call's may begin at one address, or be one: the next call of this key may tell them apart. Only where the
    launch takes what the call names, in its order, is each the one in its place.
    """
    if len(taken) == len(tensors) and all(map(operator.is_, taken, tensors)):
        return tuple((i, 0) for i in range(len(tensors)))
    places = []
    for each in taken:
        at = each.data_ptr()
        found = [i for i, x in enumerate(tensors) if x is each]
        found = found or [i for i, x in enumerate(tensors) if x.data_ptr() == at]
        found = found or [i for i, x in enumerate(tensors) if 0 < at - x.data_ptr() < x.nbytes]
        if len(found) != 1:
            return None
        places.append((found[0], at - tensors[found[0]].data_ptr()))
    return tuple(places)


def metadata(*tensors: Tensor | None) -> tuple:
    """All that is known of tensors but their addresses and values."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def find(key: tuple) -> Any:
    return _calls.get(key)


def checked(key: tuple | None) -> Any:
    """What a call that has passed its checks was remembered by; None: check it, then `prepare` it.

    key: None is of a call that is not to be remembered. An option without a hash is for the checks to name.
    """
    try:
        return None if checks.CHECK_VALUES else _calls.get(key)
    except TypeError:
        return None


def prepare(key: tuple | None, owner: object = None, label: str = "") -> PreparedCall:
    """A new prepared call, remembered under its key; without one its launches are looked up one by one."""
    call = (_EachLaunch if key is None else PreparedCall)(owner, label)
    remember(key, call)
    return call


def remember(key: tuple | None, call: object) -> None:
    """Makes `call` what `find` and `checked` return: a `PreparedCall`, or what holds some."""
    if key is not None:
        if len(_calls) >= MAX_CALLS:
            forget()
        with contextlib.suppress(TypeError):  # an option without a hash
            _calls[key] = call


def forget() -> None:
    """Makes the next calls of all kinds new."""
    _calls.clear()
