"""The forms that are recognised: their rewritten graphs, and the same numbers and gradients as eager."""

import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from tests.compile_backend.harness import check, ops, qkv

sdpa = F.scaled_dot_product_attention


def rewritten(fn, *args, **options):
    found = check(fn, *args, **{"lower": "eager", **options})
    assert ops(found) == ["attention"], str(found.report)
    assert "scaled_dot_product" not in found.graph
    assert "softmax" not in found.graph
    return found


SDPA = {
    "positional": lambda q, k, v: sdpa(q, k, v, None, 0.0, True),
    "keywords": lambda q, k, v: sdpa(query=q, key=k, value=v, is_causal=True, scale=0.3),
    "its C++ name": lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v),
    "its aten name": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),
    "without dropout": lambda q, k, v: sdpa(q, k, v, dropout_p=0.0, is_causal=False),
    "a scale": lambda q, k, v: sdpa(q, k, v, scale=2.0),
}


def test_top_left_with_more_keys_than_queries():
    """SDPA's causal is from the first key; ours is from the last, unless told where queries start."""
    found = rewritten(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(8, 12))
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_q_: "f32[2, 4, 8, 16]", L_k_: "f32[2, 4, 12, 16]", L_v_: "f32[2, 4, 12, 16]"):
        l_q_ = L_q_
        l_k_ = L_k_
        l_v_ = L_v_
        zeros: "i32[2]" = torch.zeros(2, dtype = torch.int32, device = device(type='cpu'))
        attention_default = torch.ops.fdattn.attention.default(l_q_, l_k_, l_v_, None, zeros, causal = True, scale = None);  l_q_ = l_k_ = l_v_ = zeros = None
        getitem: "f32[2, 4, 8, 16]" = attention_default[0];  attention_default = None
        return (getitem,)""",
    )


@pytest.mark.parametrize(("q_len", "kv_len"), [(12, 8), (1, 8), (8, 1)])
def test_top_left_of_other_lengths(q_len, kv_len):
    rewritten(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(q_len, kv_len))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(kv_heads):
    rewritten(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *qkv(kv_heads=kv_heads))


def repeat_kv(x, n=2):
    """As transformers has it."""
    batch, heads, length, dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, n, length, dim)
    return x.reshape(batch, heads * n, length, dim)


REPEATED = {
    "expand, reshape": repeat_kv,
    "unsqueeze, flatten": lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "ellipsis, contiguous": lambda x: (
        x[:, :, None, ...].expand(2, 2, 2, 8, 16).contiguous().view(2, 4, 8, 16)
    ),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, 2, dim=1),
    "method": lambda x: x.repeat_interleave(2, -3),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_heads(name):
    repeat = REPEATED[name]
    found = rewritten(lambda q, k, v: sdpa(q, repeat(k), repeat(v)), *qkv(kv_heads=2))
    assert "heads of K and V not repeated" in found.report.sites[0].notes
    assert "expand" not in found.graph
    assert "repeat" not in found.graph


def test_one_head_expanded():
    def fn(q, k, v):
        return sdpa(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1))

    assert "expand" not in rewritten(fn, *qkv(kv_heads=1)).graph


def test_repeated_heads_of_a_sequence_first_cache():
    """Heads stand in dimension 2 where they are repeated, and are moved afterwards."""

    def fn(q, k, v):
        k, v = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
        return sdpa(q, k, v)

    q, k, v = qkv(kv_heads=2)
    args = [q, *(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (k, v))]
    assert "repeat" not in rewritten(fn, *args).graph


CONSTANT_MASKS = {
    "ones, tril": lambda s: torch.ones(s, s, dtype=torch.bool).tril(),
    "arange": lambda s: torch.arange(s)[None, None, :] <= torch.arange(s)[:, None],
    "added": lambda s: torch.full((1, 1, s, s), -math.inf).triu(1),
    "finfo.min": lambda s: torch.triu(torch.full((s, s), torch.finfo(torch.float32).min), 1),
    "where": lambda s: torch.where(torch.ones(s, s).tril() > 0, 0.0, -math.inf),
}


@pytest.mark.parametrize("name", CONSTANT_MASKS)
def test_sdpa_with_a_causal_mask_from_constants(name):
    make = CONSTANT_MASKS[name]
    found = rewritten(lambda q, k, v: sdpa(q, k, v, make(q.shape[2])), *qkv())
    assert "causal = True" in found.graph
    assert "tril" not in found.graph


def test_masks_from_constants_of_other_kinds():
    def last_keys(q, k, v):
        mask = torch.ones(8, 12, dtype=torch.bool).tril(4)
        return sdpa(q, k, v, mask)

    def empty(q, k, v):
        return sdpa(q, k, v, torch.ones(2, 1, 1, 12, dtype=torch.bool))

    assert "zeros" not in rewritten(last_keys, *qkv(8, 12)).graph  # our own alignment
    assert "causal = False" in rewritten(empty, *qkv(8, 12)).graph


def attend(q, k, v, *, scaled=lambda s: s / 4.0, mask=None, soften=None, finish=lambda w: w):
    scores = scaled(torch.matmul(q, k.transpose(2, 3)))
    if mask is not None:
        scores = scores + mask
    weights = soften(scores) if soften is not None else F.softmax(scores, dim=-1)
    return torch.matmul(finish(weights), v)


UNFUSED = {
    "plain": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "special": lambda q, k, v: torch.special.softmax(q @ k.mT, -1) @ v,
    "special, fp32": lambda q, k, v: torch.special.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v,
    "divided by a square root": lambda q, k, v: attend(
        q, k, v, scaled=lambda s: s / math.sqrt(q.size(-1))
    ),
    "divided by a tensor": lambda q, k, v: attend(
        q, k, v, scaled=lambda s: s / torch.sqrt(torch.tensor(16.0))
    ),
    "q scaled": lambda q, k, v: attend(q * 16**-0.5, k, v, scaled=lambda s: s),
    "q and k scaled": lambda q, k, v: attend(0.5 * q, k / 2, v, scaled=lambda s: s),
    "kᵀ scaled": lambda q, k, v: ((q @ (k.transpose(-1, -2) * 0.25)).softmax(-1)) @ v,
    "softmax in fp32": lambda q, k, v: attend(
        q, k, v, soften=lambda s: F.softmax(s, dim=3, dtype=torch.float32).to(q.dtype)
    ),
    "float, type_as": lambda q, k, v: attend(
        q, k, v, soften=lambda s: F.softmax(s.float(), dim=-1).type_as(q)
    ),
    "dropout that is off": lambda q, k, v: attend(
        q, k, v, finish=lambda w: F.dropout(w, 0.3, training=False)
    ),
    "dropout of nothing": lambda q, k, v: attend(
        q, k, v, finish=lambda w: F.dropout(w, p=0.0, training=True)
    ),
    "the seed's form": lambda q, k, v: attend(
        q, k, v, mask=torch.full((8, 8), -math.inf).triu(1),
        soften=lambda s: F.softmax(s.float(), dim=-1).type_as(q),
    ),
    "masked_fill": lambda q, k, v: (
        (q @ k.transpose(-2, -1) / 4).masked_fill(torch.tril(torch.ones(8, 8)) == 0, -math.inf)
        .softmax(dim=-1) @ v
    ),
    "where": lambda q, k, v: (
        torch.where(torch.ones(8, 8).tril() > 0, q @ k.mT, torch.finfo(q.dtype).min).softmax(-1) @ v
    ),
    "mask before the scale": lambda q, k, v: (
        ((q @ k.mT + torch.full((8, 8), -math.inf).triu(1)) * 0.25).softmax(-1) @ v
    ),
    "mask first in the sum": lambda q, k, v: (
        (torch.full((8, 8), -math.inf).triu(1) + q @ k.mT).softmax(-1) @ v
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v
    ),
    "einsum, operands swapped": lambda q, k, v: torch.einsum(
        "bhkd, bhqk -> bhqd", v, torch.einsum("bhkd,bhqd->bhqk", k, q).softmax(-1)
    ),
    "einsum, other letters": lambda q, k, v: torch.einsum(
        "nyts,nysf->nytf", torch.einsum("abic,abjc->abij", q * 0.5, k).softmax(-1), v
    ),
    "nn.Softmax": lambda q, k, v: torch.nn.Softmax(dim=-1)(q @ k.mT) @ v,
    "repeated heads": lambda q, k, v: attend(q, repeat_kv(k[:, :2]), repeat_kv(v[:, :2])),
}  # fmt: skip


def test_three_dimensions():
    """Batch and heads in one dimension, as bmm has them."""

    def fn(q, k, v):
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=0.25)
        return torch.bmm(torch.softmax(scores, -1), v)

    args = [x.detach().flatten(0, 1).requires_grad_() for x in qkv()]
    found = rewritten(fn, *args)
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_q_: "f32[8, 8, 16]", L_k_: "f32[8, 8, 16]", L_v_: "f32[8, 8, 16]"):
        l_q_ = L_q_
        l_k_ = L_k_
        l_v_ = L_v_
        new_empty: "f32[1]" = l_q_.new_empty(1);  new_empty = None
        unsqueeze: "f32[8, 1, 8, 16]" = l_q_.unsqueeze(1);  l_q_ = None
        unsqueeze_1: "f32[8, 1, 8, 16]" = l_k_.unsqueeze(1);  l_k_ = None
        unsqueeze_2: "f32[8, 1, 8, 16]" = l_v_.unsqueeze(1);  l_v_ = None
        attention_default = torch.ops.fdattn.attention.default(unsqueeze, unsqueeze_1, unsqueeze_2, None, None, causal = False, scale = 0.25);  unsqueeze = unsqueeze_1 = unsqueeze_2 = None
        getitem: "f32[8, 1, 8, 16]" = attention_default[0];  attention_default = None
        squeeze: "f32[8, 8, 16]" = getitem.squeeze(1);  getitem = None
        return (squeeze,)""",
    )
    rewritten(lambda q, k, v: sdpa(q, k, v), *args)


def test_einsum_over_sequence_first_tensors():
    def fn(q, k, v):
        weights = torch.einsum("bqhd,bkhd->bhqk", q * 0.25, k).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    args = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv(8, 12)]
    found = rewritten(fn, *args)
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_q_: "f32[2, 8, 4, 16]", L_k_: "f32[2, 12, 4, 16]", L_v_: "f32[2, 12, 4, 16]"):
        l_q_ = L_q_
        l_k_ = L_k_
        l_v_ = L_v_
        transpose: "f32[2, 4, 8, 16]" = l_q_.transpose(1, 2);  l_q_ = None
        transpose_1: "f32[2, 4, 12, 16]" = l_k_.transpose(1, 2);  l_k_ = None
        transpose_2: "f32[2, 4, 12, 16]" = l_v_.transpose(1, 2);  l_v_ = None
        attention_default = torch.ops.fdattn.attention.default(transpose, transpose_1, transpose_2, None, None, causal = False, scale = 0.25);  transpose = transpose_1 = transpose_2 = None
        getitem: "f32[2, 4, 8, 16]" = attention_default[0];  attention_default = None
        transpose_3: "f32[2, 8, 4, 16]" = getitem.transpose(1, 2);  getitem = None
        transpose_4: "f32[2, 4, 8, 16]" = transpose_3.transpose(1, 2);  transpose_3 = None
        contiguous: "f32[2, 4, 8, 16]" = transpose_4.contiguous();  transpose_4 = None
        transpose_5: "f32[2, 8, 4, 16]" = contiguous.transpose(1, 2);  contiguous = None
        return (transpose_5,)""",
    )


def test_k_that_is_made_transposed():
    def fn(q, k, v):  # k (B, S, H, D), as GPT-1 and BERT had it
        return (q @ k.permute(0, 2, 3, 1) / 4).softmax(-1) @ v

    q, k, v = qkv()
    rewritten(fn, q, k.detach().transpose(1, 2).contiguous().requires_grad_(), v)


@pytest.mark.parametrize("q_len", [1, 3, 16])
def test_decode(q_len):
    q, k, v = qkv(q_len, 40, kv_heads=2, grad=False)
    found = check(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v, lower="eager")
    assert ops(found) == ["decode"]
    assert "causal = False" in found.graph
    found = check(
        lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), q, k, v, lower="eager"
    )
    assert ops(found) == ["decode"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_that_is_expanded_as_the_scores_are(dynamic):
    """DistilBERT's; elsewhere it is used too, which must not keep the scores."""

    def fn(q, k, v, padding):
        scores = q @ k.mT / 4
        hidden = (padding == 0)[:, None, None].expand_as(scores)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v, hidden + 1

    args = [*qkv(8, 12), torch.ones(2, 12).tril(8)]
    if dynamic:
        torch._dynamo.maybe_mark_dynamic(args[0], 2)
    graph = rewritten(fn, *args).graph
    assert "matmul" not in graph
    assert " @ " not in graph
    assert ("size(2)" in graph) == dynamic


def test_safe_softmax():
    """Zeros where all is hidden, not NaN."""

    def fn(q, k, v, mask):
        return torch.ops.aten._safe_softmax(q @ k.mT * 0.25 + mask, -1) @ v

    mask = torch.zeros(8, 8)
    mask[3] = -math.inf
    assert "nan" not in rewritten(fn, *qkv(), mask).graph


def test_decode_graph_by_hand():
    def fn(q, k, v):
        return (q @ repeat_kv(k).mT * 0.25).softmax(-1) @ repeat_kv(v)

    found = check(fn, *qkv(1, 40, kv_heads=2, grad=False), lower="eager")
    assert ops(found) == ["decode"]
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_k_: "f32[2, 2, 40, 16]", L_q_: "f32[2, 4, 1, 16]", L_v_: "f32[2, 2, 40, 16]"):
        l_k_ = L_k_
        l_q_ = L_q_
        l_v_ = L_v_
        decode_default = torch.ops.fdattn.decode.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25);  l_q_ = l_k_ = l_v_ = None
        getitem_2: "f32[2, 4, 1, 16]" = decode_default[0];  decode_default = None
        return (getitem_2,)""",
    )


def test_decode_takes_other_value_head_dims():
    q, k, _ = qkv(1, 40, grad=False)
    v = torch.randn(2, 4, 40, 24)
    assert ops(check(lambda q, k, v: sdpa(q, k, v), q, k, v, lower="eager")) == ["decode"]


@pytest.mark.parametrize(("q_len", "kv_len"), [(17, 40), (8, 8), (8, 4)])
def test_attention_where_decode_is_not_meant(q_len, kv_len):
    args = qkv(q_len, kv_len, grad=False)
    rewritten(lambda q, k, v: sdpa(q, k, v), *args)
