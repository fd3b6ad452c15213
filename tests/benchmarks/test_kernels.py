"""The pure-read kernel, and the sweep of attention configs, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.decode_inputs import flat_bytes, make_inputs
from benchmarks.floors import READ_CONFIGS, pure_read
from benchmarks.runner import Budget
from benchmarks.shapes import AttentionCase, DecodeCase
from benchmarks.sweep_attention import (
    KERNELS,
    Problem,
    problem,
    sweep,
)
from benchmarks.timing import Timer
from torch_fdattn.ops.attention.candidates import parse_configs
from torch_fdattn.ops.attention.configs import TileConfig

from .test_timing import Clock

CPU = torch.device("cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("config", READ_CONFIGS, ids=str)
@pytest.mark.parametrize("words", [1, 1024, 5000])
def test_pure_read_reads_every_word_once(kernel_device: str, config, words: int) -> None:
    k, v = (torch.randint(-100, 100, (words,), dtype=torch.int32) for _ in range(2))
    sums = pure_read(k.to(kernel_device), v.to(kernel_device), config)()
    assert sums.sum().item() == k.sum().item() + v.sum().item()


@pytest.mark.interpreter
def test_pure_read_of_a_paged_ragged_cache(kernel_device: str) -> None:
    case = DecodeCase(3, 2, 1, 40, 16, "fp16", page=8, ragged="uniform")
    ((k, v),) = flat_bytes(case, make_inputs(case, torch.device(kernel_device), 1))
    assert k.numel() + v.numel() == case.kv_bytes
    words = [x.view(torch.int32).random_(-100, 100) for x in (k, v)]
    sums = pure_read(k, v, READ_CONFIGS[0])()
    assert sums.sum().item() == sum(x.sum().item() for x in words)


def test_pure_read_refuses_views() -> None:
    k = torch.zeros(4, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k and v must be contiguous and of one size, got shape"):
        pure_read(k[:, ::2], k[:, ::2], READ_CONFIGS[0])


def test_parse_configs() -> None:
    assert parse_configs("128x64w8s3, 64x32w4s2") == [
        TileConfig(128, 64, 8, 3),
        TileConfig(64, 32, 4, 2),
    ]
    assert str(TileConfig(128, 64, 8, 3)) == "128x64w8s3"
    with pytest.raises(ValueError, match="config must look like 128x64w8s3, got '128x64'"):
        parse_configs("128x64")


def test_sweep_ranks_checks_and_explains() -> None:
    """Configs with known times, one that does not fit, one that computes something else."""
    clock = Clock()
    out = torch.zeros(4)
    times = {128: 50.0, 64: 30.0, 32: 10.0, 16: 1.0}

    def launch(config: TileConfig) -> None:
        if config.block_m == 256:
            raise RuntimeError("out of resource: shared memory")
        out.fill_(1.0 if config.block_m != 16 else 1.5)
        clock.now += 1e-6 * times[config.block_m]

    default = TileConfig(128, 64, 8, 3)
    given = Problem(1e6, default, launch, (out,), overhead_us=5.0)
    configs = [dataclasses.replace(default, block_m=m) for m in (16, 32, 64, 128, 256)]
    measured, rejected = sweep(given, configs, Timer(CPU, clock), 1, Budget(None))

    assert [(m.config.block_m, round(m.us, 6)) for m in measured] == [(32, 5), (64, 25), (128, 45)]
    assert measured[0].rate == pytest.approx(1e6 / 5 / 1e6)
    reasons = {config.block_m: reason for config, reason in rejected.items()}
    assert reasons[256] == "RuntimeError: out of resource: shared memory"
    assert reasons[16].startswith("wrong result: differs from the default's by 0.5")

    measured, rejected = sweep(given, configs, Timer(CPU, clock), 1, Budget(0.0))
    assert not measured
    assert rejected[default] == "not measured: budget of 0 s was spent"


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", KERNELS)
def test_sweep_calls_the_real_kernels(kernel_device: str, kernel: str) -> None:
    case = AttentionCase("tiny", 1, 2, 1, 40, 16, True, "fp32")
    timer = Timer(torch.device(kernel_device))
    with problem(kernel, case, timer) as given:
        configs = parse_configs("16x32w4s1")
        measured, rejected = sweep(given, configs, timer, 1, Budget(None))
    assert not rejected
    assert {m.config for m in measured} == {given.default, *configs}
