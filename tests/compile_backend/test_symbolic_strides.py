"""The order in which a result lies in memory where its lengths are symbols."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from torch_fdattn.compile_backend.emit.attention import _order_of_symbolic
from torch_fdattn.compile_backend.report import Unsupported


def symbolic(*shape: int) -> torch.Tensor:
    """Contiguous, each size a symbol."""
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode.from_tensor(torch.empty(shape), symbolic_context=context)


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_every_order(order):
    x = symbolic(3, 5, 7)
    assert any(not isinstance(stride, int) for stride in x.stride())
    moved = x.permute(*order)
    found = _order_of_symbolic(moved)
    assert [order[dim] for dim in found] == [0, 1, 2]
    assert moved.permute(*found).stride() == x.stride()


def test_gaps_have_none():
    with pytest.raises(Unsupported, match="layout"):
        _order_of_symbolic(symbolic(3, 5, 7)[:, 1:])
