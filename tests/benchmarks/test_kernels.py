"""The pure-read kernel, and the sweep of attention configs, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.decode_inputs import flat_bytes, make_inputs
from benchmarks.floors import READ_CONFIGS, pure_read
from benchmarks.report.tables import values_of
from benchmarks.results import Results
from benchmarks.shapes import DecodeCase
from benchmarks.sweep_attention import Problem, sweep, table
from benchmarks.timing import Timer
from torch_fdattn.ops.attention.candidates import parse_configs
from torch_fdattn.ops.attention.configs import TileConfig

from .test_runner import rows, run_with
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


def test_sweep_checks_and_explains() -> None:
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
    run = run_with(timer=Timer(CPU, clock))
    sweep(run, "case", given, configs, 1)
    rates = values_of(run.recorder.results, "TFLOPs_per_gpu")["case"]
    expected = {"fdattn": 45, "fdattn/64x64w8s3": 25, "fdattn/32x64w8s3": 5}
    assert rates == {name: pytest.approx(1 / us, rel=1e-4) for name, us in expected.items()}
    lines = table(run.recorder.results).splitlines()
    found = [line.split()[1] for line in lines if line.endswith(("9.00 |", "1.80 |", "1.00 |"))]
    assert found == ["32x64w8s3", "64x64w8s3", "default"]
    (wrong,) = rows(run, "fdattn/16x64w8s3", "error")
    assert "wrong result: differs from the default's by 0.5" in wrong.value
    (large,) = rows(run, "fdattn/256x64w8s3", "error")
    assert large.value == "first call: RuntimeError: out of resource: shared memory"


@pytest.mark.slow
@pytest.mark.interpreter
def test_sweep_calls_the_real_kernels(kernel_device: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    words = f"--device {kernel_device} --cases tiny --configs 16x32w4s1 --repeats 1 --json {path}"
    assert main(["sweep_attention", *words.split()]) == 0
    results = Results.load(path)
    assert not [row for row in results.rows if row.metric in ("error", "not_measured")]
    found = values_of(results, "TFLOPs_per_gpu")
    assert {case.split()[-1] for case in found} == {"forward", "dkdv", "dq"}
    assert all(set(rates) == {"fdattn", "fdattn/16x32w4s1"} for rates in found.values())


def test_wrong_kernels_are_named(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["sweep_attention", "--device", "cpu", "--kernels", "dv"])
    assert "--kernels must be of forward, dkdv, dq, got dv" in capsys.readouterr().err
