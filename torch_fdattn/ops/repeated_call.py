"""Calls that are one launch, past their checks and choices where their like was made before.

Checks, tiles and grids of a call follow from what is known without its tensors' values. What has come to one direct
launch (`repeated_launch.py`) of the given tensors is that launch wherever the same is known again. Imports no triton.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.library import launches

_known: dict[tuple, Callable] = {}
#: Calls that are known at most; then all are forgotten.
MOST = 8192
_watching = threading.local()


def metadata(*tensors: Tensor | None) -> tuple:
    """All that is known of tensors but their addresses and values."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def find(key: tuple) -> Callable | None:
    """The launch that such a call was, for `again`; it need not be checked then.

    key: all that decides what the call does: who asks, `metadata` of all tensors, options, settings.
    """
    try:
        return None if checks.CHECK_VALUES else _known.get(key)
    except TypeError:  # an option that has no hash: what it should be is the checks' to say
        return None


def again(
    launch: Callable | None, tensors: Sequence[Tensor | None], counter: str | None = None
) -> bool:
    """Launches what `find` found; False: there is nothing, or it is not for these tensors: run the call (`learn`).

    Args:
        tensors: that the kernel takes, in its order, outputs too; None is left out.
        counter: of `library.launches`, which the call itself counts.
    """
    if launch is None:
        return False
    addresses = [x.data_ptr() for x in tensors if x is not None]
    if not launch.takes(addresses):
        return False
    if counter is not None:
        launches[counter] += 1
    launch(torch._C._cuda_getCurrentRawStream(launch.device_index), addresses)
    return True


def learn(key: tuple, tensors: Sequence[Tensor | None], run: Callable[[], None]) -> None:
    """`run()`, remembered where it was one direct launch with these tensors; as `find` and `again` have them."""
    _watching.seen = seen = []
    try:
        run()
    finally:
        _watching.seen = None
    addresses = [x.data_ptr() for x in tensors if x is not None]
    if len(seen) == 1 and seen[0][0] is not None and seen[0][1] == addresses:
        if len(_known) >= MOST:
            forget()
        with contextlib.suppress(
            TypeError
        ):  # an option that has no hash: such calls are always run
            _known[key] = seen[0][0]


def repeat(
    key: tuple, tensors: Sequence[Tensor | None], run: Callable[[], None], counter: str | None = None
) -> None:  # fmt: skip
    """`again`, or else `learn`."""
    if not again(find(key), tensors, counter):
        learn(key, tensors, run)


def note(launch: object | None, addresses: Sequence[int]) -> None:
    """Tells a `learn` around it of a launch: a `DirectLaunch`, or None for one through Triton."""
    seen = getattr(_watching, "seen", None)
    if seen is not None:
        seen.append((launch, addresses))


def forget() -> None:
    """Makes the next calls of all kinds new."""
    _known.clear()
