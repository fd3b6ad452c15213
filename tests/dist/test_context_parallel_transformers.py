"""Models of transformers' inside `context_parallel`: what they compute from their own length, and what they are told."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

pytest.importorskip("transformers", reason="transformers is the reference here")

import transformers

from torch_fdattn.dist import SequenceShards, context_parallel, shard_batch
from torch_fdattn.dropins import transformers as dropin

SMALL = dict(
    vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, head_dim=16,
)  # fmt: skip
KINDS = {
    "Llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "Mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {}),
    "Gemma3": (
        transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, {"query_pre_attn_scalar": 16}
    ),
    "Gemma2": (  # softcap
        transformers.Gemma2Config, transformers.Gemma2ForCausalLM,
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "gpt-oss": (  # sinks
        transformers.GptOssConfig, transformers.GptOssForCausalLM,
        {"num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered():
    dropin.register()


def total() -> int:
    return 8 * dist.get_world_size()


def models(kind: str, device, attention: str = "fdattn", **more):
    """The same weights under eager and under `attention`; large ones, so that attention matters."""
    config_class, model_class, own = KINDS[kind]
    config, made = config_class(**SMALL, **own, **more), []
    for name in ("eager", attention):
        made.append(model_class._from_config(copy.deepcopy(config), attn_implementation=name))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made[0].parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    made[1].load_state_dict(made[0].state_dict())
    return [model.to(device) for model in made]


def batch(device):
    """Tokens, positions, and a weight for each logit's sum."""
    ids = torch.arange(total(), device=device)[None].repeat(2, 1) * 7 % 61
    return (
        ids,
        torch.arange(total(), device=device)[None],
        torch.randn(2, total(), 61, device=device),
    )


def gradients(model, loss) -> list[torch.Tensor]:
    wanted = [x for x in model.parameters() if x.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [x for x in found if x is not None]


WINDOWS = (3, 8, 12)  # shorter than a rank's part, as long, and longer
LAYOUTS = ("contiguous", "zigzag", "striped")


@pytest.mark.parametrize(
    ("kind", "window", "layout", "strategy"),
    [
        *(("Llama", None, layout, "ring") for layout in LAYOUTS),
        *itertools.product(("Mistral", "Gemma3"), WINDOWS, LAYOUTS, ("ring",)),
        ("Gemma3", 12, "zigzag", "all_gather"),
        *itertools.product(("Gemma2", "gpt-oss"), (3, 12), ("zigzag",), ("ring", "all_gather")),
    ],
)
def test_logits_and_gradients(group, rank_device, kind, window, layout, strategy):
    world, rank = dist.get_world_size(), dist.get_rank()
    if layout == "striped":
        shards = SequenceShards.from_positions([range(r, total(), world) for r in range(world)])
    else:
        shards = getattr(SequenceShards, layout)(total(), world)
    more = {} if window is None else {"sliding_window": window}
    eager, ours = models(kind, rank_device, **more)
    whole = batch(rank_device)
    ids, positions, weights = shard_batch(group, shards, *whole)
    expected = eager(whole[0], use_cache=False).logits
    with context_parallel(group, shards=shards, strategy=strategy):
        found = ours(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, shards.shard(expected, rank), rtol=1e-4, atol=1e-4)
    wanted = gradients(eager, (expected * whole[2]).sum())
    mine = gradients(ours, (found * weights).sum())
    assert len(mine) == len(wanted) > 0
    for a, b in zip(mine, wanted, strict=True):
        dist.all_reduce(a)
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * b.abs().max().item())


@pytest.mark.parametrize(
    ("way", "reentrant"), [("backward", False), ("backward", True), ("grad", False)]
)
def test_gradient_checkpointing(group, rank_device, way, reentrant):
    """The backward calls the layers again, with the positions that they were told, and attention over all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(total(), world)
    eager, ours = models("Mistral", rank_device, sliding_window=12)
    whole = batch(rank_device)
    ids, positions, weights = shard_batch(group, shards, *whole)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours.train()
    expected = eager(whole[0], use_cache=False).logits
    wanted = gradients(eager, (expected * whole[2]).sum())
    with context_parallel(group, shards=shards):
        found = ours(ids, position_ids=positions, use_cache=False).logits
        loss = (found * weights).sum()
        if way == "grad":
            mine = gradients(ours, loss)
        else:
            loss.backward()
            mine = [x.grad for x in ours.parameters()]
    torch.testing.assert_close(found, shards.shard(expected, rank), rtol=1e-4, atol=1e-4)
    for a, b in zip(mine, wanted, strict=True):
        dist.all_reduce(a)
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * b.abs().max().item())


@pytest.mark.parametrize(
    ("reentrant", "error", "message"),
    [
        (False, torch.utils.checkpoint.CheckpointError, "number of tensors"),
        (True, RuntimeError, "of 1 attention calls over all ranks 0 were recomputed inside of one"),
    ],
)
@pytest.mark.parametrize("attention", ["fdattn", "sdpa"])
def test_a_backward_outside_of_a_checkpoints_context_raises(
    group, rank_device, attention, reentrant, error, message
):
    """It would make attention of this rank's tokens of what was attention of all."""
    needs_two()
    shards = SequenceShards.contiguous(total(), dist.get_world_size())
    _, ours = models("Llama", rank_device, attention)
    ids, positions, _ = shard_batch(group, shards, *batch(rank_device))
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    ours.train()
    with context_parallel(group, shards=shards):
        found = ours(ids, position_ids=positions, use_cache=False).logits
    with pytest.raises(error, match=message):
        found.sum().backward()


def needs_two() -> None:
    if dist.get_world_size() < 2:
        pytest.skip("needs 2 ranks: one rank's positions are all")


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("given", ["none", "local", "others"])
def test_positions_that_are_not_the_shards_are_refused_on_every_rank(
    group, rank_device, given, layout
):
    """On rank 0, too, whose own are right where shards are contiguous: it would wait for the others."""
    needs_two()
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = getattr(SequenceShards, layout)(total(), world)
    _, ours = models("Llama", rank_device)
    ids = shard_batch(group, shards, batch(rank_device)[0])[0]
    positions = {
        "none": None,
        "local": torch.arange(8, device=rank_device)[None],
        "others": shards.positions((rank + 1) % world, rank_device)[None],
    }[given]
    message = r"give the model position_ids, this rank's part of all positions.*on rank 1 position_ids are \["
    with (
        context_parallel(group, shards=shards),
        pytest.raises(ValueError, match=message),
    ):
        ours(ids, position_ids=positions, use_cache=False)


def test_positions_that_changed_in_place_are_looked_at_again(group, rank_device):
    needs_two()
    shards = SequenceShards.zigzag(total(), dist.get_world_size())
    _, ours = models("Llama", rank_device)
    ids, positions, _ = shard_batch(group, shards, *batch(rank_device))
    with context_parallel(group, shards=shards):
        ours(ids, position_ids=positions, use_cache=False)
        if dist.get_rank() == 1:
            positions += 1
        else:
            positions += 0
        with pytest.raises(ValueError, match="on rank 1 position_ids are"):
            ours(ids, position_ids=positions, use_cache=False)


def test_padding_of_any_rank_is_refused_on_all(group, rank_device):
    needs_two()
    shards = SequenceShards.contiguous(total(), dist.get_world_size())
    _, ours = models("Llama", rank_device)
    ids, positions, _ = shard_batch(group, shards, *batch(rank_device))
    mask = torch.ones_like(ids)
    with context_parallel(group, shards=shards):
        same = ours(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        assert torch.equal(same, ours(ids, position_ids=positions, use_cache=False).logits)
        if dist.get_rank() == 1:
            mask[0, -2:] = 0
        with pytest.raises(
            NotImplementedError, match=r"takes no padding.*on rank 1 attention_mask has padding"
        ):
            ours(ids, position_ids=positions, attention_mask=mask, use_cache=False)


def test_what_would_follow_from_a_ranks_length_is_refused(group, rank_device):
    world = dist.get_world_size()
    shards = SequenceShards.contiguous(total(), world)
    ids, positions, _ = shard_batch(group, shards, *batch(rank_device))
    options = {"position_ids": positions, "use_cache": False}
    _, ours = models("Llama", rank_device)
    cache = transformers.DynamicCache(config=ours.config)
    with context_parallel(group, shards=shards):
        ours(ids, position_ids=positions, past_key_values=cache)
        with pytest.raises(
            NotImplementedError, match=r"has no cache \(past_key_values must be empty"
        ):
            ours(ids, position_ids=positions, past_key_values=cache)
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        _, longer = models("Llama", rank_device, rope_parameters=rope)
        longer.config.max_position_embeddings = total() - 1
        with pytest.raises(
            NotImplementedError, match="rotary embeddings of rope_type 'dynamic' follow from"
        ):
            longer(ids, **options)


def test_layers_that_mix_tokens_otherwise_are_refused(group, rank_device):
    shards = SequenceShards.contiguous(total(), dist.get_world_size())
    ids, positions, _ = shard_batch(group, shards, *batch(rank_device))
    config = transformers.Lfm2Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"},
        layer_types=["conv", "full_attention"],
    )
    model = transformers.Lfm2ForCausalLM._from_config(config, attn_implementation="fdattn")
    with (
        context_parallel(group, shards=shards),
        pytest.raises(
            NotImplementedError, match=r"layers of .*conv.* would see this rank's tokens alone"
        ),
    ):
        model.to(rank_device)(ids, position_ids=positions, use_cache=False)


def test_an_encoder_whose_layers_are_told_positions_as_it_is_given_them(group, rank_device):
    """BERT adds positions to its tokens, and makes its own where it is given none: its layers are then told none."""
    shards = SequenceShards.zigzag(total(), dist.get_world_size())
    whole = batch(rank_device)
    ids, positions, _ = shard_batch(group, shards, *whole)
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    eager, ours = (
        transformers.BertModel._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in ("eager", "fdattn")
    )
    ours.load_state_dict(eager.state_dict())
    eager, ours = eager.to(rank_device), ours.to(rank_device)
    expected = eager(whole[0]).last_hidden_state
    with context_parallel(group, shards=shards):
        found = ours(ids, position_ids=positions).last_hidden_state
        with pytest.raises(
            NotImplementedError, match="needs position_ids, and its layers are told none"
        ):
            ours(ids)
    torch.testing.assert_close(found, shards.shard(expected, dist.get_rank()), rtol=1e-4, atol=1e-4)


def test_a_window_that_transformers_drops_for_sdpa_is_refused(group, rank_device):
    """It makes no mask where the window is longer than a rank's part, and tells SDPA nothing of it."""
    needs_two()
    shards = SequenceShards.contiguous(total(), dist.get_world_size())
    ids, positions, _ = shard_batch(group, shards, *batch(rank_device))
    options = {"position_ids": positions, "use_cache": False}
    _, model = models("Mistral", rank_device, "sdpa", sliding_window=12)
    with (
        context_parallel(group, shards=shards),
        pytest.raises(
            NotImplementedError,
            match="loses a sliding window that is longer than a rank's part, got 12",
        ),
    ):
        model(ids, **options)
    eager, model = models("Mistral", rank_device, "sdpa", sliding_window=total())
    with context_parallel(group, shards=shards):  # one that hides nothing
        found = model(ids, **options).logits
    expected = eager(batch(rank_device)[0], use_cache=False).logits
    torch.testing.assert_close(found, shards.shard(expected, dist.get_rank()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[1, 1], [7, 1]])
def test_single_tokens_under_sdpa_are_refused_on_every_rank(lengths, group, rank_device):
    """transformers takes attention of one query for a step over a cache, which is not causal."""
    needs_two()
    lengths = lengths + [3] * (dist.get_world_size() - 2)
    begins = list(itertools.accumulate(lengths, initial=0))
    shards = SequenceShards.from_positions([range(*x) for x in itertools.pairwise(begins)])
    positions = shards.positions(dist.get_rank(), rank_device)[None]
    for attention in ("sdpa", "fdattn"):
        eager, ours = models("Llama", rank_device, attention)
        with context_parallel(group, shards=shards):
            if attention == "sdpa":
                with pytest.raises(NotImplementedError, match="must have two tokens on every rank"):
                    ours(positions, position_ids=positions, use_cache=False)
                continue
            found = ours(positions, position_ids=positions, use_cache=False).logits
        expected = eager(torch.arange(sum(lengths), device=rank_device)[None], use_cache=False)
        own = shards.shard(expected.logits, dist.get_rank())
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("contiguous", "none", r"position_ids are \[0, 1, .* where the shard has \[\d+, "),
        ("contiguous", "shards", None),
        ("zigzag", "shards", "which transformers takes for packed sequences"),
    ],
)
def test_positions_under_sdpa(kind, given, message, group, rank_device):
    """Right, or refused on every rank: SDPA is told no positions, and without them logits were 0.1 off in silence."""
    needs_two()
    shards = getattr(SequenceShards, kind)(total(), dist.get_world_size())
    ids, positions, _ = shard_batch(group, shards, *batch(rank_device))
    eager, model = models("Llama", rank_device, "sdpa")
    options = {"position_ids": positions} if given == "shards" else {}
    with context_parallel(group, shards=shards):
        if message is not None:
            with pytest.raises(ValueError, match=message):
                model(ids, use_cache=False, **options)
            return
        found = model(ids, use_cache=False, **options).logits
    expected = eager(batch(rank_device)[0], use_cache=False).logits
    torch.testing.assert_close(found, shards.shard(expected, dist.get_rank()), rtol=1e-4, atol=1e-4)


def test_a_mask_of_one_rank_is_refused_on_all(group, rank_device):
    needs_two()
    # Of a shape that no other test has: on GPUs ranks compare the first call of each kind (`check_equal_on_all_ranks`).
    x = torch.randn(1, 5, 8, 24, device=rank_device)
    mask = torch.ones(8, 8, dtype=torch.bool, device=rank_device) if dist.get_rank() == 0 else None
    shards = SequenceShards.contiguous(total(), dist.get_world_size())
    with (
        context_parallel(group, shards=shards),
        pytest.raises(NotImplementedError, match=r"got attn_mask"),
    ):
        torch.nn.functional.scaled_dot_product_attention(x, x, x, mask, is_causal=mask is None)


def test_cu_seq_lens_are_refused(group, rank_device):
    """Unless `context_parallel` was told the documents."""
    world = dist.get_world_size()
    shards = SequenceShards.contiguous(total(), world)
    _, ours = models("Llama", rank_device)
    ids, positions, _ = shard_batch(group, shards, *batch(rank_device))
    begins = torch.tensor([0, total()], dtype=torch.int32, device=rank_device)
    packed = dict(cu_seq_lens_q=begins, cu_seq_lens_k=begins, max_length_q=8, max_length_k=8)
    with (
        context_parallel(group, shards=shards),
        pytest.raises(
            NotImplementedError,
            match="takes cu_seq_lens_q with cu_seqlens of context_parallel alone",
        ),
    ):
        ours(ids[:1], position_ids=positions, use_cache=False, **packed)
