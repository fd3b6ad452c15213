"""Each family over two ranks: its model split, loaded in parts, and its windows and softcaps in a cache that ranks share."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.dist.parts import assert_near, assert_same_gradients, hf_model
from tests.engine.cached_batch import CachedBatch
from tests.models.hf_models import FAMILIES
from torch_fdattn.dist.tensor_parallel.layers import STRATEGIES
from torch_fdattn.models import Transformer, load_model, load_parallel
from torch_fdattn.models.loading import SafetensorsWeights
from torch_fdattn.models.parallelize import parallelize

FAST = ("gemma2", "smollm3_window")
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(params=CASES)
def folder(request, tmp_path, group):
    """Where transformers saved a model of the family, in shards."""
    hf_model(request.param).save_pretrained(tmp_path, max_shard_size="200KB")  # on rank 0 alone
    shared = [tmp_path]
    dist.broadcast_object_list(shared, 0)
    dist.barrier()
    return shared[0]


def draw(model: Transformer, device) -> torch.Tensor:
    """Beyond the window, and no multiple of the ranks."""
    return torch.randint(model.config.vocab_size, (2, 33)).to(device)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logits_and_gradients(folder, group, rank_device, strategy: str) -> None:
    dense = load_model(folder, device=rank_device).requires_grad_(True)
    parallel = parallelize(copy.deepcopy(dense), group, strategy)
    tokens, found = draw(dense, rank_device), []
    for model in (dense, parallel):
        found.append(model(tokens))
        F.cross_entropy(found[-1][:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert_near(found[1], found[0])
    config = dense.config
    assert_same_gradients(parallel, dense, config.num_heads, config.num_kv_heads, config.head_dim)


@torch.no_grad()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inference_forms(folder, group, rank_device, strategy: str) -> None:
    dense = load_model(folder, device=rank_device)
    tokens = draw(dense, rank_device)
    expected = dense(tokens)
    for model in (parallelize(copy.deepcopy(dense).for_inference(), group, strategy),
                  load_parallel(folder, group, strategy=strategy, device=rank_device).for_inference()):  # fmt: skip
        assert_near(model(tokens), expected)


def parameter_bytes() -> int:
    """Of all parameters that are alive and have memory."""
    alive = [x for x in gc.get_objects() if type(x) is nn.Parameter and not x.is_meta]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}.values()
    )


@torch.no_grad()
@pytest.mark.parametrize("folder", ["gemma2"], indirect=True)
def test_no_rank_holds_the_model(folder, group, rank_device, monkeypatch) -> None:
    gc.collect()
    before, peak = parameter_bytes(), 0
    read = SafetensorsWeights.read

    def watched(self, name):
        nonlocal peak
        if name.endswith("down_proj.weight"):  # of each layer the last; a look takes a second
            peak = max(peak, parameter_bytes() - before)
        return read(self, name)

    monkeypatch.setattr(SafetensorsWeights, "read", watched)
    parallel = load_parallel(folder, group, strategy="all_reduce", device=rank_device)
    monkeypatch.undo()
    dense = load_model(folder, device=rank_device)
    layer = sum(x.nbytes for x in dense.layers[0].parameters())
    shard = sum(x.nbytes for x in parallel.layers[0].parameters())
    assert shard < 0.6 * layer
    assert (
        layer - dense.layers[0].mlp.down_proj.weight.nbytes
        < peak
        <= len(dense.layers) * shard + layer
    )
    tokens = draw(dense, rank_device)
    assert_near(parallel(tokens), dense(tokens))
    assert not any(x.requires_grad or x.is_meta for x in parallel.parameters())


@torch.no_grad()
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_a_cache_that_ranks_share(folder, group, rank_device, cache: str) -> None:
    """Windows reach over the borders of shards; a softcap takes passes of 16 tokens, and says so for longer ones."""
    model = load_model(folder, device=rank_device)
    prompts = draw(model, rank_device).tolist()
    options = dict(batch=2, group=group, kv_block=4)
    batch = CachedBatch(model, cache, chunk=16, **options)
    found = batch.prefill(prompts)
    assert_near(found, model(torch.tensor(prompts, device=rank_device))[:, -1])
    step = torch.tensor([[3], [4]], device=rank_device)
    found = batch.step(step)
    tokens = torch.cat((torch.tensor(prompts, device=rank_device), step), 1)
    assert_near(found, model(tokens)[:, -1])
    long = CachedBatch(model, cache, chunk=32, **options)
    if model.config.softcap and dist.get_world_size() > 1:
        with pytest.raises(
            NotImplementedError, match=r"softcap over a cache .* give it 16 at a time"
        ):
            long.prefill(prompts)
    else:
        assert_near(long.prefill(prompts), model(torch.tensor(prompts, device=rank_device))[:, -1])
