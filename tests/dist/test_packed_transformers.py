"""Models of transformers' trained on packed documents over the ranks, and on one process: losses and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("transformers", reason="transformers is the reference here")

import transformers
from transformers import masking_utils

from torch_fdattn.compile_backend import fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, shard_batch
from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.dropins import transformers as dropin
from torch_fdattn.dropins.transformers import masks_of_positions

VOCAB = 61
SMALL = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, head_dim=16,
)  # fmt: skip
KINDS = {
    "Llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    # Windows shorter than the longest document, and longer than a rank's part of it.
    "Mistral": (
        transformers.MistralConfig, transformers.MistralForCausalLM, dict(sliding_window=12)
    ),
    "Gemma3": (
        transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM,
        dict(query_pre_attn_scalar=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt-oss": (
        transformers.GptOssConfig, transformers.GptOssForCausalLM,
        dict(num_local_experts=2, num_experts_per_tok=2, sliding_window=5),
    ),
}  # fmt: skip
by_position = pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"),
    reason="transformers before 5.23 compares indices of local tokens",
)


@pytest.fixture(scope="module", autouse=True)
def registered():
    dropin.register()


def documents() -> list[int]:
    """Of 16 tokens a rank: one lies over the ranks' borders, one is empty."""
    total = 16 * dist.get_world_size()
    return [0, 5, 5, total // 2 + 6, total - 3, total]


def shards_of(layout: str) -> SequenceShards:
    world = dist.get_world_size()
    if layout == "balanced":
        return SequenceShards.balanced(16 * world, world, cu_seqlens=documents(), chunks=3)
    return getattr(SequenceShards, layout)(16 * world, world)


def models(kind: str, device, attention: str):
    """The same weights under eager and under `attention`; large ones, so that attention matters."""
    config_class, model_class, own = KINDS[kind]
    alone, ours = (
        model_class._from_config(config_class(**SMALL, **own), attn_implementation=name)
        for name in ("eager", attention)
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in alone.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    ours.load_state_dict(alone.state_dict())
    return alone.to(device), ours.to(device)


def batch(device):
    """Tokens, positions that begin anew in each document, and labels, -100 at each document's last token."""
    generator = torch.Generator().manual_seed(1)
    begins = torch.tensor(documents())
    ids = torch.randint(VOCAB, (1, documents()[-1]), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, begins[1:] - 1] = -100
    positions = SequenceShards.contiguous(documents()[-1], 1).positions(0, cu_seqlens=begins)[None]
    return ids.to(device), positions.to(device), labels.to(device)


def loss_of(model, ids, positions, labels, count: int, **more):
    logits = model(ids, position_ids=positions, use_cache=False, **more).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count


def with_masks(model):
    """gpt-oss makes its masks of indices: what packs documents for it are masks of positions."""

    def run(ids, position_ids, use_cache):
        masks = masks_of_positions(model, ids, position_ids)
        return model(ids, position_ids=position_ids, attention_mask=masks, use_cache=use_cache)

    return run


def check_gradients(ours, alone) -> None:
    """The sums of all ranks: to 1e-5 of the parameter's largest, or (a router's bias, whose sum all but vanishes) 1e-6 of all."""
    of_all = max(x.grad.abs().max().item() for x in alone.parameters() if x.grad is not None)
    for (name, own), right in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert (own.grad is None) == (right.grad is None), name
        if own.grad is not None:
            dist.all_reduce(own.grad)
            atol = max(1e-5 * right.grad.abs().max().item(), 1e-6 * of_all)
            torch.testing.assert_close(own.grad, right.grad, rtol=1e-5, atol=atol)


def check_trains_alike(alone, reference, ours, run, around, shards, group, device) -> None:
    """Three steps: losses and gradients to rounding.

    reference, run: `alone` on one process, and `ours` over the ranks, called inside of `around()`.
    """
    whole = batch(device)
    part = shard_batch(group, shards, *whole)
    count = int((whole[2] != -100).sum())
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (alone, ours)]
    losses = []
    for _ in range(3):
        expected = loss_of(reference, *whole, count)
        expected.backward()
        with around():
            loss = loss_of(run, *part, count)
            loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        losses.append(loss.item())
        check_gradients(ours, alone)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] > losses[1] > losses[2]


LAYOUTS = ("contiguous", "zigzag", "balanced")


@by_position
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_drop_in(group, rank_device, kind, layout) -> None:
    alone, ours = models(kind, rank_device, "fdattn")
    shards = shards_of(layout)

    def around():
        return context_parallel(group, shards=shards, cu_seqlens=documents())

    reference = with_masks(alone) if kind == "gpt-oss" else alone
    check_trains_alike(alone, reference, ours, ours, around, shards, group, rank_device)


QUICK = {("Mistral", "zigzag"), ("gpt-oss", "balanced")}


@by_position
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_compiled(group, rank_device, kind, layout) -> None:
    alone, ours = models(kind, rank_device, "eager" if kind == "gpt-oss" else "sdpa")
    shards = shards_of(layout)
    option = {"group": group, "shards": shards, "cu_seqlens": documents()}
    make = with_masks if kind == "gpt-oss" else lambda model: model
    torch._dynamo.reset()
    run = torch.compile(
        make(ours),
        backend=fdattn,
        fullgraph=True,
        options={"context_parallel": option, "lower": "aot_eager"},
    )
    around = torch.enable_grad
    check_trains_alike(alone, make(alone), ours, run, around, shards, group, rank_device)


@by_position
@pytest.mark.parametrize("kind", ["Mistral", "gpt-oss"])
def test_cu_seq_lens_and_checkpoints(group, rank_device, kind) -> None:
    """As a collator gives them; the backward attends again. Without the documents it is another loss."""
    alone, ours = models(kind, rank_device, "fdattn")
    shards, whole = shards_of("zigzag"), batch(rank_device)
    begins = torch.tensor(documents(), dtype=torch.int32, device=rank_device)
    packed = dict(cu_seq_lens_q=begins, cu_seq_lens_k=begins, max_length_q=16, max_length_k=16)
    count = int((whole[2] != -100).sum())
    expected = loss_of(with_masks(alone) if kind == "gpt-oss" else alone, *whole, count)
    expected.backward()
    torch.testing.assert_close(loss_of(ours, *whole, count, **packed), expected)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.train()
    part = shard_batch(group, shards, *whole)
    for given in (packed, {}):
        with context_parallel(group, shards=shards, cu_seqlens=begins):
            loss = loss_of(ours, *part, count, **given)
            loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        check_gradients(ours, alone)
        ours.zero_grad()
    positions = torch.arange(documents()[-1], device=rank_device)[None]
    one_document = loss_of(alone, whole[0], positions, whole[2], count)
    assert abs(one_document - expected) > 1e-2


@by_position
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_positions_of_the_whole_sequence(group, rank_device, compiles) -> None:
    """Rotary embeddings make nothing of where a document begins. All ranks must be given the same kind."""
    alone, ours = models("Mistral", rank_device, "sdpa" if compiles else "fdattn")
    shards, rank = shards_of("contiguous"), dist.get_rank()
    ids, positions, _ = batch(rank_device)
    expected = alone(ids, position_ids=positions, use_cache=False).logits
    own_ids, in_documents = shard_batch(group, shards, ids, positions)
    in_sequence = shards.positions(rank, rank_device)[None]
    option = {"group": group, "shards": shards, "cu_seqlens": documents()}

    def run(position_ids):
        if compiles:
            return compiled(own_ids, position_ids=position_ids, use_cache=False).logits
        with context_parallel(group, shards=shards, cu_seqlens=documents()):
            return ours(own_ids, position_ids=position_ids, use_cache=False).logits

    if compiles:
        torch._dynamo.reset()
        options = {"context_parallel": option, "lower": "aot_eager"}
        compiled = torch.compile(ours, backend=fdattn, fullgraph=True, options=options)
    for given in (in_documents, in_sequence):
        torch.testing.assert_close(run(given), shards.shard(expected, rank), rtol=1e-4, atol=1e-4)
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="on rank 1 position_ids begin with 0 in each document") as raised:  # fmt: skip
            run(in_documents if rank == 1 else in_sequence)
        assert "on rank 0 position_ids are of the whole sequence" in str(raised.value)


@pytest.mark.parametrize("wrong", ["not told", "of one rank", "documents of one rank", "no end", "cu_seq_lens"])  # fmt: skip
def test_what_does_not_fit_is_named_on_every_rank(group, rank_device, wrong) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    if world < 2:
        pytest.skip("needs 2 ranks")
    _, ours = models("Llama", rank_device, "fdattn")
    shards, told, more = shards_of("contiguous"), documents(), {}
    ids, positions = shard_batch(group, shards, *batch(rank_device)[:2])
    odd = rank == 1
    if wrong == "not told":
        told, match = (
            None,
            r"with cu_seqlens, which packed documents need.*on rank 1 position_ids are \[",
        )
    elif wrong == "of one rank":
        positions, match = (
            positions + odd,
            r"\(on rank 1 position_ids are \[.* where the shard has \[",
        )
    elif wrong == "documents of one rank":
        told = [0, 3 if odd else 4, *told[2:]]
        positions = shards.positions(rank, rank_device, cu_seqlens=told)[None]
        match = r"cu_seqlens must be the same on all ranks, got \(0, 4, .* on rank 0, \(0, 3"
    elif wrong == "no end":
        told, match = (
            told[:-1],
            r"on rank 1 cu_seqlens must begin with 0, end with the \d+ tokens of all ranks",
        )
    else:
        lens = torch.tensor(told[: -1 if odd else None], dtype=torch.int32, device=rank_device)
        more, match = (
            dict(cu_seq_lens_q=lens),
            r"\(on rank 1 the layers' cu_seq_lens are \[0, 5, 5, \d+, \d+\], and",
        )
    with (
        pytest.raises(ValueError, match=match),
        context_parallel(group, shards=shards, cu_seqlens=told),
    ):
        ours(ids, position_ids=positions, use_cache=False, **more)


def test_documents_of_one_rank_are_named_by_positions_too(group, rank_device) -> None:
    """Where all ranks had compared both packings before."""
    if dist.get_world_size() < 2:
        pytest.skip("needs 2 ranks")
    rank, shards = dist.get_rank(), shards_of("contiguous")
    packings = [[0, first, *documents()[2:]] for first in (2, 1)]
    for told in packings:
        with context_parallel(group, shards=shards, cu_seqlens=told):
            pass
    told = packings[rank == 1]
    positions = shards.positions(rank, rank_device, cu_seqlens=told)[None]
    _, ours = models("Llama", rank_device, "fdattn")
    (ids,) = shard_batch(group, shards, batch(rank_device)[0])
    match = r"on rank 0 cu_seqlens are \[0, 2, .*on rank 1 cu_seqlens are \[0, 1"
    with (
        assume_equal_on_all_ranks(),
        pytest.raises(ValueError, match=match),
        context_parallel(group, shards=shards, cu_seqlens=told),
    ):
        ours(ids, position_ids=positions, use_cache=False)


def test_cu_seq_lens_that_change_in_place_are_looked_at_again(group, rank_device) -> None:
    _, ours = models("Llama", rank_device, "fdattn")
    shards = shards_of("contiguous")
    ids, positions = shard_batch(group, shards, *batch(rank_device)[:2])
    lens = torch.tensor(documents(), dtype=torch.int32, device=rank_device)
    with context_parallel(group, shards=shards, cu_seqlens=documents()):
        ours(ids, position_ids=positions, cu_seq_lens_q=lens, use_cache=False)
        lens[1] += 1
        with pytest.raises(ValueError, match="the layers' cu_seq_lens are"):
            ours(ids, position_ids=positions, cu_seq_lens_q=lens, use_cache=False)


def test_packed_positions_under_sdpa_are_refused(group, rank_device) -> None:
    """transformers makes a mask of this rank's positions of them."""
    if dist.get_world_size() < 2:
        pytest.skip("needs 2 ranks")
    _, model = models("Llama", rank_device, "sdpa")
    shards = shards_of("contiguous")
    ids, positions = shard_batch(group, shards, *batch(rank_device)[:2])
    with (
        context_parallel(group, shards=shards, cu_seqlens=documents()),
        pytest.raises(
            ValueError,
            match=r'use attn_implementation="fdattn".*which transformers takes for packed',
        ),
    ):
        model(ids, position_ids=positions, use_cache=False)
