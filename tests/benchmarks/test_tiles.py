"""The sweep over tile sizes: `python -m benchmarks attention --block-n 32,64`."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.results import Results


def attention(*words: str) -> int:
    common = ["--device", "cpu", "--cases", "tiny full", "--passes", "forward", "--repeats", "1"]
    return main(["attention", *common, *words])


@pytest.mark.slow
@pytest.mark.interpreter
def test_each_combination_is_an_implementation(kernel_device, tmp_path, capsys) -> None:
    path = tmp_path / "tiles.json"
    tiles = ("--block-n", "32,64", "--block-m", "64")
    assert attention(*tiles, "--device", kernel_device, "--json", str(path)) == 0
    results = Results.load(path)
    names = {row.impl for row in results.rows} - {"matmul"}  # measured beside them on a GPU
    assert names == {"fdattn", "fdattn/m64n32", "fdattn/m64n64"}
    errors = {row.value for row in results.rows if row.metric == "max_abs_err"}
    assert all(0 < error < 1e-2 for error in errors)
    assert not [row for row in results.rows if row.metric == "error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--block-n", "32,48"), "block_n must be a power of two from 16 to 128, got 48"),
        (("--num-warps", "x"), "argument --num-warps: invalid numbers value: 'x'"),
    ],
)
def test_impossible_sizes_are_named(words, message, capsys) -> None:
    with pytest.raises(SystemExit):
        attention(*words)
    assert message in capsys.readouterr().err


def test_tiles_of_no_kernel_are_refused(capsys, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit):
        attention("--block-n", "32,64")
    assert "tile sizes need kernels" in capsys.readouterr().err
