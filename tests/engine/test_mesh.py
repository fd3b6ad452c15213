"""The tiny model on gloo ranks: the cache sharded by position, the model by heads, or both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.tiny import PROMPTS, greedy, random_model
from tests.forked import call_on_ranks
from torch_fdattn.engine import Engine, PromptError, Sampling
from torch_fdattn.models.parallelize import parallelize


def one_rank(rank: int, folder: Path, shape: tuple[int, int], strategy: str) -> None:
    """Tokens of this rank: greedy, then drawn with a seed of its own."""
    torch.set_num_threads(1)
    size = shape[0] * shape[1]
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("kv", "tp"))
    kv, tp = (mesh[name].get_group().group_name for name in ("kv", "tp"))
    model = parallelize(random_model("cpu"), mesh["tp"], strategy=strategy)
    engine = Engine(
        model, batch=4, capacity=36, kv_group=kv, kv_block=4, tp_group=tp, prefill_chunk=6
    )
    end = greedy(random_model("cpu"), PROMPTS[0], 4)[-1]
    found = [list(engine.generate(PROMPTS, 16, eos_ids=[end]))]
    for _ in range(2):
        engine.reset()
        sampling = Sampling(temperature=2.0, seed=rank)
        found.append(list(engine.generate(PROMPTS, 16, sampling=sampling)))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        pytest.param((3, 1), "all_reduce", marks=pytest.mark.slow),
        pytest.param((1, 3), "all_reduce", marks=pytest.mark.slow),
        ((2, 2), "ag_rs"),
    ],
)
def test_ranks_agree_and_write_what_one_process_writes(shape, strategy, tmp_path):
    size = shape[0] * shape[1]
    call_on_ranks(one_rank, (tmp_path, shape, strategy), size)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert all(theirs == found[0] for theirs in found)
    expected, *drawn = found[0]
    alone = Engine(random_model("cpu"), batch=4, capacity=36)
    end = greedy(alone.model, PROMPTS[0], 4)[-1]
    assert expected == list(alone.generate(PROMPTS, 16, eos_ids=[end]))
    assert drawn[0] == drawn[1] != expected


def caching_rank(rank: int, folder: Path) -> None:
    """Pages of bytes, where ranks share the cache's positions and where they split its heads."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    group, model = dist.group.WORLD.group_name, random_model("cpu")
    options = dict(batch=4, capacity=36, kv_cache="paged", page_size=5, kv_dtype="fp8_e4m3")
    expected = list(Engine(model, **options).generate(PROMPTS, 6))
    for strategy, kv_block in (("star", 3), ("ring", None)):
        engine = Engine(model, kv_group=group, kv_block=kv_block, strategy=strategy, **options)
        for _ in range(2):
            assert list(engine.generate(PROMPTS, 6)) == expected
            engine.reset()
    few = Engine(model, batch=4, capacity=36, kv_group=group, kv_block=3, kv_cache="paged", pages=1)
    with pytest.raises(PromptError, match="pages must be at least"):
        few.generate(PROMPTS, 6)  # on both ranks, though one of them would have enough
    engine = Engine(parallelize(model, group), tp_group=group, **options)
    assert list(engine.generate(PROMPTS, 6)) == expected
    (folder / f"{rank}").touch()
    dist.destroy_process_group()


def test_paged_and_quantised_caches_are_shared_out(tmp_path):
    call_on_ranks(caching_rank, (tmp_path,), 2)
    assert all((tmp_path / f"{rank}").exists() for rank in range(2))
