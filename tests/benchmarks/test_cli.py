"""The command line, through to files, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import _parser, main
from benchmarks.registry import BENCHMARKS
from benchmarks.results import RESULTS_DIR, Results

ROOT = Path(__file__).resolve().parents[2]


def test_attention_runs_from_the_shell(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "attention", "--device", "cpu", "--cases", "tiny",
         "--vs", "eager,cudnn", "--json", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("_cpux1_attention.json")
    results = Results.load(file)
    assert results.meta["gpu"] == "cpu"
    assert str(tmp_path.parent) not in str(results.meta["command"])
    found = {(row.impl, row.metric) for row in results.rows}
    for impl in ("fdattn", "eager"):
        assert {(impl, "fwd_TFLOPs"), (impl, "bwd_TFLOPs"), (impl, "max_abs_err")} <= found
    assert ("cudnn", "error") in found
    assert "is not a result" in done.stdout
    assert "not available: needs a CUDA device" in done.stdout


def test_a_cpu_run_is_not_written_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(RESULTS_DIR.glob("*"))
    assert main(["decode", "--device", "cpu", "--vs", "eager", "--repeats", "1"]) == 0
    assert "Not written: figures from a CPU are not results" in capsys.readouterr().out
    assert set(RESULTS_DIR.glob("*")) == before


def test_table_compare_and_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "run.json")
    options = ["--device", "cpu", "--vs", "eager", "--repeats", "1", "--json", file]
    assert main(["decode", *options]) == 0
    printed = capsys.readouterr().out
    assert main(["table", file]) == 0
    assert printed.startswith(capsys.readouterr().out)
    assert main(["compare", file, file]) == 0
    assert "1.00×" in capsys.readouterr().out
    assert main(["html", file, "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    capsys.readouterr()
    assert main(["list", "attention"]) == 0
    assert "B4 H16/16 N4096 D128 causal bf16" in capsys.readouterr().out
    assert main(["list", "decode", "--sweep", "dtype"]) == 0
    assert "B16 H32/8 N4096 D128 bf16 kv-fp8" in capsys.readouterr().out


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from .test_tables import results

    decode = results(
        [
            (f"B{b} H32/8 N{n} D128 bf16", impl, "GBps", 1000.0 + n / 100)
            for b, lengths in ((1, (32768, 1024, 4096)), (8, (1024,)))
            for n in lengths
            for impl in ("fdattn", "cudnn", "pure_read")
        ]
    )
    decode.save(tmp_path / "decode.json")
    assert main(["plot", str(tmp_path / "decode.json")]) == 0
    assert (tmp_path / "decode.svg").read_text(encoding="utf-8").startswith("<?xml")

    assert main(["plot", str(tmp_path / "decode.json"), "-o", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 1000
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path / "decode.json"), "--axis", "page"])
    assert "--axis must be of length for this file, got 'page'" in capsys.readouterr().err

    prefill = results(
        [("B4 H16/16 N4096 D128 causal bf16", "fdattn", "fwd_TFLOPs", 500.0)]
    )  # fmt: skip
    prefill.save(tmp_path / "prefill.json")
    assert main(["plot", str(tmp_path / "prefill.json"), "-o", str(tmp_path / "bars.png")]) == 0
    assert (tmp_path / "bars.png").stat().st_size > 1000
    capsys.readouterr()


def test_every_axis_of_a_sweep_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.cases import SWEEPS, swept
    from benchmarks.report.plot import inline_svg, plot, plottable

    from .test_tables import results

    sweep = results(
        [
            (case.name, impl, "GBps", 1000.0 + i)
            for i, case in enumerate(swept("all"))
            for impl in ("fdattn", "cudnn", "pure_read")
            if not case.tiny and not (case.page and impl == "cudnn")  # a peer with gaps
        ]
    )
    assert plottable(sweep) == list(SWEEPS)
    for axis in SWEEPS:
        svg = inline_svg(sweep, axis)
        assert svg.startswith("<svg")
        assert "<metadata" not in svg
    assert plot(sweep, tmp_path / "page.svg", "page").stat().st_size > 1000
    assert plottable(results([])) == []


def test_the_plotted_series_is_the_longest() -> None:
    from benchmarks.report.plot import longest_series

    names = [
        "B8 H32/8 N1024 D128 bf16",
        "B1 H32/8 N4096 D128 bf16",
        "B1 H32/8 N1024 D128 bf16",
        "B1 H32/32 N32768 D128 bf16",
    ]
    assert [case for case, _ in longest_series(names)] == [names[2], names[1]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["attention", "--device", "cpu", "--cases", "hd128 4k"],
            "--cases must match one of [tiny",
        ),
        (["attention", "--device", "cpu", "--vs", "fa9"], "--vs must name peers of"),
        (["attention", "--device", "cpu", "--passes", "sideways"], "--passes must be of forward"),
        (["decode", "--device", "cpu", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["table", "no-such-file.json"], "No such file"),
        (["decode", "--device", "cpu", "--sweep", "size"], "--sweep must name axes of length"),
        (
            ["list", "attention", "--sweep"],
            "--sweep must be given for decode, got it for attention",
        ),
        (["sideways"], "invalid choice: 'sideways'"),
    ],
)
def test_wrong_commands(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_every_benchmark_makes_a_page() -> None:
    names = next(a for a in _parser()._actions if isinstance(a.choices, dict)).choices
    tools = {"list", "table", "html", "compare", "plot", "scaling", "serve", "readme", "suite"}
    assert set(names) - tools == {*BENCHMARKS, "ladder", "resources", "train"}
    for name in set(names) - tools:
        assert "--html PATH" in names[name].format_help()


def test_showing_results_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; "
        "from benchmarks.__main__ import main; sys.exit(main(['list', 'decode']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
