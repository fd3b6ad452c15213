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
