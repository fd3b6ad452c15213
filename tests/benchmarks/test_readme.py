"""The generated parts of README.md and docs/performance.md are what the newest results files say."""

from __future__ import annotations

import pytest

from benchmarks.report import summary
from benchmarks.report.documents import documents, newest_files, section
from benchmarks.results import RESULTS_DIR, ROOT, Results, Row

from .test_tables import by_hand


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_are_made_from_the_results(path) -> None:
    text = path.read_text(encoding="utf-8")
    assert documents()[path](text) == text, "run python -m benchmarks readme"


def test_every_subject_of_the_summary_was_measured() -> None:
    text = summary.section()
    for subject in summary.SUBJECTS:
        assert f"| {subject.title} | ours | fastest peer | speed-up |" in text
        for rows in subject.rows:
            assert f"_{rows.file}.json" in text


def test_the_summary_compares_with_the_fastest_peer(tmp_path, monkeypatch) -> None:
    """Floors and others of ours are no peers; a tie is not bold."""
    rows = {"fdattn": 10.0, "fdattn/two": 5.0, "local": 1.0, "slow": 20.0, "fast": 8.0}
    made = by_hand()
    made.rows = [Row("case", x, "graph_us", us, "us") for x, us in rows.items()]
    made.rows += [Row("tie", x, "graph_us", us, "us") for x, us in (("fdattn", 10.0), ("a", 9.99))]
    made.save(tmp_path / "20260101T000000Z_H100x1_decode.json")
    subject = summary.Subject("Decode, µs", (summary.Rows("H100x1_decode", "graph_us", "graph"),))
    monkeypatch.setattr(summary, "SUBJECTS", (subject,))
    text = summary.section(tmp_path)
    assert "| graph case | 10.0 | 8.00 fast | **0.80×** |" in text
    assert "| graph tie | 10.0 | 9.99 a | 1.00× |" in text
    assert "[data](benchmarks/results/20260101T000000Z_H100x1_decode.json)" in text
    assert summary.section(tmp_path / "none") == "Not measured yet.\n"


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        ("decode", ("README.md", "docs/performance.md")),
        ("attention", ("README.md", "docs/performance.md")),
        ("train-gpt", ("docs/performance.md", "examples/training_curves/README.md")),
        ("train-t5", ("docs/performance.md", "examples/training_curves/README.md")),
    ],
)
def test_plots_are_of_the_newest_run(name: str, documents: tuple[str, ...]) -> None:
    newest = max(path for path in newest_files() if path.name.endswith(f"x1_{name}.json"))
    plot, meta = RESULTS_DIR / f"{name}.svg", Results.load(newest).meta
    command = f"run python -m benchmarks plot {newest} -o {plot}"
    assert str(meta["date"]) in plot.read_text(encoding="utf-8"), command
    for document in documents:
        text = (ROOT / document).read_text(encoding="utf-8")
        assert f"benchmarks/results/{plot.name}" in text
        if document == "README.md":
            assert f"commit {meta['commit']}, {meta['date'][:10]}" in text


def test_plots_are_small() -> None:
    assert all(path.stat().st_size < 64_000 for path in RESULTS_DIR.glob("*.svg"))


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
