"""Masks that let queries see their own chunk of keys."""

import math

import pytest
import torch
from expecttest import assert_expected_inline

from tests.compile_backend.harness import check, mask_of, ops, qkv
from tests.compile_backend.mask_forms import (
    LEAST,
    SLOPES,
    added,
    expect,
    filled,
    index,
    sdpa,
    triangle,
)


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
