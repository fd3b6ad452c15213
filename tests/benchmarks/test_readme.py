"""The README's results are what the newest results files say."""

from __future__ import annotations

from benchmarks.readme import README, newest_files, updated


def test_readme_is_made_from_the_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert updated(text) == text, "run python -m benchmarks readme"


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
