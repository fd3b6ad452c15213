"""What Python's garbage collection sees while an engine serves."""

import gc
import weakref

import pytest

from torch_fdattn.engine import frozen_heap


class Ring:
    """An object that refers to itself, which garbage collection alone lets go."""

    def __init__(self) -> None:
        self.own = self


def test_what_there_was_before_is_not_visited() -> None:
    garbage, held = weakref.ref(Ring()), Ring()
    seen = weakref.ref(held)
    with frozen_heap():
        assert garbage() is None  # let go before the rest was frozen
        del held
        new = weakref.ref(Ring())
        gc.collect()
        assert seen() is not None
        assert new() is None
    gc.collect()
    assert seen() is None


def test_an_error_ends_it() -> None:
    held = Ring()
    seen = weakref.ref(held)
    with pytest.raises(KeyError), frozen_heap():
        raise KeyError
    del held
    gc.collect()
    assert seen() is None
