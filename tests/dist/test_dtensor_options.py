"""DTensor options of attention (slopes, sinks, masks, lengths, scales), split with batch or heads, or whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_fdattn

WHOLE, BY_BATCH, BY_HEADS = Replicate(), Shard(0), Shard(1)
KEYS = 9

#: By name: the keyword, and which of (batch, heads, queries, keys, KV heads) its dims are; 1 for a dim of size 1.
OPTIONS = {
    "slopes of heads": ("alibi_slopes", "H"),
    "slopes of sequences": ("alibi_slopes", "BH"),
    "sinks": ("sinks", "H"),
    "bias": ("attn_mask", "BHSN"),
    "bias of heads": ("attn_mask", "HSN"),
    "bias of sequences": ("attn_mask", "B11N"),
    "bias of heads for any batch": ("attn_mask", "1H1N"),
    "bias for all": ("attn_mask", "SN"),
    "boolean mask": ("attn_mask", "B1SN"),
    "lengths": ("kv_lens", "B"),
    "starts": ("q_start", "B"),
    "starts of keys": ("kv_start", "B"),
}


def sizes() -> dict[str, int]:
    world = dist.get_world_size()
    return dict(B=2 * world, H=4 * world, K=2 * world, S=5, N=KEYS) | {"1": 1}


def drawn(name: str, device: torch.device) -> Tensor:
    """Positive, so that no loss is odd in it; requires a gradient where it has one."""
    keyword, dims = OPTIONS[name]
    shape = [sizes()[x] for x in dims]
    if name == "boolean mask":
        return (torch.rand(shape) < 0.7).to(device)
    if keyword in ("kv_lens", "q_start", "kv_start"):
        return torch.randint(0, KEYS, shape, dtype=torch.int32).to(device)
    return torch.rand(shape).to(device).requires_grad_()


def placed(name: str, split: Shard | Replicate) -> Shard | Replicate:
    """An option's placement where it goes with a tensor (B, H, …) that is split so."""
    dims = OPTIONS[name][1]
    wanted = {WHOLE: None, BY_BATCH: "B", BY_HEADS: "H"}[split]
    return Shard(dims.index(wanted)) if wanted in dims else WHOLE


def distributed(x: Tensor, mesh, *placements) -> DTensor:
    part = distribute_tensor(x.detach().clone(), mesh, placements)
    return part.requires_grad_(x.requires_grad)


def qkv(device: torch.device) -> list[Tensor]:
    size = sizes()
    shapes = ((size["B"], size[h], s, 16) for h, s in (("H", 5), ("K", KEYS), ("K", KEYS)))
    return [torch.randn(x).to(device).requires_grad_() for x in shapes]


def check_step(
    call, plain: list[Tensor], parts: list[DTensor], split, lse_split=None, kept=True
) -> None:
    """Results, where they are, and gradients (kept: placed as what they are of) against the call on whole tensors."""
    out, lse = call(*plain)
    grads = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward((out, lse), grads)
    found, found_lse = call(*parts)
    assert found.placements == tuple(split)
    assert found_lse.placements == tuple(lse_split or split)
    placed_grads = [
        distribute_tensor(x, found.device_mesh, y.placements)
        for x, y in zip(grads, (found, found_lse), strict=True)
    ]
    torch.autograd.backward((found, found_lse), placed_grads)
    torch.testing.assert_close(found.full_tensor(), out)
    torch.testing.assert_close(found_lse.full_tensor(), lse)
    for part, whole in zip(parts, plain, strict=True):
        if whole.requires_grad:
            assert not kept or part.grad.placements == part.placements
            torch.testing.assert_close(part.grad.full_tensor(), whole.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("given", ["whole", "split"])
@pytest.mark.parametrize("split", [BY_BATCH, BY_HEADS], ids=["batch", "heads"])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention(mesh, rank_device, name: str, split, given: str) -> None:
    keyword = OPTIONS[name][0]
    plain = [*qkv(rank_device), drawn(name, rank_device)]
    own = placed(name, split) if given == "split" else WHOLE
    parts = [distributed(x, mesh, y) for x, y in zip(plain, (split,) * 3 + (own,), strict=True)]

    def call(q: Tensor, k: Tensor, v: Tensor, option: Tensor) -> tuple[Tensor, Tensor]:
        return torch_fdattn.attention(q, k, v, causal=True, **{keyword: option})

    check_step(call, plain, parts, [split])


@pytest.mark.parametrize("split", [BY_BATCH, BY_HEADS], ids=["batch", "heads"])
def test_everything_at_once_in_a_compiled_step(mesh, rank_device, split) -> None:
    torch._dynamo.reset()
    names = "slopes of sequences", "sinks", "bias of heads", "lengths"
    plain = [*qkv(rank_device), *(drawn(name, rank_device) for name in names)]
    where = [split] * 3 + [placed(name, split) for name in names]
    parts = [distributed(x, mesh, y) for x, y in zip(plain, where, strict=True)]

    def call(q, k, v, slopes, sinks, bias, lens):
        return torch_fdattn.attention(
            q,
            k,
            v,
            lens,
            causal=True,
            alibi_slopes=slopes,
            sinks=sinks,
            attn_mask=bias,
            softcap=5.0,
        )

    check_step(torch.compile(call, backend="aot_eager", fullgraph=True), plain, parts, [split])


def test_a_mesh_of_two_dimensions(mesh, rank_device) -> None:
    """Batch over one and heads over the other: a bias of heads is split over one of them alone."""
    world = dist.get_world_size()
    grid = init_device_mesh(rank_device.type, (world, 1), mesh_dim_names=("data", "heads"))
    names = "slopes of heads", "bias"
    plain = [*qkv(rank_device), *(drawn(name, rank_device) for name in names)]
    where = [(BY_BATCH, BY_HEADS)] * 3 + [(WHOLE, Shard(0)), (BY_BATCH, BY_HEADS)]
    parts = [distributed(x, grid, *y) for x, y in zip(plain, where, strict=True)]

    def call(q, k, v, slopes, bias):
        return torch_fdattn.attention(q, k, v, alibi_slopes=slopes, attn_mask=bias)

    check_step(call, plain, parts, [BY_BATCH, BY_HEADS])


@pytest.mark.parametrize(
    "name",
    ["slopes of heads", "slopes of sequences", "sinks", "bias", "bias of heads", "boolean mask"],
)
@pytest.mark.parametrize("given", ["whole", "split"])
def test_varlen_attention_by_heads(mesh, rank_device, name: str, given: str) -> None:
    size, keyword = sizes(), OPTIONS[name][0]
    shapes = ((12, size[h], 16) for h in "HKK")
    plain = [torch.randn(x).to(rank_device).requires_grad_() for x in shapes]
    plain.append(drawn(name, rank_device))
    begins = torch.linspace(0, 11, size["B"] + 1).to(rank_device, torch.int32)
    own = placed(name, BY_HEADS) if given == "split" else WHOLE
    where = [BY_HEADS] * 3 + [own]
    parts = [distributed(x, mesh, y) for x, y in zip(plain, where, strict=True)]
    of_mesh = distribute_tensor(begins, mesh, [WHOLE])

    def call(q, k, v, option):
        cu_seqlens = of_mesh if isinstance(q, DTensor) else begins
        out, lse = torch_fdattn.varlen_attention(
            q, k, v, cu_seqlens, causal=True, **{keyword: option}
        )
        return out[:11], lse[:, :11]  # the last token is of no sequence: its lse is -inf

    check_step(call, plain, parts, [BY_HEADS], [Shard(0)])


@pytest.mark.parametrize(
    "name",
    ["slopes of sequences", "sinks", "lengths", "bias of heads", "boolean mask"],
)
@pytest.mark.parametrize("split", [BY_BATCH, BY_HEADS], ids=["batch", "heads"])
def test_decode(mesh, rank_device, name: str, split) -> None:
    plain = [*qkv(rank_device), drawn(name, rank_device)]
    where = [split] * 3 + [placed(name, split)]
    parts = [distributed(x, mesh, y) for x, y in zip(plain, where, strict=True)]

    def call(q, k, v, option):
        return torch_fdattn.decode(q, k, v, **{OPTIONS[name][0]: option})

    check_step(call, plain, parts, [split])


def test_keys_and_a_mask_that_are_split_along_the_keys(mesh, rank_device) -> None:
    """No rule splits keys, so they are gathered: decode needs all of them, and `dist.decode` merges parts."""
    with torch.no_grad():
        q, k, v = qkv(rank_device)
        mask = drawn("boolean mask", rank_device)
        where = [WHOLE, Shard(2), Shard(2), Shard(3)]
        parts = [distributed(x, mesh, y) for x, y in zip((q, k, v, mask), where, strict=True)]
        found = torch_fdattn.decode(*parts[:3], attn_mask=parts[3])
        expected = torch_fdattn.decode(q, k, v, attn_mask=mask)
        torch.testing.assert_close([x.full_tensor() for x in found], list(expected))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("split", [BY_BATCH, BY_HEADS], ids=["batch", "heads"])
def test_scales_of_quantised_caches(mesh, rank_device, split, paged: bool) -> None:
    size = sizes()
    q = torch.randn(size["B"], size["H"], 2, 16).to(rank_device)
    cache = torch.randint(-9, 9, (size["B"], size["K"], KEYS, 16)).to(rank_device, torch.int8)
    scales = torch.rand(size["K"], 1), torch.rand(size["B"], size["K"], KEYS)
    scales = [x.to(rank_device) for x in scales]
    own = [WHOLE, BY_BATCH] if split == BY_BATCH else [Shard(0), BY_HEADS]
    where, inputs, op = split, [q, cache, cache], torch_fdattn.decode
    if paged:
        inputs.append(torch.randperm(size["B"], device=rank_device).int()[:, None])
        op = torch_fdattn.paged_decode
        if split == BY_BATCH:  # pages belong to no sequence
            where, own = WHOLE, [WHOLE, WHOLE]
    placements = [split, where, where, BY_BATCH if split == BY_BATCH else WHOLE]
    # distribute_tensor takes rank 0's numbers, and so does the plain call.
    parts = [distributed(x, mesh, y) for x, y in zip(inputs, placements, strict=False)]
    named = {
        name: distributed(x, mesh, y)
        for name, x, y in zip(("k_scale", "v_scale"), scales, own, strict=True)
    }
    out, lse = op(*parts, **named)
    assert (out.placements, lse.placements) == ((split,), (split,))
    expected = op(*inputs, **dict(zip(named, scales, strict=True)))
    torch.testing.assert_close((out.full_tensor(), lse.full_tensor()), expected)


def test_dropout_is_not_split(mesh, rank_device) -> None:
    """It counts heads and sequences, so that a part of them would drop other weights."""
    plain = qkv(rank_device)
    seed = torch.tensor([3, 4], device=rank_device)
    parts = [distributed(x, mesh, BY_HEADS) for x in plain]
    of_mesh = distribute_tensor(seed, mesh, [WHOLE])

    def call(q, k, v):
        given = of_mesh if isinstance(q, DTensor) else seed
        return torch_fdattn.attention(q, k, v, dropout_p=0.5, dropout_seed=given)

    check_step(call, plain, parts, [WHOLE], kept=False)


@pytest.mark.parametrize("split", [BY_BATCH, BY_HEADS], ids=["batch", "heads"])
def test_raw_tangents(mesh, rank_device, split) -> None:
    q, k, v = (x.detach() for x in qkv(rank_device))
    bias, lse = (
        drawn("bias of heads", rank_device).detach(),
        torch.randn(q.shape[:3]).to(rank_device),
    )
    own = placed("bias of heads", split)
    mask, rest = (None, None, None, -1, 0, 0, 0, 0.25), (0.0, None, None)
    outer = [q, k, v, lse, q, k, v], [bias]

    def place(tensors, where):
        return [distributed(x, mesh, where) for x in tensors]

    state, entries = place(outer[0], split), place(outer[1], own)
    tangent = torch.ops.fdattn.attention_tangent
    found = tangent(*state, None, None, *entries, *mask, *rest, *entries)
    expected = tangent(*outer[0], None, None, bias, *mask, *rest, bias)
    for x, whole in zip(found, expected, strict=True):
        assert x.placements == (split,)
        torch.testing.assert_close(x.full_tensor(), whole)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_options_of_which_some_have_no_gradient(mesh, rank_device, compiled: bool) -> None:
    """What is not wanted comes as a tensor without elements, wherever the option is."""
    torch._dynamo.reset()
    plain = [*qkv(rank_device), drawn("slopes of heads", rank_device)]
    plain.append(drawn("bias", rank_device).detach())
    where = [BY_HEADS] * 3 + [WHOLE, BY_HEADS]
    parts = [distributed(x, mesh, y) for x, y in zip(plain, where, strict=True)]

    def call(q, k, v, slopes, bias):
        return torch_fdattn.attention(q, k, v, alibi_slopes=slopes, attn_mask=bias)

    step = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    check_step(step, plain, parts, [BY_HEADS])


def test_groups_are_not_torn_by_options(mesh, rank_device) -> None:
    """KV heads that do not divide among the ranks stay together, though slopes and bias are split by heads."""
    heads = dist.get_world_size() + 1
    shapes = ((1, h, s, 16) for h, s in ((2 * heads, 5), (heads, KEYS), (heads, KEYS)))
    inputs = [torch.randn(x).to(rank_device) for x in shapes]
    slopes, bias = torch.rand(2 * heads), torch.rand(1, 2 * heads, 5, KEYS)
    inputs += [slopes.to(rank_device), bias.to(rank_device)]
    placements = [WHOLE] * 3 + [Shard(0), BY_HEADS]
    parts = [distributed(x, mesh, y) for x, y in zip(inputs, placements, strict=True)]
    results = [
        torch_fdattn.attention(q, k, v, alibi_slopes=slopes, attn_mask=bias)
        for q, k, v, slopes, bias in (parts, inputs)
    ]
    for x, whole in zip(*results, strict=True):
        torch.testing.assert_close(x.full_tensor(), whole)
