"""Masks: what is recovered of them, what stays a tensor, and always the same numbers and gradients as eager."""

import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from tests.compile_backend.harness import Recorder, check, mask_of, ops, qkv

sdpa = F.scaled_dot_product_attention
LEAST = torch.finfo(torch.float32).min
PADDING = torch.tensor([[1] * 8, [0] * 3 + [1] * 5])
LENGTHS = torch.tensor([3, 8])
SLOPES = torch.tensor([0.5, 0.25, 0.1, -0.03])


def index(n):
    return torch.arange(n)


def causal(size, fill=-math.inf):
    return torch.full((size, size), fill).triu(1)


def triangle(size=8, diagonal=0):
    return torch.ones(size, size, dtype=torch.bool).tril(diagonal)


def added(q, k, v, mask):
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def filled(q, k, v, mask, fill=-math.inf):
    return (q @ k.mT * 0.25).masked_fill(mask, fill).softmax(-1) @ v


def unpacked(length):
    """As transformers looks for sequences that are packed into one, where position ids follow one another."""
    positions = (index(length) + 0).unsqueeze(0)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence = jumps.cumsum(-1)
    return sequence[0][:, None] == sequence[0][None, :]


def transformers_mask(q, k, padding=None, window=None, offset=0):
    """As transformers' masking_utils make it."""
    queries = (index(q.shape[2]) + offset)[None, None, :, None]
    keys = (index(k.shape[2]) + 0)[None, None, None, :]
    mask = queries.new_ones((), dtype=torch.bool)
    if window:
        mask = mask & (keys > queries - window).to(q.device)
    mask = mask & (keys <= queries).to(q.device)
    if padding is not None:
        batch = index(q.shape[0])[:, None, None, None]
        mask = mask & padding.to(torch.bool)[batch, keys]
    return mask.expand(q.shape[0], -1, q.shape[2], k.shape[2])


def transformers_eager(q, k, v, mask):
    mask = torch.where(mask, torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)
    scores = (q @ k.mT) * 0.25 + mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def expect(mask, fn, *args, op="attention", operand=False, **options):
    found = check(fn, *args, **{"lower": "eager", **options})
    assert ops(found) == [op], str(found.report)
    assert mask_of(found) == mask
    assert ("attn_mask" in found.graph) == operand
    return found


RECOVERED = {
    "causal": ("causal", lambda q, k, v: sdpa(q, k, v, transformers_mask(q, k))),
    "window": (
        "causal and window (2, 0)",
        lambda q, k, v: sdpa(q, k, v, transformers_mask(q, k, window=3)),
    ),
    "window, eager": (
        "causal and window (2, 0)",
        lambda q, k, v: transformers_eager(q, k, v, transformers_mask(q, k, window=3)),
    ),
    "band by triu and tril": (
        "window (1, 2)",
        lambda q, k, v: sdpa(q, k, v, triangle(diagonal=2).triu(-1)),
    ),
    "symmetric window": (
        "window (2, 2)",
        lambda q, k, v: sdpa(q, k, v, (index(8)[:, None] - index(8)).abs() <= 2),
    ),
    "one side": ("window (1, all)", lambda q, k, v: sdpa(q, k, v, index(8) >= index(8)[:, None] - 1)),
    "looks ahead": ("window (all, 1)", lambda q, k, v: sdpa(q, k, v, triangle(diagonal=1))),
    "strictly causal, first row free": (
        "explicit mask (mask-form)",
        lambda q, k, v: sdpa(q, k, v, triangle(diagonal=-1) | (torch.eye(8) > 0)[0]),
    ),
    "strictly causal": (
        "causal from an offset",
        lambda q, k, v: sdpa(q, k, v, triangle(diagonal=-1)),
    ),
    "floor division by one": (
        "causal",
        lambda q, k, v: sdpa(q, k, v, index(8) // 1 <= index(8)[:, None]),
    ),
    "numbers as conditions": (
        "causal",
        lambda q, k, v: filled(q, k, v, torch.ones(8, 8).tril() == 0),
    ),
    "equal, by its method": (
        "causal",
        lambda q, k, v: filled(q, k, v, torch.ones(8, 8).tril().__eq__(0)),
    ),
    "equal to a number that float32 rounds": (
        "causal",
        lambda q, k, v: filled(q, k, v, causal(8, -1e30) == -1e30),
    ),
    "1 - mask times the least number": (
        "causal",
        lambda q, k, v: added(q, k, v, (1.0 - torch.ones(8, 8).tril()) * LEAST),
    ),
    "positions without a jump": (
        "causal",
        lambda q, k, v: sdpa(q, k, v, unpacked(8) & triangle()),
    ),
    "repeated": (
        "causal",
        lambda q, k, v: sdpa(
            q, k, v, index(8).repeat(2, 1)[:, None, None] <= index(8).view(8, 1).repeat(1, 8)
        ),
    ),
    "indices of at least 0": (
        "full",
        lambda q, k, v: sdpa(q, k, v, (index(8)[:, None] >= 0) & ~(index(8) + 1 < 0)),
    ),
    "two added masks": (
        "causal and window (2, 0)",
        lambda q, k, v: added(
            q, k, v + 0, causal(8) + torch.where(triangle(diagonal=-3), -math.inf, 0.0)
        ),
    ),
}  # fmt: skip


NEAR_MISSES = {
    "repeated keys": lambda q, k, v: sdpa(q, k, v, index(4).repeat(2) <= index(8)[:, None]),
    "data": lambda q, k, v: sdpa(q, k, v, q[0, 0, :, :8] > 0),
    "numbers from data": lambda q, k, v: sdpa(q, k, v, q[0, 0, :, :8]),
    "a small bias": lambda q, k, v: sdpa(q, k, v, causal(8, -1.0)),
    "a bias of -1e4": lambda q, k, v: sdpa(q, k, v, causal(8, -1e4)),
    "a bias that scaling weakens": lambda q, k, v: (
        ((q @ k.mT + causal(8, LEAST)) * 1e-30).softmax(-1) @ v
    ),
    "one head": lambda q, k, v: sdpa(
        q, k, v, (index(4) > 0)[None, :, None, None] | triangle()
    ),
    "random": lambda q, k, v: sdpa(q, k, v, torch.rand(8, 8) > 0),
    "prefix": lambda q, k, v: sdpa(q, k, v, triangle() | (index(8) < 3)),
    "dilated": lambda q, k, v: sdpa(q, k, v, ((index(8)[:, None] - index(8)) % 2 == 0) & triangle()),
    "twice the query": lambda q, k, v: sdpa(q, k, v, index(8) <= 2 * index(8)[:, None]),
    "twice the key": lambda q, k, v: sdpa(q, k, v, 2 * index(8) <= index(8)[:, None]),
    "all but the diagonal": lambda q, k, v: sdpa(q, k, v, index(8) != index(8)[:, None]),
    "a sum of indices": lambda q, k, v: sdpa(q, k, v, index(8) + index(8)[:, None] < 9),
    "positions cut to whole numbers": lambda q, k, v: sdpa(
        q, k, v, torch.arange(2.5, 10.5, dtype=torch.int64)[None] < 6
    ),
    "bits of positions": lambda q, k, v: sdpa(
        q, k, v, index(8).float().view(torch.int32) <= index(8)[:, None]
    ),
    "either of two": lambda q, k, v: sdpa(q, k, v, triangle() | triangle(diagonal=3).triu(2)),
    "exclusive or": lambda q, k, v: sdpa(q, k, v, ~triangle() ^ triangle(diagonal=3)),
    "transposed": lambda q, k, v: sdpa(q, k, v, triangle().mT & (index(8) > 0)),
    "positions from data": lambda q, k, v: sdpa(
        q, k, v, index(8) <= (index(8) + (q[0, 0, :, 0] > 9).long())[:, None]
    ),
    "an offset for each head": lambda q, k, v: sdpa(
        q, k, v, index(8) <= (index(8)[:, None] + index(4)[:, None, None])
    ),
    "window wider for later queries": lambda q, k, v: sdpa(
        q, k, v, triangle() & (index(8)[:, None] - index(8) <= index(8)[:, None] // 2)
    ),
    "a cumulated mask": lambda q, k, v: sdpa(q, k, v, (torch.ones(8, 8).cumsum(-1) % 3 > 0)),
    "distance squared": lambda q, k, v: added(
        q, k, v, -0.1 * (index(8)[:, None] - index(8)).float().pow(2)
    ),
    "slopes for each query": lambda q, k, v: added(
        q, k, v, -0.1 * index(8)[:, None] * (index(8)[:, None] - index(8)).abs()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay_explicit(name):
    found = check(NEAR_MISSES[name], *qkv(), lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "explicit" in mask_of(found)
    assert "attn_mask" in found.graph


def test_masks_with_fewer_keys_than_queries():
    """Rows that see no key: zeros of SDPA, NaN where -inf, and the mean of all values where a number hides."""
    args = qkv(12, 8, grad=False)
    hidden = torch.ones(12, 8).triu(-3) > 0
    zeros = expect(
        "causal", lambda q, k, v: sdpa(q, k, v, ~(torch.ones(12, 8).triu(-3) > 0)), *args
    )
    assert "nan" not in zeros.graph
    nan = expect("causal", lambda q, k, v: filled(q, k, v, torch.ones(12, 8).triu(-3) > 0), *args)
    assert "masked_fill(unsqueeze, nan)" in nan.graph
    assert filled(*args, hidden).isnan().any()
    args = qkv(12, 8, kv_heads=2)
    mean = expect(
        "causal",
        lambda q, k, v: filled(
            q,
            k.repeat_interleave(2, 1),
            v.repeat_interleave(2, 1),
            torch.ones(12, 8).triu(-3) > 0,
            LEAST,
        ),
        *args,
    )
    assert_expected_inline(
        mean.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_k_: "f32[2, 2, 8, 16]", L_v_: "f32[2, 2, 8, 16]", L_q_: "f32[2, 4, 12, 16]"):
        l_k_ = L_k_
        l_v_ = L_v_
        l_q_ = L_q_
        attention_default = torch.ops.fdattn.attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25);  l_q_ = l_k_ = None
        getitem: "f32[2, 4, 12, 16]" = attention_default[0]
        getitem_1: "f32[2, 4, 12]" = attention_default[1];  attention_default = None
        eq: "b8[2, 4, 12]" = getitem_1 == -inf;  getitem_1 = None
        unsqueeze: "b8[2, 4, 12, 1]" = eq.unsqueeze(-1);  eq = None
        mean: "f32[2, 2, 1, 16]" = l_v_.mean(2, keepdim = True);  l_v_ = None
        repeat_interleave_2: "f32[2, 4, 1, 16]" = mean.repeat_interleave(2, 1);  mean = None
        where: "f32[2, 4, 12, 16]" = torch.where(unsqueeze, repeat_interleave_2, getitem);  unsqueeze = repeat_interleave_2 = getitem = None
        return (where,)""",
    )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_padding_beside_structure(window, eager):
    """Padding is data: it stays a mask of (B, 1, 1, N), beside flags."""

    def fn(q, k, v, padding):
        mask = transformers_mask(q, k, padding, window)
        return transformers_eager(q, k, v, mask) if eager else sdpa(q, k, v, mask)

    structure = "causal and window (2, 0)" if window else "causal"
    found = expect(
        f"{structure} and explicit padding (mask-data)", fn, *qkv(grad=False), PADDING, operand=True
    )
    if not window and not eager:
        assert_expected_inline(
            found.graph,
            """\
class GraphModule(torch.nn.Module):
    def forward(self, L_q_: "f32[2, 4, 8, 16]", L_k_: "f32[2, 4, 8, 16]", L_padding_: "i64[2, 8]", L_v_: "f32[2, 4, 8, 16]"):
        l_q_ = L_q_
        l_k_ = L_k_
        l_padding_ = L_padding_
        l_v_ = L_v_
        getitem_4: "i64[2, 1, 1, 8]" = l_padding_[(slice(None, None, None), None, None, slice(None, None, None))];  l_padding_ = None
        ne: "b8[2, 1, 1, 8]" = getitem_4 != 0;  getitem_4 = None
        attention_default = torch.ops.fdattn.attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = None, attn_mask = ne);  l_q_ = l_k_ = l_v_ = ne = None
        getitem_5: "f32[2, 4, 8, 16]" = attention_default[0];  attention_default = None
        return (getitem_5,)""",
        )


def test_least_numbers_that_are_summed():
    """Twice the least number is -inf: a query that sees no key weighs those that were hidden once."""

    def fn(q, k, v, lengths):
        padding = torch.where(index(8) < lengths[:, None, None, None], 0.0, LEAST)
        return added(q, k, v, causal(8, LEAST) + padding)

    args = *qkv(grad=False), torch.tensor([0, 5])
    expect("explicit mask (mask-rows)", fn, *args, operand=True)


def test_all_keys_hidden_twice():
    def fn(q, k, v):
        rows = torch.where(index(8)[:, None] > 2, 0.0, LEAST)
        return (q @ k.mT + rows + rows).softmax(-1) @ v

    found = check(fn, *qkv(grad=False), lower="eager")
    assert "nan" in found.graph


@pytest.mark.parametrize("how", [lambda s: s * 2, lambda s: s.bfloat16().float()])
def test_hidden_scores_that_become_infinite(how):
    """Rows that see no key are NaN then."""

    def fn(q, k, v):
        scores = (q @ k.mT).masked_fill(index(8)[:, None] <= index(8), LEAST)
        return how(scores).softmax(-1) @ v

    found = check(fn, *qkv(grad=False), lower="eager", rtol=0.1, atol=0.1)
    assert ops(found) == ["attention"]
    assert "nan" in found.graph


def test_padding_in_training():
    """Where finite numbers hide all keys of a query, its output does not depend on q and k."""

    def fn(q, k, v, padding):
        out = transformers_eager(q, k, v, transformers_mask(q, k, padding))
        return out * padding[:, None, :, None]

    expect("causal and explicit padding (mask-data)", fn, *qkv(), PADDING, operand=True)


def vmapped(rule, batch, q_len, kv_len):
    """As transformers makes masks of rules for single indices, where they are not its own."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
        rule = torch.vmap(rule, in_dims=dims)
    rule = torch.vmap(rule, in_dims=(0, None, None, None))
    return rule(index(batch), index(1), index(q_len), index(kv_len))


def test_masks_by_vmap():
    def fn(q, k, v, padding):
        mask = vmapped(lambda b, h, i, j: (j <= i) & (j > i - 3) & padding[b, j], 2, 8, 8)
        return sdpa(q, k, v, mask)

    expect(
        "causal and window (2, 0) and explicit padding (mask-data)", fn, *qkv(), PADDING.bool(),
        operand=True,
    )  # fmt: skip


def test_masks_by_vmap_that_are_not_understood():
    def fn(q, k, v, image):
        mask = vmapped(lambda b, h, i, j: (j <= i) | (image[b, i] == image[b, j]), 2, 8, 8)
        return sdpa(q, k, v, mask)

    expect("explicit mask (mask-data)", fn, *qkv(), PADDING, operand=True)


def test_attention_inside_of_vmap_is_left():
    def fn(q, k, v):
        return torch.vmap(lambda x: (x, sdpa(q, k, v)), out_dims=(0, None))(q)[1]

    found = check(fn, *qkv(grad=False), lower="eager", exact=True)
    assert found.report.reasons == ["functorch"]


def chunked(q, k, size, offset=0, first=0, size_of_keys=None):
    """As transformers makes Llama 4's: chunks begin at each sequence's first token."""
    queries = (index(q.shape[2]) + offset)[None, None, :, None]
    keys = index(k.shape[2])[None, None, None]
    same = (keys - first) // (size_of_keys or size) == (queries - first) // size
    return same & (keys <= queries)


CHUNKS = {
    "even": ("causal and chunks of 4", 8, lambda q, k: chunked(q, k, 4)),
    "a shorter last one": ("causal and chunks of 3", 8, lambda q, k: chunked(q, k, 3)),
    "as long as the sequence": ("causal", 8, lambda q, k: chunked(q, k, 8)),
    "longer": ("causal", 8, lambda q, k: chunked(q, k, 9)),
    "all within one, from an offset": ("window (all, 5)", 8, lambda q, k: chunked(q, k, 16, 5)),
    "both sides": ("chunks of 4", 8, lambda q, k: index(8) // 4 == (index(8) // 4)[:, None]),
    "from where the chunk begins": (
        "causal and chunks of 4", 8,
        lambda q, k: (index(8) >= (index(8) // 4 * 4)[:, None]) & triangle(),
    ),
    "rounded down": (
        "causal and chunks of 4", 8,
        lambda q, k: triangle() & torch.eq(
            *(torch.div(x, 4, rounding_mode="floor") for x in (index(8), index(8)[:, None]))),
    ),
    "a window in chunks": (
        "causal and window (2, 0) and chunks of 4", 8,
        lambda q, k: chunked(q, k, 4) & (index(8) > index(8)[:, None] - 3),
    ),
    "ahead in its chunk": (
        "window (1, all) and chunks of 4", 8,
        lambda q, k: (index(8) // 4 == (index(8) // 4)[:, None]) & (index(8) >= index(8)[:, None] - 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name, eager):
    """Packed sequences, unless all keys are in one chunk."""
    mask, length, make = CHUNKS[name]
    op = "varlen_attention" if "chunks" in mask else "attention"

    def fn(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        seen = make(q, k)
        return filled(q, k, v, ~seen, LEAST) if eager else sdpa(q, k, v, seen)

    expect(mask, fn, *qkv(length, kv_heads=2), op=op)


def test_chunks_graph():
    args = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(5, grad=False)]
    found = expect(
        "causal and chunks of 4",
        lambda q, k, v: sdpa(q, k, v, chunked(q, k, 4)),
        *args,
        op="varlen_attention",
    )
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_q_: "f32[2, 4, 5, 16]", L_k_: "f32[2, 4, 5, 16]", L_v_: "f32[2, 4, 5, 16]"):
        l_q_ = L_q_
        l_k_ = L_k_
        l_v_ = L_v_
        arange_2: "i32[5]" = torch.arange(5, dtype = torch.int32, device = device(type='cpu'))
        floordiv_2: "i32[5]" = arange_2 // 2
        mul: "i32[5]" = floordiv_2 * 5;  floordiv_2 = None
        mod: "i32[5]" = arange_2 % 2;  arange_2 = None
        mul_1: "i32[5]" = mod * 4;  mod = None
        add_1: "i32[5]" = mul + mul_1;  mul = mul_1 = None
        transpose: "f32[2, 5, 4, 16]" = l_q_.transpose(1, 2);  l_q_ = None
        flatten: "f32[10, 4, 16]" = transpose.flatten(0, 1);  transpose = None
        transpose_1: "f32[2, 5, 4, 16]" = l_k_.transpose(1, 2);  l_k_ = None
        flatten_1: "f32[10, 4, 16]" = transpose_1.flatten(0, 1);  transpose_1 = None
        transpose_2: "f32[2, 5, 4, 16]" = l_v_.transpose(1, 2);  l_v_ = None
        flatten_2: "f32[10, 4, 16]" = transpose_2.flatten(0, 1);  transpose_2 = None
        varlen_attention_default = torch.ops.fdattn.varlen_attention.default(flatten, flatten_1, flatten_2, add_1, causal = True, scale = None);  flatten = flatten_1 = flatten_2 = add_1 = None
        getitem_2: "f32[10, 4, 16]" = varlen_attention_default[0];  varlen_attention_default = None
        unflatten: "f32[2, 5, 4, 16]" = getitem_2.unflatten(0, (2, 5));  getitem_2 = None
        transpose_3: "f32[2, 4, 5, 16]" = unflatten.transpose(1, 2);  unflatten = None
        return (transpose_3,)""",
    )


NO_CHUNKS = {
    "other chunks of keys": lambda q, k: chunked(q, k, 4, size_of_keys=5),
    "other chunks of queries": lambda q, k: chunked(q, k, 5, size_of_keys=4),
    "one on": lambda q, k: (index(8) // 4 == (index(8)[:, None] + 1) // 4) & triangle(),
    "rounded to zero": lambda q, k: triangle() & torch.eq(
        *(torch.div(x - 2, 4, rounding_mode="trunc") for x in (index(8), index(8)[:, None]))
    ),
    "an earlier chunk too": lambda q, k: (
        (index(8)[:, None] // 4 - index(8) // 4 <= 1) & (index(8) > 0) & triangle()
    ),
    "not the first": lambda q, k: chunked(q, k, 4) & (index(8) > 0),
    "only of even ones": lambda q, k: chunked(q, k, 4) | (index(8) % 2 == 0),
    "another chunk": lambda q, k: (index(8) // 4 != (index(8) // 4)[:, None]) | triangle(),
    "strictly behind": lambda q, k: (index(8) // 4 == (index(8) // 4)[:, None]) & triangle(diagonal=-1),
    "strictly ahead": lambda q, k: (index(8) // 4 == (index(8) // 4)[:, None]) & ~triangle(),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CHUNKS)
def test_masks_that_are_almost_chunked(name):
    found = check(lambda q, k, v: sdpa(q, k, v, NO_CHUNKS[name](q, k)), *qkv(), lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "explicit" in mask_of(found)
    assert "attn_mask" in found.graph


def test_chunks_of_padded_sequences_stay_a_mask_that_says_so():
    def fn(q, k, v, first):
        seen = chunked(q, k, 4, first=first.view(2, 1, 1, 1))
        return sdpa(q, k, v, seen & (index(8) >= first.view(2, 1, 1, 1)))

    mask = "causal and explicit mask (mask-chunked)"
    expect(mask, fn, *qkv(grad=False), torch.tensor([0, 3]), operand=True)

    def biased(q, k, v, slopes):
        bias = slopes.view(-1, 1, 1) * (index(8) - index(8)[:, None])
        return added(q, k, v, torch.where(chunked(q, k, 4), bias, -math.inf))

    found = check(biased, *qkv(grad=False), SLOPES, lower="eager")
    assert ops(found) == ["attention"]
    assert "explicit" in mask_of(found)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("position", [0, 2, 3, 4, 11, 12])
def test_chunks_in_a_static_cache(position, eager):
    """The chunk of one query begins where a window can say it, of several nothing can."""

    def fn(q, k, v, position, first):
        seen = chunked(q, k, 4, position, first.view(2, 1, 1, 1))
        seen = seen.expand(2, 4, q.shape[2], 12)
        return filled(q, k, v, ~seen, LEAST) if eager else sdpa(q, k, v, seen)

    # The second sequence is padded by two: before its first token positions are negative.
    where = torch.tensor(position), torch.tensor([0, 2])
    one = qkv(1, 12, grad=False)
    expect("window (0, all) and lengths", fn, *one, *where, op="decode")
    mask = "causal from an offset and explicit mask (mask-chunked)"
    expect(mask, fn, *qkv(3, 12, grad=False), *where, op="decode", operand=True)


@pytest.mark.parametrize("length", [8, 9])
def test_chunks_of_symbolic_lengths(length):
    (x, *_) = qkv(length)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 2)
    found = expect(
        "causal and chunks of 4",
        lambda x: sdpa(x, 2 * x, x.sin(), chunked(x, x, 4)),
        x,
        op="varlen_attention",
        lower="aot_eager",
    )
    assert "Sym" in found.graph


LENGTH_MASKS = {
    "arange < lengths": lambda lengths: (index(8) < lengths[:, None])[:, None, None, :],
    "lengths > arange": lambda lengths: lengths.view(2, 1, 1, 1) > index(8),
    "at most the last": lambda lengths: index(8) <= (lengths - 1)[:, None, None, None],
    "not beyond": lambda lengths: ~(index(8)[None] >= lengths[:, None])[:, None, None],
}


@pytest.mark.parametrize("name", LENGTH_MASKS)
def test_lengths(name):
    make = LENGTH_MASKS[name]
    expect("lengths", lambda q, k, v, n: sdpa(q, k, v, make(n)), *qkv(), LENGTHS)
    expect("lengths", lambda q, k, v, n: filled(q, k, v, ~make(n), LEAST), *qkv(), LENGTHS)
    expect(
        "causal from an offset and lengths",
        lambda q, k, v, n: sdpa(q, k, v, make(n) & triangle()), *qkv(), LENGTHS,
    )  # fmt: skip


def test_lengths_of_none():
    """NaN of a sequence without keys, as before."""
    lengths = torch.tensor([0, 4])
    make = LENGTH_MASKS["arange < lengths"]
    args = qkv(grad=False)
    found = expect("lengths", lambda q, k, v, n: filled(q, k, v, ~make(n)), *args, lengths)
    assert "nan" in found.graph


def test_lengths_graph():
    make = LENGTH_MASKS["arange < lengths"]
    found = expect("lengths", lambda q, k, v, n: sdpa(q, k, v, make(n)), *qkv(), LENGTHS)
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_n_: "i64[2]", L_q_: "f32[2, 4, 8, 16]", L_k_: "f32[2, 4, 8, 16]", L_v_: "f32[2, 4, 8, 16]"):
        l_n_ = L_n_
        l_q_ = L_q_
        l_k_ = L_k_
        l_v_ = L_v_
        clamp: "i64[2]" = l_n_.clamp(-536870912, 536870912);  l_n_ = None
        to: "i32[2]" = clamp.to(torch.int32);  clamp = None
        attention_default = torch.ops.fdattn.attention.default(l_q_, l_k_, l_v_, to, None, causal = False, scale = None);  l_q_ = l_k_ = l_v_ = to = None
        getitem_2: "f32[2, 4, 8, 16]" = attention_default[0];  attention_default = None
        return (getitem_2,)""",
    )


ALIBI = {
    "slopes that are counted": lambda q, k, v, s: added(
        q, k, v, causal(8) + index(4).float()[:, None, None] * index(8)
    ),
    "distance": lambda q, k, v, s: added(
        q, k, v, causal(q.shape[2]) - s[:, None, None] * (index(8)[:, None] - index(8)).abs()
    ),
    "keys alone": lambda q, k, v, s: added(
        q, k, v, causal(8) + s.view(1, 4, 1, 1) * (index(8) - 7).view(1, 1, 1, 8)
    ),
    "two additions": lambda q, k, v, s: (
        (q @ k.mT + s[:, None, None] * (index(8) - index(8)[:, None]) + causal(8)).softmax(-1) @ v
    ),
    "filled afterwards": lambda q, k, v, s: (
        (q @ k.mT + s[:, None, None] * index(8)).masked_fill(~triangle(), -math.inf).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("name", ALIBI)
def test_slopes_with_gradients(name):
    """Others are in test_snapshots.py."""
    expect("causal and ALiBi", ALIBI[name], *qkv(), SLOPES.clone().requires_grad_())


def test_alibi_of_both_sides():
    def fn(q, k, v, s):
        return (q @ k.mT - s[:, None, None] * (index(8)[:, None] - index(8)).abs()).softmax(-1) @ v

    expect("ALiBi", fn, *qkv(), SLOPES)


def test_slopes_that_are_cut_off_from_gradients():
    def fn(q, k, v, s):
        with torch.no_grad():
            bias = s[:, None, None] * index(8) + causal(8)
        return added(q, k, v, bias), s.sin()

    expect(
        "explicit mask (mask-gradient)", fn, *qkv(), SLOPES.clone().requires_grad_(), operand=True
    )


#: Shapes of a bias besides its full one, which test_snapshots.py has, and (H, 1, N).
BROADCAST = [(2, 1, 1, 8), (8, 8), (8, 1), (8,)]
BIASES = {
    "sdpa": lambda q, k, v, b: sdpa(q, k, v, b),
    "added": added,
    "scaled with the scores": lambda q, k, v, b: ((q @ k.mT + b) * 0.5).softmax(-1) @ v,
    "subtracted": lambda q, k, v, b: (q @ k.mT - b).softmax(-1) @ v,
    "with a causal mask": lambda q, k, v, b: (
        (q @ k.mT + b).masked_fill(~triangle(), -math.inf).softmax(-1) @ v
    ),
    "two of them": lambda q, k, v, b: (q @ k.mT + b + b.sin()).softmax(-1) @ v,
}


@pytest.mark.parametrize(
    "shape",
    [(4, 1, 8), *(pytest.param(shape, marks=pytest.mark.slow) for shape in BROADCAST)],
)
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_with_gradient(name, shape):
    bias = torch.randn(shape, requires_grad=True)
    found = check(BIASES[name], *qkv(), bias, lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "attn_mask" in found.graph


def test_a_bias_of_three_dimensions():
    """Scores (B, S, N) of heads folded into the batch: the bias has no heads either."""
    args = [x.detach().flatten(0, 1).requires_grad_() for x in qkv()]
    bias = torch.randn(8, 8, 8, requires_grad=True)
    for fn in (BIASES["sdpa"], added):
        found = expect("explicit mask (mask-data)", fn, *args, bias, operand=True)
        assert ".unsqueeze(1)" in found.graph


def test_finite_numbers_in_a_bias_from_outside():
    """They hide keys that -inf would hide too, but of queries that see no other."""
    bias = torch.zeros(2, 1, 8, 8)
    bias[:, :, :3, :5] = LEAST
    bias[0, 0, 1] = LEAST
    bias[1, 0, 1] = -math.inf
    bias[1, 0, 1, :2] = LEAST
    args = qkv(grad=False)
    for fn in (BIASES["sdpa"], added):
        found = expect("explicit mask (mask-data)", fn, *args, bias, operand=True)
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_k_: "f32[2, 4, 8, 16]", L_q_: "f32[2, 4, 8, 16]", L_mask_: "f32[2, 1, 8, 8]", L_v_: "f32[2, 4, 8, 16]"):
        l_k_ = L_k_
        l_q_ = L_q_
        l_mask_ = L_mask_
        l_v_ = L_v_
        amax: "f32[2, 1, 8, 1]" = l_mask_.amax(-1, keepdim = True)
        eq: "b8[2, 1, 8, 1]" = amax == -inf
        masked_fill: "f32[2, 1, 8, 1]" = amax.masked_fill(eq, 0.0);  eq = None
        sub: "f32[2, 1, 8, 8]" = l_mask_ - masked_fill;  l_mask_ = masked_fill = None
        le: "b8[2, 1, 8, 1]" = amax <= -1e+16;  amax = None
        masked_fill_1: "f32[2, 4, 8, 16]" = l_q_.masked_fill(le, 0.0);  l_q_ = le = None
        attention_default = torch.ops.fdattn.attention.default(masked_fill_1, l_k_, l_v_, None, None, causal = False, scale = 0.25, attn_mask = sub);  masked_fill_1 = l_k_ = l_v_ = sub = None
        getitem: "f32[2, 4, 8, 16]" = attention_default[0]
        getitem_1: "f32[2, 4, 8]" = attention_default[1];  attention_default = None
        eq_1: "b8[2, 4, 8]" = getitem_1 == -inf;  getitem_1 = None
        unsqueeze: "b8[2, 4, 8, 1]" = eq_1.unsqueeze(-1);  eq_1 = None
        masked_fill_2: "f32[2, 4, 8, 16]" = getitem.masked_fill(unsqueeze, nan);  getitem = unsqueeze = None
        return (masked_fill_2,)""",
    )


def test_a_mask_in_float16():
    """-3e4 is far from what every score in float16 is above, and -65504 is its least."""

    def fn(q, k, v, fill):
        mask = torch.full((8, 8), fill, dtype=q.dtype).triu(1)
        return (q @ k.mT + mask).softmax(-1) @ v

    args, close = qkv(dtype=torch.float16, grad=False), {"rtol": 2e-2, "atol": 2e-2}
    expect(
        "explicit mask (mask-form)", lambda q, k, v: fn(q, k, v, -3e4), *args, operand=True, **close
    )
    expect("causal", lambda q, k, v: fn(q, k, v, -65504.0), *args, **close)


def test_a_mask_whose_least_number_is_another_dtypes():
    """float32's least number is -inf in bfloat16."""

    def fn(q, k, v):
        mask = torch.full((8, 8), LEAST).triu(1).to(q.dtype)
        return (q @ k.mT + mask).softmax(-1) @ v

    expect("causal", fn, *qkv(dtype=torch.bfloat16, grad=False), rtol=2e-2, atol=2e-2)


def static_cache(q, k, v, position, fill=None):
    """As transformers has it: the counter moves on between the mask and the attention."""
    mask = transformers_mask(q, k, offset=position)
    if fill is not None:
        mask = torch.where(mask, 0.0, fill)
    position.add_(q.shape[2])
    out = sdpa(q, k, v, mask) if fill is None else (q @ k.mT + mask).softmax(-1) @ v
    return out, position.sub_(q.shape[2])


@pytest.mark.parametrize("fill", [None, -math.inf, LEAST])
@pytest.mark.parametrize("q_len", [1, 3, 20])
def test_static_caches(q_len, fill):
    args = qkv(q_len, 40, kv_heads=4, grad=False)
    mask = "lengths" if q_len == 1 else "causal from an offset"
    op = "attention" if q_len > 16 else "decode"
    for position in (torch.tensor(5), torch.tensor([5])):
        expect(mask, lambda q, k, v, p: static_cache(q, k, v, p, fill), *args, position, op=op)


def test_static_cache_graph_of_one_query():
    found = expect("lengths", static_cache, *qkv(1, 40, grad=False), torch.tensor(5), op="decode")
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_q_: "f32[2, 4, 1, 16]", L_position_: "i64[]", L_k_: "f32[2, 4, 40, 16]", L_v_: "f32[2, 4, 40, 16]"):
        l_q_ = L_q_
        l_position_ = L_position_
        l_k_ = L_k_
        l_v_ = L_v_
        getitem_2: "i64[1]" = l_position_[(None,)]
        add_2: "i64[1]" = getitem_2 + 1;  getitem_2 = None
        clamp: "i64[1]" = add_2.clamp(-536870912, 536870912);  add_2 = None
        to_1: "i32[1]" = clamp.to(torch.int32);  clamp = None
        add_: "i64[]" = l_position_.add_(1);  add_ = None
        expand_1: "i32[2]" = to_1.expand(2);  to_1 = None
        decode_default = torch.ops.fdattn.decode.default(l_q_, l_k_, l_v_, expand_1, None, causal = False, scale = None);  l_q_ = l_k_ = l_v_ = expand_1 = None
        getitem_3: "f32[2, 4, 1, 16]" = decode_default[0];  decode_default = None
        sub_: "i64[]" = l_position_.sub_(1);  l_position_ = None
        return (getitem_3, sub_)""",
    )


def test_a_static_cache_with_a_window():
    def fn(q, k, v, p):
        return sdpa(q, k, v, transformers_mask(q, k, window=4, offset=p))

    for q_len in (1, 3):
        expect(
            "causal from an offset and window (3, 0)", fn, *qkv(q_len, 40, grad=False),
            torch.tensor(17), op="decode",
        )  # fmt: skip


def test_positions_of_each_sequence():
    """One query: its position is a number of each sequence, whatever the numbers are."""

    def fn(q, k, v, p):
        return sdpa(q, k, v, (index(40) <= p[:, :, None])[:, None])

    expect("lengths", fn, *qkv(1, 40, grad=False), torch.tensor([[5], [39]]), op="decode")
    positions = torch.tensor([[5, 6], [20, 7]])
    expect(
        "explicit mask (mask-data)",
        fn,
        *qkv(2, 40, grad=False),
        positions,
        operand=True,
        op="decode",
    )


def test_a_few_queries_with_an_explicit_mask():
    mask = torch.rand(2, 1, 3, 40) > 0.3
    expect(
        "explicit mask (mask-data)", sdpa, *qkv(3, 40, grad=False), mask, operand=True, op="decode"
    )


def test_a_counter_that_moves_while_the_mask_is_made():
    def fn(q, k, v, p):
        queries = index(3)[:, None] + p
        positions = p.view(1)
        p.add_(2)
        mask = (index(40) <= queries) & (index(40) <= positions + 9)
        return sdpa(q, k, v, mask), p.sub_(2)

    found = check(fn, *qkv(3, 40, grad=False), torch.tensor(5), lower="eager")
    assert mask_of(found) == "explicit mask (mask-data)"


def test_a_mask_written_to_in_place():
    def fn(q, k, v):
        mask = triangle()
        mask[0, 5] = True
        return sdpa(q, k, v, mask)

    expect("explicit mask (mask-data)", fn, *qkv(), operand=True)


def test_a_view_of_a_mask_written_to_in_place():
    def fn(q, k, v):
        mask = torch.ones(8, 8).tril()
        mask[3].zero_()
        return sdpa(q, k, v, (mask > 0) | torch.eye(8, dtype=torch.bool))

    expect("explicit mask (mask-data)", fn, *qkv(), operand=True)


def test_lengths_written_to_in_place():
    """The mask was made before: lengths are copied where it was."""

    def fn(q, k, v, n):
        mask = index(8) < n[:, None, None, None]
        n.mul_(2)
        return sdpa(q, k, v, mask), n.div_(2, rounding_mode="floor")

    expect("lengths", fn, *qkv(), LENGTHS.clone())


def test_lengths_written_between_two_masks():
    def fn(q, k, v, lengths):
        lengths = lengths % 100
        first = index(8) >= lengths[:, None, None, None]
        lengths.sub_(2)
        second = index(8) >= lengths[:, None, None, None]
        scores = (q @ k.mT).masked_fill(first, -math.inf).masked_fill(second, -math.inf)
        return scores.softmax(-1) @ v

    found = check(fn, *qkv(), torch.tensor([5, 8]), lower="eager")
    assert found.report.reasons == ["in-place"]


def test_padding_written_to_in_place():
    def fn(q, k, v, padding):
        mask = transformers_mask(q, k, padding)
        padding.zero_()
        return sdpa(q, k, v, mask)

    for padding in (PADDING, PADDING.bool()):
        torch._dynamo.reset()
        expected = fn(*(args := qkv(grad=False)), padding.clone())
        backend = Recorder("eager")
        found = torch.compile(fn, backend=backend, fullgraph=True)(*args, padding.clone())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_an_input():
    """A buffer may change: nothing is concluded from what it holds."""
    expect("explicit mask (mask-data)", sdpa, *qkv(), triangle(), operand=True)


def test_one_operand_for_all_layers():
    def fn(q, k, v, padding):
        mask = transformers_mask(q, k, padding)
        return sdpa(sdpa(q, k, v, mask), k, v, mask)

    found = check(fn, *qkv(grad=False), PADDING, lower="eager")
    assert ops(found) == ["attention"] * 2
    assert found.graph.count(" != 0") == 1


DYNAMIC = {
    "causal": ("causal", lambda q, k, v: sdpa(q, k, v, transformers_mask(q, k))),
    "window": (
        "causal and window (2, 0)",
        lambda q, k, v: sdpa(q, k, v, transformers_mask(q, k, window=3)),
    ),
    "positions without a jump": (
        "causal",
        lambda q, k, v: sdpa(q, k, v, transformers_mask(q, k) & unpacked(q.shape[2])),
    ),
    "tril": (
        "causal",
        lambda q, k, v: filled(
            q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().logical_not()
        ),
    ),
    "full and triu": ("causal", lambda q, k, v: added(q, k, v, causal(q.shape[2], torch.finfo(q.dtype).min))),
}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
def test_lengths_and_batches_that_are_symbols(name):
    mask, fn = DYNAMIC[name]

    def run(x):
        x = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return fn(x, x, x)

    backend = symbolic(run, lambda batch, length: [torch.randn(batch, length, 64)])
    assert mask_of(backend.found) == mask


def symbolic(fn, inputs) -> Recorder:
    """fn compiled once for three sizes."""
    torch._dynamo.reset()
    backend = Recorder("eager")
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
    for batch, length in ((2, 9), (3, 17), (5, 33)):
        args = inputs(batch, length)
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=1e-4, atol=1e-5)
    assert backend.found.frames == 1
    return backend


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("fill", [-math.inf, LEAST])
def test_a_counter_that_is_a_python_number(q_len, fill):
    """From its second value on it is a symbol, beside sizes that are none."""

    def fn(q, k, v, position):
        return filled(q, k, v, index(24) > index(q.shape[2])[:, None] + position, fill)

    torch._dynamo.reset()
    backend = Recorder()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for position in (5, 6, 0, 30, -2):
        args = *qkv(q_len, 24, grad=False), position
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=1e-4, atol=1e-5, equal_nan=True)
    found = backend.found
    assert found.frames == 2
    assert ops(found) == ["decode"] * 2
    assert "mask-symbol" in found.report.sites[1].notes[0]


def test_a_length_that_is_a_size_less_two():
    def fn(q, k, v):
        return filled(q, k, v, index(k.shape[2]) >= k.shape[2] - 2)

    args = qkv(17, 24)
    for x in args:
        torch._dynamo.mark_dynamic(x, 2)
    expect("explicit mask (mask-symbol)", fn, *args, operand=True, lower="aot_eager")


def test_symbolic_padding():
    def run(x, padding):
        x = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return sdpa(x, x, x, transformers_mask(x, x, padding))

    backend = symbolic(
        run, lambda batch, n: [torch.randn(batch, n, 64), torch.rand(batch, n) > 0.2]
    )
    assert mask_of(backend.found) == "causal and explicit padding (mask-data)"


def test_a_symbolic_cache():
    """A cache that grows: the offset of queries is keys less queries, whatever these are."""

    def run(x, past):
        x = x.unflatten(-1, (4, 16)).transpose(1, 2)
        k = torch.cat((past, x), 2)
        mask = transformers_mask(x, k, offset=past.shape[2])
        return sdpa(x, k, k, mask)

    backend = symbolic(
        run, lambda batch, n: [torch.randn(batch, n, 64), torch.randn(batch, 4, n + 3, 16)]
    )
    assert mask_of(backend.found) == "causal"


SOFTCAPS = {
    "mul": lambda q, k, v: (20 * torch.tanh(q @ k.mT / 20)).softmax(-1) @ v,
    "methods": lambda q, k, v: ((q @ k.mT * 0.1).div(5).tanh() * 5).softmax(-1) @ v,
    "in fp32": lambda q, k, v: (
        F.softmax(torch.tanh(q @ k.mT * 0.25 / 3).float() * 3, dim=-1).type_as(q) @ v
    ),
    "without a cap": lambda q, k, v: (q @ k.mT).tanh().softmax(-1) @ v,
}


@pytest.mark.parametrize("name", SOFTCAPS)
def test_softcap(name):
    found = check(SOFTCAPS[name], *qkv(), lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "softcap = " in found.graph


def test_softcap_with_a_window_and_decode():
    def fn(q, k, v, p):
        scores = torch.tanh(q @ k.mT * 0.25 / 5) * 5
        mask = torch.where(transformers_mask(q, k, window=4, offset=p), 0.0, LEAST)
        return (scores + mask).softmax(-1) @ v

    expect(
        "causal from an offset and window (3, 0)", fn, *qkv(3, 40, grad=False), torch.tensor(9),
        op="decode",
    )  # fmt: skip


def test_value_head_dims_where_a_gradient_is_wanted():
    q, k, _ = qkv()
    v = torch.randn(2, 4, 8, 24, requires_grad=True)
    assert ops(check(lambda q, k, v: sdpa(q, k, v), q, k, v, lower="eager")) == ["attention"]


def with_sinks(q, k, v, sinks, mask=None, shift=True):
    """As gpt-oss has it."""
    scores = q @ k.mT * 0.25
    if mask is not None:
        scores = scores + mask
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    joined = torch.cat([scores, column], dim=-1)
    if shift:
        joined = joined - joined.max(dim=-1, keepdim=True).values
    weights = F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]
    return F.dropout(weights, p=0.1, training=False).to(v.dtype) @ v


@pytest.mark.parametrize("shift", [True, False])
def test_sinks(shift):
    sinks = torch.randn(4, requires_grad=True)
    found = check(lambda *x: with_sinks(*x, shift=shift), *qkv(), sinks, lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "sinks = " in found.graph


def test_sinks_where_all_keys_are_hidden():
    def fn(q, k, v, sinks, padding):
        mask = torch.where(transformers_mask(q, k, padding, window=3), 0.0, LEAST)
        return with_sinks(q, k, v, sinks, mask)

    expect(
        "causal and window (2, 0) and explicit padding (mask-data)", fn, *qkv(), torch.randn(4),
        PADDING, operand=True,
    )  # fmt: skip


def test_sinks_and_decode():
    def fn(q, k, v, sinks, p):
        mask = torch.where(transformers_mask(q, k, offset=p), 0.0, LEAST)
        return with_sinks(q, k, v, sinks, mask)

    args = *qkv(1, 40, grad=False), torch.randn(4), torch.tensor(9)
    expect("lengths", fn, *args, op="decode")


@pytest.mark.parametrize("kind", ["a number", "keys"])
def test_sinks_are_not_shifted(kind):
    """What is the same for all keys of a query changes a softmax that a sink is in."""

    def fn(q, k, v, sinks, slopes):
        bias = torch.full((8, 8), 3.0) if kind == "a number" else slopes[:, None, None] * index(8)
        return with_sinks(q, k, v, sinks, causal(8) + bias)

    sinks = torch.randn(4, requires_grad=True)
    expect("explicit mask (mask-form)" if kind == "a number" else "explicit mask (mask-data)",
           fn, *qkv(), sinks, SLOPES, operand=True)  # fmt: skip


def test_sinks_that_are_counted():
    found = check(lambda q, k, v: with_sinks(q, k, v, index(4)), *qkv(), lower="eager")
    assert found.report.sites[0].notes == ("sinks",)


def test_sinks_without_gradients():
    def fn(q, k, v, sinks):
        with torch.no_grad():
            out = with_sinks(q, k, v, sinks)
        return out, sinks * 2

    found = check(fn, *qkv(20, grad=False), torch.randn(4, requires_grad=True), lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "detach()" in found.graph


def two_columns(q, k, v, sinks):
    column = sinks.reshape(1, -1, 1, 1).expand(2, -1, 8, 2)
    return torch.cat([q @ k.mT, column], -1).softmax(-1)[..., :-2] @ v


def beside(q, k, v, column, items=(..., slice(None, -1)), first=False):
    scores = q @ k.mT
    parts = [column, scores] if first else [scores, column]
    return torch.cat(parts, -1).softmax(-1)[items] @ v


NO_SINKS = {
    "two columns": two_columns,
    "of each query": lambda q, k, v, s: beside(q, k, v, q[..., :1]),
    "first": lambda q, k, v, s: beside(q, k, v, s.view(1, 4, 1, 1).expand(2, 4, 8, 1), first=True),
    "the first is cut off": lambda q, k, v, s: beside(
        q, k, v, s.view(1, 4, 1, 1).expand(2, 4, 8, 1), (..., slice(1, None))
    ),
    "not cut off": lambda q, k, v, s: (
        torch.cat([q @ k.mT, s.view(1, 4, 1, 1).expand(2, 4, 8, 1)], -1).softmax(-1)
        @ torch.cat([v, v[:, :, :1]], 2)
    ),
    "nothing but cut off": lambda q, k, v, s: (q @ k.mT).softmax(-1)[..., :-1] @ v[:, :, 1:],
    "less another's maximum": lambda q, k, v, s: (
        (q @ k.mT - (q @ k.mT * 2).amax(-1, keepdim=True)).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("name", NO_SINKS)
def test_columns_that_are_no_sinks(name):
    found = check(NO_SINKS[name], *qkv(), SLOPES, lower="eager")
    for site in found.report:
        assert "sinks" not in site.notes
        reasons = ("scores-unknown", "weights-unknown", "unknown-op")
        assert site.reason in reasons or "explicit" in mask_of(found)
