"""Decode adapters: each peer is called with what its documentation asks for, on every kind of case.

FlashAttention-3 and FlashInfer are replaced by stand-ins that check their arguments and compute by the
formula: what is tested is our conversion to their layouts, page lists and scales.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cases import DECODE_CASES, FEATURE_CASES, SWEEPS
from benchmarks.decode_inputs import Layouts
from benchmarks.peers import OURS, PEERS, first
from benchmarks.peers.flashinfer import page_lists
from benchmarks.shapes import AttentionCase, DecodeCase

CPU = torch.device("cpu")
CASES = {
    c.name: c for c in (*DECODE_CASES, *(c for axis in SWEEPS.values() for c in axis)) if c.tiny
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def attend(q, k, v):
    """q (H, D), k, v (n, H_kv, D) in fp64."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    weights = torch.einsum("hd,nhd->hn", q.double(), k).mul(q.shape[1] ** -0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, page_table=None):
    assert q.shape[1] == 1
    assert k_cache.is_contiguous()
    assert cache_seqlens.dtype == torch.int32
    outs = []
    for b, length in enumerate(cache_seqlens.tolist()):
        k, v = (
            x[b] if page_table is None else x[page_table[b].long()].flatten(0, 1)
            for x in (k_cache, v_cache)
        )
        outs.append(attend(q[b, 0], k[:length], v[:length]))
    return torch.stack(outs)[:, None]


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, kv_layout="NHD", *, use_tensor_cores=False):
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        assert (kv_layout, use_tensor_cores) == ("NHD", True)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        q_data_type, kv_data_type,
    ):  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(indices) == indptr[-1]
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        self.pages = indices.split(indptr.diff().tolist())
        self.last, self.page_size = last_page_len.tolist(), page_size
        self.dtypes = (q_data_type, kv_data_type)
        self.heads, self.cache = (num_qo_heads, head_dim), (page_size, num_kv_heads, head_dim)

    def run(self, q, paged_kv_cache, k_scale=None, v_scale=None):
        k_pages, v_pages = paged_kv_cache
        assert (q.dtype, k_pages.dtype) == self.dtypes
        assert q.shape[1:] == self.heads
        assert k_pages.shape[1:] == self.cache
        assert k_pages.is_contiguous()
        outs = []
        for row, (pages, last) in enumerate(zip(self.pages, self.last, strict=True)):
            n = (len(pages) - 1) * self.page_size + last
            k, v = (
                x[pages.long()].flatten(0, 1)[:n].double() * (scale or 1.0)
                for x, scale in ((k_pages, k_scale), (v_pages, v_scale))
            )
            outs.append(attend(q[row], k, v))
        return torch.stack(outs)


def single_decode_with_kv_cache(q, k, v, kv_layout, use_tensor_cores):
    assert (kv_layout, use_tensor_cores) == ("NHD", True)
    assert k.is_contiguous()
    return attend(q, k, v)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in (
        ("flash_attn_interface", (flash_attn_with_kvcache,)),
        ("flashinfer", (BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache)),
    ):
        module = types.ModuleType(name)
        for member in members:
            setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)


def outputs(name: str, case: DecodeCase, layouts: Layouts) -> list[torch.Tensor]:
    peer = PEERS[name]
    calls = peer.decode(case, layouts.in_memory(peer.memory))
    return [first(call()).reshape(layouts.first[0].q.shape) for call in calls]


@EVERY
@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_stand_ins_agree_with_the_formula(stand_ins, name: str, case: DecodeCase) -> None:
    layouts = Layouts(case, CPU, 2)
    if case.cache == "int8" or (case.cache and name == "fa3"):
        with pytest.raises(
            NotImplementedError, match=f"{name} has no form for {case.cache} caches"
        ):
            outputs(name, case, layouts)
        return
    expected = outputs("eager", case, layouts)
    found = outputs(name, case, layouts)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)
    assert not torch.equal(found[0], found[1])  # copies have values of their own


@EVERY
@pytest.mark.parametrize("name", ["cudnn", "fa2"])
def test_sdpa_takes_whole_caches_and_refuses_the_rest(name: str, case: DecodeCase) -> None:
    layouts = Layouts(case, CPU, 2)
    if case.page or case.ragged or case.cache:
        with pytest.raises(NotImplementedError, match=f"{name} has no form for"):
            outputs(name, case, layouts)
        return
    expected = outputs("eager", case, layouts)
    torch.testing.assert_close(outputs(name, case, layouts), expected, atol=2e-6, rtol=2e-5)


@EVERY
def test_flex_masks_lengths_and_refuses_pages(monkeypatch, case: DecodeCase) -> None:
    from torch.nn.attention import flex_attention

    # The formula behind it is the same uncompiled, and compiling takes seconds a case.
    monkeypatch.setattr(
        flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False
    )
    uncompiled = flex_attention.flex_attention
    monkeypatch.setattr(type(PEERS["flex"]), "_compiled", lambda self: uncompiled)
    layouts = Layouts(case, CPU, 1)
    if case.page or case.cache:
        with pytest.raises(NotImplementedError, match="flex has no form for"):
            outputs("flex", case, layouts)
        return
    expected = outputs("eager", case, layouts)
    torch.testing.assert_close(outputs("flex", case, layouts), expected, atol=2e-6, rtol=2e-5)


@EVERY
def test_ours_on_every_kind_of_case(case: DecodeCase) -> None:
    from benchmarks.peers import OURS

    layouts = Layouts(case, CPU, 1)
    (call,) = OURS.decode(case, layouts.first)
    (expected,) = outputs("eager", case, layouts)
    torch.testing.assert_close(first(call()), expected, atol=2e-6, rtol=2e-5)


def test_an_entry_that_this_checkout_lacks_is_said_to_be_missing(monkeypatch) -> None:
    import torch_fdattn
    from benchmarks.peers import OURS

    monkeypatch.delattr(torch_fdattn, "paged_decode", raising=False)
    paged = next(case for case in CASES.values() if case.page)
    with pytest.raises(
        NotImplementedError, match="not available: torch_fdattn has no paged_decode"
    ):
        OURS.decode(paged, [])
    monkeypatch.setattr(torch_fdattn, "decode", lambda q, k, v, kv_lens: None)
    quantised = next(case for case in CASES.values() if case.cache)
    with pytest.raises(
        NotImplementedError, match=r"not available: torch_fdattn\.decode takes no k_scale"
    ):
        OURS.decode(quantised, [])


def test_page_lists() -> None:
    case = DecodeCase(2, 1, 1, 5, page=2, ragged="uniform")
    one, two = case.kv_lens
    table = torch.tensor([[3, 1, 0], [4, 2, 5]], dtype=torch.int32)
    indptr, indices, last = page_lists(case, 2, table)
    counts = [-(-one // 2), -(-two // 2)]
    assert indptr.tolist() == [0, counts[0], sum(counts)]
    assert indices.tolist() == [*[3, 1, 0][: counts[0]], *[4, 2, 5][: counts[1]]]
    assert last.tolist() == [(one - 1) % 2 + 1, (two - 1) % 2 + 1]
    indptr, indices, last = page_lists(DecodeCase(2, 1, 1, 6), 2, None)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 3, 6], [*range(6)], [2, 2])


def test_flash_attention_4_is_called_in_its_own_memory(monkeypatch) -> None:
    def flash_attn_func(q, k, v, causal):  # as its package has it: (B, S, H, D) -> (out, lse)
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
        )
        return out.transpose(1, 2), None

    for name in ("flash_attn", "flash_attn.cute"):
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        module.flash_attn_func = flash_attn_func
        monkeypatch.setitem(sys.modules, name, module)
    case, peer = AttentionCase("a", 2, 3, 3, 5, 8, True), PEERS["fa4"]
    assert peer.available(CPU) == "needs a CUDA device"
    q, k, v = torch.randn(3, 2, 3, 5, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    torch.testing.assert_close(peer.attention(case, CPU)(q, k, v), expected)


@pytest.mark.parametrize("feature", ["softcap", "window16", "varlen"])
def test_features_of_flash_attention_3(monkeypatch, feature: str) -> None:
    import torch_fdattn

    def turned(out):
        return out[0].transpose(1, 2)

    def flash_attn_func(q, k, v, causal=False, softcap=0.0, window_size=None):
        options = dict(causal=causal, softcap=softcap, window=window_size)
        return turned(torch_fdattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), **options))

    def flash_attn_varlen_func(q, k, v, begins, key_begins, longest, longest_keys, causal=False):
        assert begins is key_begins
        assert longest == longest_keys == 80
        return torch_fdattn.varlen_attention(q, k, v, begins, causal=causal)[0]

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    case = next(x for x in FEATURE_CASES if x.label == f"tiny {feature}")
    q, k, v = torch.randn(3, 1, 4, 80, 16)
    k, v = k[:, :2], v[:, :2]
    found, expected = (x.attention(case, CPU)(q, k, v) for x in (PEERS["fa3"], OURS))
    torch.testing.assert_close(found, expected)
    case = next(x for x in FEATURE_CASES if x.label == "tiny alibi")
    with pytest.raises(NotImplementedError, match="no form for alibi"):
        PEERS["fa3"].attention(case, CPU)


@pytest.mark.parametrize("name", ["fa3", "fa4", "flashinfer"])
def test_a_peer_that_is_not_installed_says_so(name: str) -> None:
    assert PEERS[name].available(CPU).endswith("is not installed") or (
        PEERS[name].available(CPU) == "needs a CUDA device"
    )
