"""Decode of CPU tensors: pages that are gathered for each sequence alone, and for all of many short ones."""

import gc
import weakref

import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import in_pages, int32
from torch_fdattn.launch import prepared
from torch_fdattn.ops.attention import cpu as attention_cpu
from torch_fdattn.ops.decode import cpu, reference
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import attention_oracle, make_tensor

pytestmark = pytest.mark.skipif(INTERPRET, reason="the interpreter runs the kernels")
PAGE = 16


def pages(batch, capacity=64, dtype=torch.float32):
    """q, dense keys and values, the same in pages of another order, their table, lengths with an empty sequence."""
    q = make_tensor((batch, 4, 1, 32), dtype=dtype)
    k, v = (make_tensor((batch, 2, capacity, 32), dtype=dtype) for _ in range(2))
    (k_pages, table), (v_pages, _) = in_pages(k, PAGE), in_pages(v, PAGE)
    order = torch.randperm(k_pages.shape[0])
    table = order.argsort()[table.long()].to(torch.int32)
    lens = int32(*(b * capacity // batch for b in range(batch)))
    return q, k, v, k_pages[order], v_pages[order], table, lens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("few", [0, 1 << 16])
@pytest.mark.parametrize("batch", [1, 3, 24])
def test_sequences_together_and_each_alone(batch, few, dtype, monkeypatch):
    for module in (cpu, attention_cpu):
        monkeypatch.setattr(module, "FEW_KEYS", few)
    q, k, v, k_pages, v_pages, table, lens = pages(batch, dtype=dtype)
    out, lse = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
    exact, exact_lse = attention_oracle(q.double(), k.double(), v.double(), lens)
    bits = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), exact, rtol=bits, atol=bits)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few", [0, 1 << 16])
def test_what_lies_beyond_the_lengths_may_be_anything(few, monkeypatch):
    """Page ids, and NaN on the pages; a page that does not exist hides its keys."""
    for module in (cpu, attention_cpu):
        monkeypatch.setattr(module, "FEW_KEYS", few)
    q, k, v, k_pages, v_pages, table, lens = pages(3)
    expected = torch_fdattn.decode(q, k, v, lens)
    used = torch.arange(4) * PAGE < lens[:, None]
    table = torch.where(used, table, -7)
    unused = torch.ones(k_pages.shape[0], dtype=torch.bool)
    unused[table[used].long()] = False
    k_pages[unused], v_pages[unused] = torch.nan, torch.nan
    clean = torch_fdattn.paged_decode(q, k_pages.nan_to_num(), v_pages.nan_to_num(), table, lens)
    found = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
    for x, y, same in zip(found, expected, clean, strict=True):
        torch.testing.assert_close(x, y)
        assert torch.equal(x, same)
    table[2, 0] = 1000
    mask = torch.ones(3, 1, 1, 64, dtype=torch.bool)
    mask[2, :, :, :PAGE] = False
    expected = torch_fdattn.decode(q, k, v, lens, attn_mask=mask)
    found = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("few", [0, 1 << 16])
def test_scores_and_scales_of_each_sequence(few, monkeypatch):
    for module in (cpu, attention_cpu):
        monkeypatch.setattr(module, "FEW_KEYS", few)
    q, k, v, k_pages, v_pages, table, lens = pages(3)
    scores = dict(
        alibi_slopes=torch.rand(3, 4), sinks=torch.randn(4), q_start=lens + 2, window=(20, -1)
    )
    expected = torch_fdattn.decode(q, k, v, lens, causal=False, **scores)
    found = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens, causal=False, **scores)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    scale = torch.rand(k_pages.shape[0], 2, PAGE) + 0.5
    k_pages, v_pages = (x.to(torch.float8_e4m3fn) for x in (k_pages, v_pages))
    found = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens, k_scale=scale, v_scale=scale)  # fmt: skip
    plain = (x.float() * scale[..., None] for x in (k_pages, v_pages))
    expected = torch_fdattn.paged_decode(q, *plain, table, lens)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_each_sequence_reads_its_own_pages_alone(monkeypatch):
    """Where one sequence is long and the others are short, the short ones gather what they hold."""
    counts, gathered = [], reference.gathered
    monkeypatch.setattr(
        cpu, "gathered", lambda q, k, v, table, longest, *scales: (
            counts.append(longest), gathered(q, k, v, table, longest, *scales)
        )[1],
    )  # fmt: skip
    monkeypatch.setattr(cpu, "FEW_KEYS", 0)
    q, _, _, k_pages, v_pages, table, lens = pages(4)
    torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
    assert counts == lens.tolist()


def small():
    q, lens = torch.randn(2, 8, 1, 64), int32(20, 33)
    return q, torch.randn(2, 2, 33, 64), torch.randn(2, 2, 33, 64), lens


def test_autocast_changes_nothing_of_a_plan():
    """Where the reference answers, too."""
    call = small()
    plan = torch_fdattn.plan_decode(*call, softcap=5.0)
    expected = plan(*call)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plan(*call)[0], expected)


def test_a_remembered_call_holds_no_tensor_of_the_first():
    mask = torch.randn(2, 1, 1, 33)
    held = weakref.ref(mask)
    torch_fdattn.decode(*small(), attn_mask=mask)
    del mask
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("paged", [False, True])
def test_a_remembered_call_refuses_what_the_first_does(paged):
    q, k, v, lens = small()
    options = dict(q_start=lens - 1, kv_block=4)
    call = torch_fdattn.paged_decode if paged else torch_fdattn.decode
    table = (int32(0, 1).view(2, 1),) if paged else ()
    call(q, k, v, *table, lens, **options, kv_stride=8)
    with pytest.raises(TypeError, match="kv_stride must be an int"):
        call(q, k, v, *table, lens, **options, kv_stride=8.0)


def test_a_mask_without_dims():
    call = small()
    expected = torch_fdattn.decode(*call)[0]
    found = torch_fdattn.decode(*call, attn_mask=torch.tensor(0.5))[0]
    torch.testing.assert_close(found, expected)


def one_row(keys=48, **layout):
    """A step of one sequence: what `cpu._one_row` answers."""
    q = make_tensor((1, 6, 1, 32))
    k, v = (make_tensor((1, 2, keys, 32), **layout) for _ in range(2))
    return q, k, v


def step(q, k, v, lens, monkeypatch=None, **options):
    """The second call, which is a remembered one; with monkeypatch the general way alone."""
    if monkeypatch is not None:
        monkeypatch.setattr(cpu, "_is_one_row", lambda call: False)
        prepared.forget()
    for _ in range(2):
        found = torch_fdattn.decode(q, k, v, lens, **options)
    return found


@pytest.mark.parametrize("length", [48, 17, 1, 0, 100])
def test_one_row_has_the_bits_of_the_general_way(length, monkeypatch):
    q, k, v = one_row()
    k[:, :, length:], v[:, :, length:] = torch.nan, torch.nan
    lens = int32(length)
    found = step(q, k, v, lens)
    for x, y in zip(found, step(q, k, v, lens, monkeypatch), strict=True):
        assert torch.equal(x, y)
    # The strides that matter, of dims with more than one element.
    assert (found[0].shape, found[0].stride(1), found[0].stride(3)) == (q.shape, q.stride(1), 1)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_one_row_keeps_nan(where, monkeypatch):
    tensors = dict(zip("qkv", one_row(), strict=True))
    tensors[where][0, 0, 0, 3] = torch.nan
    found = step(*tensors.values(), int32(30))
    assert found[0][0, 0].isnan().any()
    for x, y in zip(found, step(*tensors.values(), int32(30), monkeypatch), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_which_calls_are_one_row(monkeypatch):
    taken = []
    is_one_row = cpu._is_one_row
    monkeypatch.setattr(cpu, "_is_one_row", lambda call: taken.append(is_one_row(call)) or taken[-1])  # fmt: skip
    q, k, v = one_row()
    two, lens = make_tensor((1, 6, 2, 32)), int32(30)
    table = torch.arange(3, dtype=torch.int32)[None]
    pages = [in_pages(x, PAGE)[0] for x in (k, v)]
    calls = {
        "plain": (True, lambda: torch_fdattn.decode(q, k, v, lens)),
        "no lengths": (True, lambda: torch_fdattn.decode(q, k, v)),
        "causal": (True, lambda: torch_fdattn.decode(q, k, v, lens, causal=True)),
        "two tokens": (False, lambda: torch_fdattn.decode(two, k, v, lens)),
        "a window": (False, lambda: torch_fdattn.decode(q, k, v, lens, window=(4, 0))),
        "a cap": (False, lambda: torch_fdattn.decode(q, k, v, lens, softcap=5.0)),
        "a sink": (False, lambda: torch_fdattn.decode(q, k, v, lens, sinks=torch.zeros(6))),
        "a position": (False, lambda: torch_fdattn.decode(q, k, v, lens, q_start=int32(3), causal=True)),
        "a mask": (False, lambda: torch_fdattn.decode(q, k, v, lens, attn_mask=torch.zeros(48))),
        "halves": (False, lambda: torch_fdattn.decode(*(x.half() for x in (q, k, v)), lens)),
        "pages": (True, lambda: torch_fdattn.paged_decode(q, *pages, table, lens)),
        "pages of a window": (False, lambda: torch_fdattn.paged_decode(q, *pages, table, lens, window=(4, 0))),
        "pages of two sequences": (False, lambda: torch_fdattn.paged_decode(q.repeat(2, 1, 1, 1), *pages, table.repeat(2, 1), int32(9, 30))),
        "rows that share memory": (False, lambda: torch_fdattn.decode(q, k, v[:, :, :1].expand_as(v), lens)),
    }  # fmt: skip
    for name, (expected, call) in calls.items():
        taken.clear()
        prepared.forget()
        call()
        assert taken == [expected and cpu.TAKES_GROUPS and not cpu.REFERENCE_ALONE], name


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    "order", [[0, 1, 2], [2, 3, 4], [4, 0, 3], [1, 3, 2], [1, -1, 2], [1, 2, 5], [2, 3, -7]]
)
@pytest.mark.parametrize("length", [48, 33, 16, 0, 100])
def test_one_row_of_pages_has_the_bits_of_the_general_way(length, order, heads_first, monkeypatch):
    q, k, v = one_row(5 * PAGE)
    pages = [in_pages(x, PAGE)[0] for x in (k, v)]
    if not heads_first:  # as the engine's memory
        pages = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pages]
    table, lens = int32(*order)[None], int32(length)
    found = torch_fdattn.paged_decode(q, *pages, table, lens)
    monkeypatch.setattr(cpu, "_is_one_row", lambda call: False)
    prepared.forget()
    for x, y in zip(found, torch_fdattn.paged_decode(q, *pages, table, lens), strict=True):
        assert torch.equal(x, y)


def test_one_row_into_tensors_of_the_caller():
    q, k, v = one_row()
    plan = torch_fdattn.plan_decode(q, k, v, int32(30))
    out, lse = torch.empty_like(q), torch.empty(1, 6, 1)
    for length in (30, 4):
        expected = torch_fdattn.decode(q, k, v, int32(length))
        found = plan(q, k, v, int32(length), out=(out, lse))
        assert found[0] is out
        for x, y in zip((out, lse), expected, strict=True):
            assert torch.equal(x, y)
