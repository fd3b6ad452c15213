"""The inputs of decode cases: lengths, pages, quantised caches, the floor's bytes, exact answers."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import DECODE_CASES, select, swept
from benchmarks.decode_inputs import ExactHead, Layouts, flat_bytes, make_inputs
from benchmarks.exact import max_abs_err
from benchmarks.peers import PEERS, first
from benchmarks.shapes import DecodeCase, sequence_lengths

CPU = torch.device("cpu")
PAGED = DecodeCase(3, 4, 2, 50, 16, "fp32", page=8, ragged="uniform")
TINY = [case for case in (*swept("all"), *DECODE_CASES) if case.tiny]


def test_ragged_lengths_are_those_of_the_baselines() -> None:
    """The published tables say how long these lengths' bytes take at 3.12 TB/s."""
    cases = {c.label: c for c in DECODE_CASES if c.ragged}
    uniform = cases["B32 H32/8 N32768 page16 ragged-uniform"]
    power = cases["B64 H32/8 N32768 page16 ragged-power"]
    assert round(uniform.kv_bytes / 3.12e6) == 699
    assert round(power.kv_bytes / 3.12e6) == 407
    assert min(power.kv_lens) == 1
    assert max(uniform.kv_lens) <= 32768
    assert DecodeCase(2, 4, 2, 9).kv_lens == (9, 9)
    with pytest.raises(
        ValueError, match="ragged must be uniform, power, short or None, got 'even'"
    ):
        sequence_lengths(2, 9, "even")


def test_bytes_count_valid_tokens_in_the_cache_dtype() -> None:
    assert DecodeCase(2, 32, 8, 100).kv_bytes == 2 * 2 * 8 * 100 * 128 * 2
    assert DecodeCase(2, 32, 8, 100, cache="fp8").kv_bytes == 2 * 2 * 8 * 100 * 128
    assert DecodeCase(2, 32, 8, 100, page=16).kv_bytes == DecodeCase(2, 32, 8, 100).kv_bytes
    assert PAGED.kv_bytes == 2 * sum(PAGED.kv_lens) * 2 * 16 * 4


def test_pages_are_all_used_once_in_random_order() -> None:
    one, two = make_inputs(PAGED, CPU, 2)
    needed = [-(-length // 8) for length in PAGED.kv_lens]
    used = [page for row, count in zip(one.page_table, needed, strict=True) for page in row[:count]]
    assert sorted(map(int, used)) == list(range(sum(needed)))
    assert list(map(int, used)) != sorted(map(int, used))
    assert one.k.shape == (sum(needed), 2, 8, 16)
    assert one.k.transpose(1, 2).is_contiguous()  # NHD in memory
    assert one.page_table.dtype == one.kv_lens.dtype == torch.int32
    assert one.page_table is two.page_table
    assert not torch.equal(one.k, two.k)


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_quantised_caches_keep_the_values(cache: str) -> None:
    (x,) = make_inputs(DecodeCase(2, 4, 2, 32, 16, "fp32", cache=cache), CPU, 1)
    assert x.k.element_size() == 1
    assert x.k_scale.shape == (2, 2, 1)
    assert x.k_scale.dtype == torch.float32
    values = x.k.float() * x.k_scale[..., None]
    assert 0.9 < values.std().item() < 1.1
    assert x.k.float().abs().max() == (448.0 if cache == "fp8" else 127.0)


def test_layouts_hold_the_same_values() -> None:
    layouts = Layouts(DecodeCase(2, 4, 2, 32, 16, "fp32"), CPU, 1)
    (one,), (other,) = layouts.first, layouts.in_memory("BSHD")
    assert torch.equal(one.k, other.k)
    assert one.k.is_contiguous()
    assert other.k.transpose(1, 2).is_contiguous()
    assert layouts.in_memory("BSHD")[0] is other
    paged = Layouts(PAGED, CPU, 1)
    assert paged.in_memory("BSHD") is paged.first


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_the_floor_reads_what_the_call_must_read(case: DecodeCase) -> None:
    for k, v in flat_bytes(case, make_inputs(case, CPU, 2)):
        assert k.numel() + v.numel() == case.kv_bytes
        assert k.is_contiguous()
        assert k.numel() % 4 == 0  # the kernel reads words


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_the_exact_head_is_the_last_of_the_longest(case: DecodeCase) -> None:
    (x,) = make_inputs(case, CPU, 1)
    head = ExactHead(case, x)
    (call,) = PEERS["eager"].decode(case, [x])
    assert max_abs_err(head.queries(first(call())), head.exact.out) < 1e-5
    row = max(range(case.batch), key=lambda b: (case.kv_lens[b], b))
    assert torch.equal(head.queries(x.q), x.q[row, -(case.heads // case.kv_heads) :])


def test_sweeps() -> None:
    whole = swept("all")
    assert len({case.name for case in whole}) == len(whole)
    assert 20 <= len([case for case in whole if not case.tiny]) <= 33  # three minutes of a GPU
    assert [c.kv_len for c in swept("length") if not c.tiny] == [2**n for n in range(9, 18)]
    assert {c.head_dim for c in swept("dim") if not c.tiny} == {64, 96, 128, 192, 256}
    assert [c.page for c in swept("page") if not c.tiny] == [1, 16, 64, 256]
    dtypes = [(c.dtype, c.cache) for c in swept("dtype") if not c.tiny]
    assert dtypes[:4] == [("bf16", None), ("fp16", None), ("bf16", "fp8"), ("bf16", "int8")]
    # Large caches, where a byte should count half, the second one in pages, too.
    assert dtypes[4:] == [*2 * [("bf16", None), ("bf16", "fp8")], ("bf16", "fp8")]
    assert swept("batch, length")[:2] == swept("batch")[:2]
    for axis in ("length", "batch", "gqa", "dim", "page", "dtype", "ragged"):
        assert select(swept(axis), None, tiny_only=True), f"{axis} has no tiny case"
    with pytest.raises(
        ValueError, match=r"--sweep must name axes of length, .* or all, got 'size'"
    ):
        swept("size")
