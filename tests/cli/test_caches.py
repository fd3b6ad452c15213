"""The command line's KV caches: pages counted, quantised, shared by ranks; and what does not fit."""

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

SCALES = 2 * 2 * 2 * 4  # bytes of a position's scales: K and V, layers, heads, fp32


def under_torchrun(*command: str):
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    return run("-m", *torchrun, "-m", "torch_fdattn", *command)


@pytest.mark.parametrize(("options", "size"), [([], 16), (["--page-size", "1"], 1), (["--page-size", "5"], 5)])  # fmt: skip
def test_the_pages_are_counted(options, size, tiny):
    """8 prompt tokens and 8 new ones, of which the last is not stored: pages for 15, and no more."""
    result = invoke(*tiny_options(tiny, *options))
    assert result.stdout == invoke(*tiny_options(tiny)).stdout != ""
    pages = -(-15 // size)
    nbytes = f"{pages * size * POSITION:,}"
    line = (
        f"rank 0: KV cache of {nbytes} bytes in {pages} pages of {size} positions, {pages} in use\n"
    )
    assert line in result.stderr


def test_bfloat16_halves_the_cache(tiny):
    (held,) = cache_bytes(invoke(*tiny_options(tiny, "--dtype", "bfloat16")).stderr)
    assert held == 16 * POSITION / 2


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_quantised_cache_takes_a_quarter_and_its_scales(kv_dtype, tiny):
    result = invoke(*tiny_options(tiny, "--kv-dtype", kv_dtype))
    # Scales have a page more, for padding.
    assert cache_bytes(result.stderr) == [16 * POSITION / 4 + 2 * 16 * SCALES]
    paged = invoke(*tiny_options(tiny, "--kv-dtype", kv_dtype, "--page-size", "3"))
    assert paged.stdout == result.stdout != ""


def test_cache_options_out_of_range(tiny):
    for option, value in (
        ("--kv-dtype", "fp4"),
        ("--page-size", "0"),
        ("--page-size", str(10**30)),
        ("--ngram-tokens", "16"),
        ("--strategy", "hierarchical"),
        ("--kv-cache", "paged"),
    ):
        result = invoke(*tiny_options(tiny, option, value))
        assert result.exit_code == 2
        assert option in result.stderr


def test_speculation_writes_the_same_text_in_fewer_steps(tiny):
    options = tiny_options(tiny, "--max-new-tokens", "60")
    result = invoke(*options, "--ngram-tokens", "3")
    assert result.stdout == invoke(*options).stdout
    accepted, proposed = re.search(r"n-grams: (\d+) of (\d+) proposed", result.stderr).groups()
    assert 0 < int(accepted) <= int(proposed)


@pytest.mark.slow
def test_ranks_that_share_positions_may_quantise_them(tiny):
    cache = "--page-size", "3", "--kv-dtype", "int8", "--ngram-tokens", "2"
    result = under_torchrun(*tiny_options(tiny, *cache, "--strategy", "ring"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == invoke(*tiny_options(tiny, *cache)).stdout != ""
    nbytes = 9 * POSITION // 4 + 12 * SCALES
    assert f"each rank: KV cache of {nbytes:,} bytes in 3 pages of 3 positions, 3 in use" in result.stderr  # fmt: skip


@pytest.mark.slow
def test_a_strategy_that_these_ranks_do_not_have(tiny):
    result = under_torchrun(*tiny_options(tiny, "--strategy", "fused"))
    assert result.returncode != 0
    assert "--strategy 'fused' needs ranks that share symmetric memory" in result.stderr


@pytest.mark.parametrize(("size", "pages"), [(16, 1), (7, 3), (10**8, 1)])
def test_pages_that_do_not_fit_are_one_line(size, pages, tiny, monkeypatch):
    def no_memory(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nmore")

    monkeypatch.setattr("torch_fdattn.engine.paged_step.PagedKV.__init__", no_memory)
    refused(
        f"no memory on cpu for a KV cache of {pages} pages of {size} positions, "
        f"{pages * size * POSITION:,} bytes on each rank",
        *tiny_options(tiny, "--page-size", str(size)),
    )


@pytest.mark.slow
def test_ranks_may_split_the_model(tiny):
    """Two ranks with a head each, of which each holds all positions."""
    options = tiny_options(tiny, "--tensor-parallel", "2", "--tp-strategy", "ag_rs")
    result = under_torchrun(*options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == invoke(*tiny_options(tiny)).stdout
    assert f"each rank: KV cache of {16 * POSITION // 2:,} bytes in 1 pages of 16" in result.stderr


def test_a_model_is_split_over_a_part_of_the_ranks_or_all(tiny):
    message = "--tensor-parallel must divide the number of ranks, 1, got 3"
    refused(message, *tiny_options(tiny, "--tensor-parallel", "3"))


@needs_smollm2
@pytest.mark.slow
def test_two_processes_share_the_cache():
    """The command of the README, on CPU so that it runs wherever the tests do."""
    result = under_torchrun(*TOKYO, "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of Japan is Tokyo.\n"
    position = 2 * 30 * 3 * 64 * 4  # K and V, layers, heads, head_dim, fp32
    # 37 tokens of the prompt and up to 20: two pages of 16 on each rank.
    assert cache_bytes(result.stderr) == [2 * 16 * position]
