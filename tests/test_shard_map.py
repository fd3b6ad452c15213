"""`dist.ShardMap`: what it refuses; what it maps is tested with the ops (tests/dist) and by its doctest."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from torch_fdattn.dist import ShardMap


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((3, 2, 4), ValueError, "rank must be from 0 to 1, for a world_size of 2, got 3"),
        ((2, 2, 4), ValueError, "rank must be from 0 to 1, for a world_size of 2, got 2"),
        ((-1, 2, 4), ValueError, "rank must be from 0 to 1, .* got -1"),
        ((0, 0, 4), ValueError, "world_size must be at least 1, got 0"),
        ((0, 2, 0), ValueError, "kv_block must be at least 1, got 0"),
        ((0, 2, 1.5), TypeError, "kv_block must be an int, got float"),
        (("0", 2, 4), TypeError, "rank must be an int, got str"),
        ((0, True, 4), TypeError, "world_size must be an int, got bool"),
    ],
)
def test_what_is_refused(sizes: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ShardMap(*sizes)


def test_it_is_a_tuple_of_its_sizes() -> None:
    shards = ShardMap(1, 2, 4)
    assert shards == (1, 2, 4) == tuple(ShardMap(kv_block=4, rank=1, world_size=2))
    assert isinstance(shards._replace(rank=0), ShardMap)
    assert type(copy.deepcopy(shards)) is type(pickle.loads(pickle.dumps(shards))) is ShardMap
    assert repr(shards) == "ShardMap(rank=1, world_size=2, kv_block=4)"


def test_in_a_compiled_function() -> None:
    def lengths(x: torch.Tensor) -> torch.Tensor:
        return ShardMap(1, 2, 4).local_lengths(x)

    x = torch.tensor([4, 6, 20])
    compiled = torch.compile(lengths, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), lengths(x))
