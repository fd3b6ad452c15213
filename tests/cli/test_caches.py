"""The command line's KV caches: counted, paged, quantised, shared by ranks; and what does not fit."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")


from tests.cli.commands import (
    TOKYO,
    cache_bytes,
    invoke,
    needs_smollm2,
    refused,
    run,
    tiny_options,
)
from tests.tiny_model import POSITION


def test_the_cache_is_counted(tiny):
    result = invoke(*tiny_options(tiny))
    assert cache_bytes(result.stderr) == [16 * POSITION]
    assert "100.0% of 8,192 in all" in result.stderr


def test_bfloat16_halves_the_cache(tiny):
    (held,) = cache_bytes(invoke(*tiny_options(tiny, "--dtype", "bfloat16")).stderr)
    assert held == 16 * POSITION / 2


@pytest.mark.parametrize("page_size", [None, 1, 5])
def test_a_paged_cache_writes_the_same_text(page_size, tiny):
    options = [] if page_size is None else ["--page-size", str(page_size)]
    result = invoke(*tiny_options(tiny, "--kv-cache", "paged", *options))
    assert result.stdout == invoke(*tiny_options(tiny)).stdout != ""
    size = page_size or 16
    pages, used = -(-16 // size), -(-15 // size)  # the last token is not stored
    nbytes = f"{pages * size * POSITION:,}"
    assert (
        f"rank 0: KV cache of {nbytes} bytes in {pages} pages of {size} positions, {used} in use\n"
        in result.stderr
    )


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_quantised_cache_takes_a_quarter(kv_dtype, tiny):
    result = invoke(*tiny_options(tiny, "--kv-dtype", kv_dtype))
    assert cache_bytes(result.stderr) == [16 * POSITION / 4]
    assert "100.0% of 2,048 in all" in result.stderr
    both = invoke(*tiny_options(tiny, "--kv-dtype", kv_dtype, "--kv-cache", "paged"))
    assert cache_bytes(both.stderr) == [16 * POSITION / 4]
    assert both.stdout == result.stdout != ""


def test_cache_options_that_do_not_go_together(tiny):
    refused("--page-size needs --kv-cache paged", *tiny_options(tiny, "--page-size", "8"))
    for option, value in (
        ("--kv-cache", "ring"),
        ("--kv-dtype", "fp4"),
        ("--page-size", "0"),
        ("--page-size", str(10**30)),
    ):
        result = invoke(*tiny_options(tiny, option, value))
        assert result.exit_code == 2
        assert option in result.stderr


@pytest.mark.slow
def test_ranks_that_share_positions_may_page_and_quantise_them(tiny):
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    cache = "--kv-cache", "paged", "--page-size", "3", "--kv-dtype", "int8"
    shared = "--kv-block", "2", "--strategy", "hierarchical"
    result = run("-m", *torchrun, "-m", "torch_fdattn", *tiny_options(tiny, *cache, *shared))
    assert result.returncode == 0, result.stderr
    assert result.stdout == invoke(*tiny_options(tiny, *cache)).stdout != ""
    pages = f"KV cache of {9 * POSITION // 4:,} bytes in 3 pages of 3 positions"
    assert f"each rank: {pages}, 3 in use" in result.stderr  # 8 and 7 tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ("--strategy", "fused"),
            "--strategy fused needs ranks that share symmetric memory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--strategy", "hierarchical", "--tensor-parallel", "2"),
            "--strategy hierarchical needs --tensor-parallel 1, got 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_strategies_that_these_ranks_do_not_have(options, message, tiny):
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    result = run("-m", *torchrun, "-m", "torch_fdattn", *tiny_options(tiny, *options))
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.slow
def test_ranks_that_split_the_model_may_page_the_cache(tiny):
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    options = tiny_options(tiny, "--tensor-parallel", "2", "--kv-cache", "paged")
    result = run("-m", *torchrun, "-m", "torch_fdattn", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == invoke(*tiny_options(tiny)).stdout
    assert f"each rank: KV cache of {16 * POSITION // 2:,} bytes in 1 pages of 16" in result.stderr


def test_a_cache_that_does_not_fit_is_one_line(tiny, monkeypatch):
    def no_memory(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nmore")

    monkeypatch.setattr("torch_fdattn.engine.caches.ShardedKVCache", no_memory)
    refused(r"no memory on cpu for a KV cache of 16 positions, 8,192 bytes", *tiny_options(tiny))


@pytest.mark.parametrize("size", [7, 10**8])
def test_the_pages_that_do_not_fit_are_counted_whole(size, tiny, monkeypatch):
    def no_memory(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nmore")

    monkeypatch.setattr("torch_fdattn.engine.caches.PagedKVCache", no_memory)
    positions = -(-16 // size) * size
    refused(
        f"no memory on cpu for a KV cache of {positions} positions in pages of {size}, "
        f"{positions * POSITION:,} bytes in all",
        *tiny_options(tiny, "--kv-cache", "paged", "--page-size", str(size)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kv_block", "held"), [("0", [8, 8]), ("5", [10, 6])])
def test_kv_block_decides_what_each_rank_holds(kv_block, held, tiny):
    """8 prompt tokens and 8 new ones: two halves, or blocks of 5 dealt in turn (5 + 5, 5 + 1)."""
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    options = tiny_options(tiny, "--kv-block", kv_block)
    result = run("-m", *torchrun, "-m", "torch_fdattn", *options)
    assert result.returncode == 0, result.stderr
    assert cache_bytes(result.stderr) == [positions * POSITION for positions in held]


@pytest.mark.slow
def test_ranks_may_split_the_model(tiny):
    """Two ranks with a head each, of which each holds all positions."""
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    options = tiny_options(tiny, "--tensor-parallel", "2", "--tp-strategy", "ag_rs")
    result = run("-m", *torchrun, "-m", "torch_fdattn", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == invoke(*tiny_options(tiny)).stdout
    assert cache_bytes(result.stderr) == [16 * POSITION / 2] * 2


def test_a_model_is_split_over_a_part_of_the_ranks_or_all(tiny):
    message = "--tensor-parallel must divide the number of ranks, 1, got 3"
    refused(message, *tiny_options(tiny, "--tensor-parallel", "3"))


@needs_smollm2
@pytest.mark.slow
def test_two_processes_share_the_cache():
    """The command of the README, on CPU so that it runs wherever the tests do."""
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    result = run("-m", *torchrun, "-m", "torch_fdattn", *TOKYO, "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of Japan is Tokyo.\n"
    found = re.findall(
        r"rank (\d): KV cache of ([\d,]+) bytes, .* of ([\d,]+) in all", result.stderr
    )
    assert [rank for rank, _, _ in found] == ["0", "1"]
    block = 16 * 2 * 30 * 3 * 64 * 4  # positions, K and V, layers, heads, head_dim, fp32
    for _, held, total in found:
        assert int(held.replace(",", "")) <= int(total.replace(",", "")) / 2 + block
