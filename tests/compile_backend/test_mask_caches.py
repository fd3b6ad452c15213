"""Masks over static caches, masks that are written to, and sizes that are symbols."""

import math

import pytest
import torch
from expecttest import assert_expected_inline

from tests.compile_backend.harness import Recorder, check, mask_of, ops, qkv
from tests.compile_backend.mask_forms import (
    LEAST,
    LENGTHS,
    PADDING,
    added,
    causal,
    expect,
    filled,
    index,
    sdpa,
    transformers_mask,
    triangle,
    unpacked,
)


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
