"""Models of transformers' that mix or count tokens besides attention, compiled over the ranks: refused on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is the reference here")

import transformers

from tests.dist.test_compiled_transformers import SMALL, batch, by_position, compiled
from torch_fdattn.dist import SequenceShards, shard_batch

ROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0,
    "original_max_position_embeddings": 12,
}  # fmt: skip
BERT = (transformers.BertConfig, transformers.BertModel, {})
LFM2 = (transformers.Lfm2Config, transformers.Lfm2ForCausalLM, {"layer_types": ["conv", "full_attention"]})  # fmt: skip
PHI3 = (
    transformers.Phi3Config, transformers.Phi3ForCausalLM,
    {"rope_parameters": ROPE, "original_max_position_embeddings": 12, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
)  # fmt: skip


def given(kind, group, device, total: int):
    """A model, and what it is given of all tokens and of this rank's."""
    config_class, model_class, own = kind
    torch.manual_seed(0)
    model = model_class(config_class(**{**SMALL, **own})).to(device).eval()
    shards = SequenceShards.contiguous(total, dist.get_world_size())
    whole = batch(total, device)
    return model, shards, whole, shard_batch(group, shards, *whole)


def result(outputs):
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def check_refused(group, device, kind, said: str, **more) -> None:
    model, shards, _, (ids, positions) = given(kind, group, device, 8 * dist.get_world_size())
    more = {"position_ids": positions} if not more else {}
    with pytest.raises(Exception, match=said), torch.no_grad():
        compiled(model, group, shards)(ids, **more)


@by_position
def test_convolutions_over_tokens(group, rank_device) -> None:
    check_refused(group, rank_device, LFM2, r"a convolution \(conv1d\) over tokens")


@by_position
def test_frequencies_by_the_longest_position(group, rank_device) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks: one has no position beyond the original length")
    check_refused(group, rank_device, PHI3, "rope_type 'longrope'")


@by_position
def test_frequencies_where_no_position_is_long(group, rank_device) -> None:
    total = 12 // dist.get_world_size() * dist.get_world_size()
    model, shards, whole, own = given(PHI3, group, rank_device, total)
    with torch.no_grad():
        expected = result(model(whole[0], position_ids=whole[1], use_cache=False))
        found = result(compiled(model, group, shards)(own[0], position_ids=own[1], use_cache=False))
    torch.testing.assert_close(found, shards.shard(expected, dist.get_rank(), 1), rtol=1e-4, atol=1e-5)  # fmt: skip


@by_position
def test_an_encoder_that_counts_its_tokens(group, rank_device) -> None:
    """It makes no mask, by which its positions would be seen. Where they are right, on the first rank, the others' refusal comes."""
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks: one counts from the first token")
    check_refused(group, rank_device, BERT, "give the model position_ids", no_positions=True)


@by_position
def test_an_encoder_that_is_told_its_positions(group, rank_device) -> None:
    total = 8 * dist.get_world_size()
    model, shards, whole, own = given(BERT, group, rank_device, total)
    with torch.no_grad():
        expected = result(model(whole[0], position_ids=whole[1]))
        found = result(compiled(model, group, shards)(own[0], position_ids=own[1]))
    torch.testing.assert_close(found, shards.shard(expected, dist.get_rank(), 1), rtol=1e-4, atol=1e-5)  # fmt: skip
