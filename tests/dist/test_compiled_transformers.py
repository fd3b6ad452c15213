"""Models of transformers' as they are, compiled over the ranks: their masks of local positions become all tokens'."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is the reference here")

import transformers
from transformers import masking_utils

from torch_fdattn.compile_backend import fdattn
from torch_fdattn.compile_backend.report import UnsupportedAttention
from torch_fdattn.dist import SequenceShards, shard_batch
from torch_fdattn.dropins.transformers import masks_of_positions

SMALL = dict(
    vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, head_dim=16, attn_implementation="sdpa",
)  # fmt: skip
KINDS = {
    "Llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "Qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "Mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {}),
    "Gemma2": (
        transformers.Gemma2Config, transformers.Gemma2ForCausalLM, {"query_pre_attn_scalar": 16}
    ),
    "gpt-oss": (
        transformers.GptOssConfig, transformers.GptOssForCausalLM,
        dict(num_local_experts=2, num_experts_per_tok=2, attn_implementation="eager"),
    ),
    "Llama4": (
        transformers.Llama4TextConfig, transformers.Llama4ForCausalLM,
        dict(
            attention_chunk_size=6, no_rope_layers=[1, 0], moe_layers=[], intermediate_size_mlp=64, attn_temperature_tuning=False,
        ),
    ),
    "Gemma3": (
        transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, {"query_pre_attn_scalar": 16}
    ),
}  # fmt: skip


def made(kind: str, device, **more):
    config_class, model_class, own = KINDS[kind]
    torch.manual_seed(0)
    return model_class(config_class(**{**SMALL, **own, **more})).to(device)


def compiled(model, group, shards, lower: str = "aot_eager"):
    torch._dynamo.reset()
    options = {"context_parallel": {"group": group, "shards": shards}, "lower": lower}
    return torch.compile(model, backend=fdattn, fullgraph=True, options=options)


def batch(total: int, device):
    ids = torch.arange(total, device=device)[None].repeat(2, 1) * 7 % 61
    return ids, torch.arange(total, device=device)[None]


by_position = pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"),
    reason="transformers before 5.23 compares indices of local tokens",
)

LAYOUTS = ("contiguous", "zigzag", "uneven")
QUICK = {("Llama", None, "zigzag"), ("Mistral", 12, "contiguous"), ("Gemma3", 5, "uneven")}


def shards_of(layout: str, world: int) -> SequenceShards:
    if layout == "uneven":
        return SequenceShards.from_positions([range(r, 8 * world + 3, world) for r in range(world)])
    return getattr(SequenceShards, layout)(8 * world, world)


def check_follows(model, shards, group, device) -> None:
    """Logits, and the gradients of all layers."""
    rank, wanted = dist.get_rank(), list(model.model.layers.parameters())
    ids, positions = batch(shards.total, device)
    expected = model(ids, position_ids=positions, use_cache=False).logits
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), wanted)
    own_ids, own_positions, own_weights = shard_batch(group, shards, ids, positions, weights)
    found = compiled(model, group, shards)(own_ids, position_ids=own_positions, use_cache=False).logits  # fmt: skip
    grads = torch.autograd.grad((found * own_weights).sum(), wanted)
    torch.testing.assert_close(found, shards.shard(expected, rank, 1), rtol=1e-4, atol=1e-5)
    for value, right in zip(grads, expected_grads, strict=True):
        dist.all_reduce(value)
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)


@by_position
@pytest.mark.parametrize(
    ("kind", "window", "layout"),
    [
        pytest.param(*case, layout, marks=() if (*case, layout) in QUICK else pytest.mark.slow)
        for case in (
            ("Llama", None),
            ("Qwen3", None),
            ("Mistral", 3),
            ("Mistral", 12),
            ("Gemma3", 5),
        )
        for layout in LAYOUTS
    ],
)
def test_follows_the_model_on_one_process(group, rank_device, kind, window, layout) -> None:
    """Windows shorter and longer than a rank's part; gradients too."""
    model = made(kind, rank_device, **({} if window is None else {"sliding_window": window}))
    check_follows(model, shards_of(layout, dist.get_world_size()), group, rank_device)


@by_position
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        pytest.param("Llama", None, marks=pytest.mark.slow),
        pytest.param("Mistral", 12, marks=pytest.mark.slow),
        ("Gemma2", 5),  # softcap
        pytest.param("Gemma3", 5, marks=pytest.mark.slow),
    ],
)
def test_eager_follows_the_model_on_one_process(group, rank_device, kind, window) -> None:
    """Its masks are numbers that are added to the scores."""
    more = {} if window is None else {"sliding_window": window}
    model = made(kind, rank_device, attn_implementation="eager", **more)
    check_follows(model, shards_of("zigzag", dist.get_world_size()), group, rank_device)


@by_position
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_llama_4_follows(group, rank_device, implementation) -> None:
    model = made("Llama4", rank_device, attn_implementation=implementation)
    check_follows(model, shards_of("zigzag", dist.get_world_size()), group, rank_device)


@by_position
def test_llama_4s_temperature_is_refused(group, rank_device) -> None:
    """It follows from indices of local tokens."""
    model = made("Llama4", rank_device, attn_temperature_tuning=True)
    shards = shards_of("contiguous", dist.get_world_size())
    ids, positions = shard_batch(group, shards, *batch(shards.total, rank_device))
    with pytest.raises(Exception, match="attn_temperature_tuning=False") as raised:
        compiled(model, group, shards)(ids, position_ids=positions, use_cache=False)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)


@by_position
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sinks_of_gpt_oss(group, rank_device, gradients) -> None:
    """Its own masks, of indices, are refused; such of positions are taken, shorter and longer windows than a rank's part."""
    model = made("gpt-oss", rank_device, sliding_window=12 if gradients else 5)
    rank, shards = dist.get_rank(), shards_of("zigzag", dist.get_world_size())
    whole = batch(shards.total, rank_device)
    own = shard_batch(group, shards, *whole)

    def run(ids, positions):
        masks = masks_of_positions(model, ids, positions)
        return model(ids, position_ids=positions, attention_mask=masks, use_cache=False).logits

    with torch.set_grad_enabled(gradients):
        expected = model(whole[0], position_ids=whole[1], use_cache=False).logits
        assert torch.equal(run(*whole), expected)
        found = compiled(run, group, shards)(*own)
    torch.testing.assert_close(found, shards.shard(expected, rank, 1), rtol=1e-4, atol=1e-5)
    if not gradients:
        with pytest.raises(Exception, match="masks_of_positions") as raised:
            compiled(model, group, shards)(own[0], position_ids=own[1], use_cache=False)
        assert isinstance(raised.value.inner_exception, UnsupportedAttention)
        return
    weights, wanted = torch.randn_like(expected), list(model.model.layers.parameters())
    expected_grads = torch.autograd.grad((expected * weights).sum(), wanted)
    grads = torch.autograd.grad((found * shards.shard(weights, rank, 1)).sum(), wanted)
    for value, right in zip(grads, expected_grads, strict=True):
        dist.all_reduce(value)
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)


@by_position
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["chunks", "prefix"])
def test_masks_of_chunks_and_prefixes(group, rank_device, kind, implementation) -> None:
    """transformers' own, of Llama 4 and by `or_mask_function`."""
    config = transformers.Llama4TextConfig(
        attn_implementation=implementation, attention_chunk_size=6
    )
    rank, shards = dist.get_rank(), shards_of("zigzag", dist.get_world_size())

    def run(x, positions):
        given = config, x.flatten(2), None, None, positions
        if kind == "chunks":
            mask = masking_utils.create_chunked_causal_mask(*given)
        else:
            mask = masking_utils.create_causal_mask(*given, lambda b, h, q, k: k < 11)
        q = x.transpose(1, 2)
        if implementation == "sdpa":
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return torch.softmax(q @ q.mT * 0.25 + mask, -1, dtype=torch.float32) @ q

    whole = (
        torch.randn(2, shards.total, 4, 16, device=rank_device),
        batch(shards.total, rank_device)[1],
    )
    found = compiled(run, group, shards)(*shard_batch(group, shards, *whole))
    torch.testing.assert_close(found, shards.shard(run(*whole), rank, 2), rtol=1e-4, atol=1e-5)


@by_position
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_activation_checkpointing(group, rank_device, implementation) -> None:
    """Layers are given the mask that the model has made."""
    model = made("Mistral", rank_device, sliding_window=5, attn_implementation=implementation).train()  # fmt: skip
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_follows(model, shards_of("zigzag", dist.get_world_size()), group, rank_device)


@by_position
@pytest.mark.slow
def test_through_inductor(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    model, shards = made("Mistral", rank_device, sliding_window=5), shards_of("zigzag", world)
    ids, positions = batch(shards.total, rank_device)
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
        own_ids, own_positions = shard_batch(group, shards, ids, positions)
        found = compiled(model, group, shards, "inductor")(own_ids, position_ids=own_positions, use_cache=False).logits  # fmt: skip
    torch.testing.assert_close(found, shards.shard(expected, rank, 1), rtol=1e-4, atol=1e-5)


@by_position
@pytest.mark.parametrize(
    "wrong",
    [
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("counted from 0", "packed")),
        "of one rank",
    ],
)
def test_positions_that_are_not_the_shards_are_named_on_every_rank(group, rank_device, wrong) -> None:  # fmt: skip
    """At each call, and the right ones are taken before and after them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if wrong != "packed" and world == 1:
        pytest.skip("needs 2 ranks")
    model, shards = made("Llama", rank_device), shards_of("contiguous", world)
    ids, positions = shard_batch(group, shards, *batch(shards.total, rank_device))
    other = {
        "counted from 0": torch.arange(8)[None],
        "packed": positions.cpu() % 3,
        "of one rank": positions.cpu() + (rank == world - 1),
    }[wrong].to(rank_device)
    run = compiled(model, group, shards)
    expected = run(ids, position_ids=positions, use_cache=False).logits
    with pytest.raises(ValueError, match=r"give the model position_ids, .*\(on rank"):
        run(ids, position_ids=other, use_cache=False)
    assert torch.equal(run(ids, position_ids=positions, use_cache=False).logits, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("given", ["no positions", "a padding mask"])
def test_masks_that_show_no_positions_are_refused(group, rank_device, given, implementation) -> None:  # fmt: skip
    model = made("Llama", rank_device, attn_implementation=implementation)
    shards = shards_of("contiguous", dist.get_world_size())
    ids, positions = shard_batch(group, shards, *batch(shards.total, rank_device))
    more = {} if given == "no positions" else dict(position_ids=positions, attention_mask=torch.ones_like(ids))  # fmt: skip
    with pytest.raises(Exception, match="give a transformers model position_ids") as raised:
        compiled(model, group, shards)(ids, use_cache=False, **more)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)


def test_windows_over_indices_of_local_tokens_are_refused(group, rank_device) -> None:
    """transformers' before 5.23: a window that is no shorter than a rank's part would be lost."""
    shards = shards_of("contiguous", dist.get_world_size())
    x = torch.randn(2, 2, 8, 16, device=rank_device)
    _, positions = shard_batch(group, shards, *batch(shards.total, rank_device))

    def layer(x, positions):
        documents = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        index = torch.arange(x.shape[2], device=x.device)
        near = (index <= index[:, None]) & (index > index[:, None] - 12)
        mask = near & (documents[:, :, None] == documents[:, None])
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None])

    with pytest.raises(Exception, match=r"transformers 5\.23 or newer") as raised:
        compiled(layer, group, shards)(x, positions)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)
