"""Decode of CPU tensors: pages that are gathered for each sequence alone, and for all of many short ones."""

import gc
import weakref

import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import in_pages, int32
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
