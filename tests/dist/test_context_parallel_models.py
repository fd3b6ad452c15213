"""Models of transformers' inside `context_parallel` whose own forward decides what their positions are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is the reference here")

import transformers

from torch_fdattn.dist import SequenceShards, context_parallel, shard_batch
from torch_fdattn.dropins import transformers as dropin

DECODER = dict(
    vocab_size=61, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, max_position_embeddings=64,
    is_decoder=True, is_encoder_decoder=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered():
    dropin.register()


def batch(group, device):
    """Shards, and this rank's tokens and positions."""
    world = dist.get_world_size()
    ids = torch.arange(8 * world, device=device)[None] * 7 % 61
    shards = SequenceShards.contiguous(8 * world, world)
    return shards, *shard_batch(group, shards, ids, torch.arange(8 * world, device=device)[None])


def llama(device, attention: str = "fdattn", model_class=transformers.LlamaForCausalLM):
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation=attention).to(device).eval()


@pytest.mark.parametrize("attention", ["fdattn", "sdpa"])
@pytest.mark.parametrize("ranks", ["all", "one"])
def test_labels_that_the_models_loss_would_shift(ranks, attention, group, rank_device):
    """Within a rank's part: the label of its last token is another rank's. What is shifted already is not touched."""
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks: one has all labels")
    model = llama(rank_device, attention)
    shards, ids, positions = batch(group, rank_device)
    given = {"labels": ids} if ranks == "all" or dist.get_rank() == 1 else {}
    with context_parallel(group, shards=shards):
        with pytest.raises(ValueError, match="on rank 1 LlamaForCausalLM is given labels"):
            model(ids, position_ids=positions, use_cache=False, **given)
        shifted = {"labels": ids, "shift_labels": ids}
        found = model(ids, position_ids=positions, use_cache=False, **shifted)
    expected = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), ids.flatten())
    torch.testing.assert_close(found.loss, expected)


@pytest.mark.parametrize("attention", ["fdattn", "sdpa"])
def test_two_forwards_of_which_one_rank_is_given_the_same_positions(attention, group, rank_device):
    """The positions of both are compared, also where one of them has seen the tensor: the others would wait."""
    model = llama(rank_device, attention)
    shards, ids, positions = batch(group, rank_device)
    again = positions if dist.get_rank() == 0 else positions.clone()
    with torch.no_grad(), context_parallel(group, shards=shards):
        first = model(ids, position_ids=positions, use_cache=False).logits
        second = model(ids, position_ids=again, use_cache=False).logits
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_labels_that_no_loss_shifts(group, rank_device):
    """A class for each token."""
    model_class = transformers.LlamaForTokenClassification
    model = llama(rank_device, model_class=model_class)
    shards, ids, positions = batch(group, rank_device)
    with context_parallel(group, shards=shards):
        loss = model(ids, position_ids=positions, use_cache=False, labels=ids % 2).loss
    assert loss.isfinite()


@pytest.mark.parametrize("attention", ["fdattn", "sdpa"])
@pytest.mark.parametrize("kind", ["Bart", "Blenderbot", "Marian", "MBart", "Pegasus"])
def test_a_decoder_that_counts_its_positions_by_itself_is_refused(
    kind, attention, group, rank_device
):
    """Its layers are told the position_ids of the call, which its embedding never sees."""
    config = getattr(transformers, f"{kind}Config")(**DECODER)
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    model = model_class._from_config(config, attn_implementation=attention).to(rank_device).eval()
    shards, ids, positions = batch(group, rank_device)
    with (
        context_parallel(group, shards=shards),
        pytest.raises(
            NotImplementedError, match=rf"has position_ids as a parameter.*got {kind}\w*Decoder:"
        ),
    ):
        model(ids, position_ids=positions, use_cache=False)
