"""The results section of the README, made from the newest results file of each benchmark.

python -m benchmarks readme            rewrite it
python -m benchmarks readme --check    exit 1 where it is not what the files say
"""

from __future__ import annotations

import re
from pathlib import Path

from .results import RESULTS_DIR, ROOT, Results
from .tables import render_summary

README = ROOT / "README.md"
_SECTION = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->)", re.DOTALL)
# One section each, in this order; a multi-GPU run of a benchmark stands for itself.
_ORDER = ("attention", "decode", "generate")


def newest_files(folder: Path = RESULTS_DIR) -> list[Path]:
    """The newest file of each (benchmark, GPU, count): names begin with the UTC time."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*_*_*.json")):
        newest[path.name.split("_", 1)[1]] = path
    order = {name: index for index, name in enumerate(_ORDER)}
    return sorted(newest.values(), key=lambda path: (order.get(_benchmark(path), 99), path.name))


def section(folder: Path = RESULTS_DIR) -> str:
    parts = []
    for path in newest_files(folder):
        link = f"[`{path.name}`](benchmarks/results/{path.name})"
        parts.append(
            f"### {_benchmark(path)}\n\n{render_summary(Results.load(path))}\nFrom {link}.\n"
        )
    return "\n".join(parts) or "Not measured yet.\n"


def updated(text: str, folder: Path = RESULTS_DIR) -> str:
    """The README's text with its results section made anew."""
    if not _SECTION.search(text):
        raise ValueError(
            "README.md must have <!-- results --> and <!-- end of results -->, got neither"
        )
    return _SECTION.sub(lambda found: f"{found[1]}{section(folder)}{found[2]}", text)


def _benchmark(path: Path) -> str:
    return path.stem.rsplit("_", 1)[1]
