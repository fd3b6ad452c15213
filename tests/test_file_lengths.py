"""No file of Python, and no page, is longer than what one reads at a sitting."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 400


@pytest.mark.parametrize("folder", ["torch_fdattn", "tests", "benchmarks", "examples", "tools"])
def test_no_file_is_longer_than_the_limit(folder: str) -> None:
    lines = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".html")
    }
    assert lines
    assert not {name: count for name, count in lines.items() if count > LIMIT}
