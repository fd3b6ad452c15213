"""The README's results are what the newest results files say."""

from __future__ import annotations

from benchmarks.distributed import crossover_report
from benchmarks.readme import README, newest_files, section, updated
from benchmarks.results import RESULTS_DIR, Results

from .test_tables import by_hand


def test_readme_is_made_from_the_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert updated(text) == text, "run python -m benchmarks readme"
    text = crossover_report.README.read_text(encoding="utf-8")
    assert crossover_report.updated(text) == text, "run python -m benchmarks readme"


def test_the_plot_is_of_the_newest_decode_run() -> None:
    (newest,) = (
        path for path in newest_files() if path.name.endswith("H100-80GB-HBM3x1_decode.json")
    )
    plot = RESULTS_DIR / "decode.svg"
    assert f"benchmarks/results/{plot.name}" in README.read_text(encoding="utf-8")
    command = f"run python -m benchmarks plot {newest} -o {plot}"
    assert str(Results.load(newest).meta["date"]) in plot.read_text(encoding="utf-8"), command


def test_newest_file_of_each_benchmark_and_machine(tmp_path) -> None:
    names = [
        "20260101T000000Z_H100x1_decode.json",
        "20260102T000000Z_H100x1_decode.json",
        "20260101T000000Z_H200x2_decode.json",
        "20260103T000000Z_H100x1_attention.json",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in newest_files(tmp_path)] == [names[3], names[2], names[1]]


def test_sweeps_and_host_times_are_linked_alone(tmp_path) -> None:
    for name in ("decode", "decode-sweep", "host"):
        by_hand().save(tmp_path / f"20260101T000000Z_H100x1_{name}.json")
    text = section(tmp_path)
    assert text.count("### decode\n") == text.count("Time in a CUDA graph") == 1
    last = text.strip().splitlines()[-1]
    assert last.startswith("More, for")
    assert "_decode-sweep.json" in last
    assert "_host.json" in last
