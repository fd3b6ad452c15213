"""The results file: its schema, where it is written, and what is known about the run it came from.

One run, one file: `{"meta": {gpu, count, torch, triton, commit, command, date}, "rows": [{"case",
"impl", "metric", "value", "unit"}]}`. Values are numbers, except that a row with the metric `error`
or `not_measured` carries the reason as text: an implementation that was asked for always has a row.
Needs no torch, so that tables and comparisons work anywhere.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .metrics import SPREAD_SUFFIX, TEXT_METRICS, metric_named

if TYPE_CHECKING:
    import torch

META_KEYS = ("gpu", "count", "torch", "triton", "commit", "command", "date")
ROW_KEYS = ("case", "impl", "metric", "value", "unit")
NO_GPU = "none"  # meta.gpu of what was compiled only
STOPPED = "the run was stopped before this case's end"
#: What implementations were called when older files were measured, by what they are called now.
RENAMED = {"fdattn/gemm_epilogue": "fdattn/gemm_all_reduce", "fdattn_fp8": "fdattn/fp8"}
DATE_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
ROOT = Path(__file__).resolve().parent.parent
RESULTS_DIR = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Row:
    case: str
    impl: str
    metric: str
    value: float | str
    unit: str


@dataclass
class Results:
    """One run: what it ran on and its rows."""

    meta: dict[str, object]
    rows: list[Row] = field(default_factory=list)

    def to_json(self) -> str:
        document = {"meta": self.meta, "rows": [asdict(row) for row in self.rows]}
        validate(document)
        return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        document = json.loads(text)
        validate(document)
        rows = (row | {"impl": RENAMED.get(row["impl"], row["impl"])} for row in document["rows"])
        return cls(document["meta"], [Row(**row) for row in rows])

    @classmethod
    def load(cls, path: str | Path) -> Results:
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all: a run may be stopped at any moment."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(path)


def validate(document: object) -> None:
    """Raise ValueError, saying where, unless `document` has the schema exactly."""
    if not isinstance(document, dict) or sorted(document) != ["meta", "rows"]:
        raise ValueError(f"results must have the keys meta and rows, got {_keys(document)}")
    meta, rows = document["meta"], document["rows"]
    if not isinstance(meta, dict) or sorted(meta) != sorted(META_KEYS):
        raise ValueError(f"meta must have the keys {list(META_KEYS)}, got {_keys(meta)}")
    for key, value in meta.items():
        expected = int if key == "count" else str
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ValueError(f"meta.{key} must be {expected.__name__}, got {value!r}")
    try:
        datetime.datetime.strptime(meta["date"], DATE_FORMAT)
    except ValueError:
        raise ValueError(
            f"meta.date must be UTC like 2026-01-31T23:59:59Z, got {meta['date']!r}"
        ) from None
    if not isinstance(rows, list):
        raise ValueError(f"rows must be a list, got {type(rows).__name__}")
    for i, row in enumerate(rows):
        _validate_row(f"rows[{i}]", row)


def _validate_row(where: str, row: object) -> None:
    if not isinstance(row, dict) or sorted(row) != sorted(ROW_KEYS):
        raise ValueError(f"{where} must have the keys {list(ROW_KEYS)}, got {_keys(row)}")
    for key in ("case", "impl", "metric", "unit"):
        if not isinstance(row[key], str) or not row[key]:
            raise ValueError(f"{where}.{key} must be a non-empty string, got {row[key]!r}")
    value, metric = row["value"], row["metric"]
    if metric in TEXT_METRICS:
        if not isinstance(value, str) or row["unit"] != "text":
            raise ValueError(f"{where} must have a text value and the unit 'text', got {row!r}")
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ValueError(f"{where}.value must be a finite number, got {value!r}")
    unit = metric_named(metric).unit
    if row["unit"] != unit:
        raise ValueError(f"{where}.unit must be {unit!r} for {metric}, got {row['unit']!r}")


def _keys(value: object) -> object:
    return sorted(value) if isinstance(value, dict) else type(value).__name__


class Recorder:
    """Collects a run's rows and writes them after every case."""

    def __init__(self, results: Results, path: Path | None) -> None:
        self.results = results
        self.path = path
        #: (case, implementation) of what is still to come: what a file says of it if the run is stopped.
        self._ahead: list[tuple[str, str]] = []

    def expect(self, cases: Iterable[str], impls: Sequence[str]) -> None:
        """Cases that the run means to measure; `came` takes each back."""
        self._ahead += [(case, impl) for case in cases for impl in impls]

    def came(self, case: str, impl: str | None = None) -> None:
        """impl: this one alone."""
        self._ahead = [
            pair for pair in self._ahead if pair[0] != case or impl not in (None, pair[1])
        ]

    def add(self, case: str, impl: str, metric: str, value: float) -> None:
        value = float(value)
        if not math.isfinite(value):
            self.error(case, impl, f"{metric}: measured {value}")
            return
        # Six digits are more than any clock here resolves; the rest would be noise in the file.
        rounded = float(f"{value:.6g}")
        self.results.rows.append(Row(case, impl, metric, rounded, metric_named(metric).unit))

    def add_sample(self, case: str, impl: str, metric: str, value: float, spread: float) -> None:
        """A median and the spread of its repeats (a fraction, stored in percent)."""
        self.add(case, impl, metric, value)
        self.add(case, impl, metric + SPREAD_SUFFIX, 100 * spread)

    def error(self, case: str, impl: str, reason: str) -> None:
        self.results.rows.append(Row(case, impl, "error", reason, "text"))

    def not_measured(self, case: str, impl: str, reason: str) -> None:
        self.results.rows.append(Row(case, impl, "not_measured", reason, "text"))

    @contextlib.contextmanager
    def guard(
        self, case: str, impl: str, step: str, check: Callable[[BaseException], None]
    ) -> Iterator[None]:
        """Turn a failure inside into an error row; `check` raises where nothing can go on."""
        try:
            yield
        except Exception as failure:
            self.error(case, impl, f"{step}: {describe(failure)}")
            check(failure)

    def save(self) -> None:
        if self.path is not None:
            said = {(row.case, row.impl) for row in self.results.rows if row.metric in TEXT_METRICS}
            ahead = [pair for pair in self._ahead if pair not in said]
            missing = [Row(*pair, "not_measured", STOPPED, "text") for pair in ahead]
            Results(self.results.meta, self.results.rows + missing).save(self.path)


def describe(failure: BaseException) -> str:
    """An exception in one line that fits a table."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    text = f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
    return text if len(text) <= 240 else text[:237] + "..."


def commit(root: Path = ROOT) -> str:
    """The commit measured, marked when the tree differs from it.

    TORCH_FDATTN_COMMIT goes first: it says what sources are that were copied without their repository.
    """
    if given := os.environ.get("TORCH_FDATTN_COMMIT"):
        return given
    top = _git(root, "rev-parse", "--show-toplevel")
    head = _git(root, "rev-parse", "--short", "HEAD")
    if top is None or head is None or Path(top).resolve() != root.resolve():
        return "unknown"
    # New result files are what a run leaves behind, not a change of what it measures.
    written = (":(exclude)benchmarks/results", ":(exclude)*_results.json")
    changed = _git(root, "status", "--porcelain", "--", ".", *written)
    return head + ("" if changed == "" else "+dirty")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def command_line(arguments: Sequence[str], count: int = 1, mpi: bool = False) -> str:
    """The command to repeat the run, over ranks that torchrun or mpirun started; folders of this machine
    are left out of it.
    """
    parts: list[str] = []
    for word in arguments:
        option, equals, value = word.partition("=")
        if os.path.isabs(word):
            word = os.path.basename(word.rstrip("/"))
        elif equals and os.path.isabs(value):
            word = f"{option}={os.path.basename(value.rstrip('/'))}"
        parts.append(word)
    program = f"torchrun --nproc-per-node {count}" if count > 1 else "python"
    if mpi:
        program = f"mpirun -np {count} python"
    return f"{program} -m benchmarks {shlex.join(parts)}"


def collect_meta(
    arguments: Sequence[str], device: torch.device, count: int = 1, mpi: bool = False
) -> dict[str, object]:
    """What a number needs beside it to be a result."""
    import torch

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "gpu": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "count": count,
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit(),
        "command": command_line(arguments, count, mpi),
        "date": datetime.datetime.now(datetime.UTC).strftime(DATE_FORMAT),
    }


def file_name(meta: dict[str, object], name: str) -> str:
    """`<UTC date-time>_<gpu>x<count>_<name>.json`."""
    when = datetime.datetime.strptime(str(meta["date"]), DATE_FORMAT).strftime("%Y%m%dT%H%M%SZ")
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", str(meta["gpu"]).removeprefix("NVIDIA ")).strip("-")
    return f"{when}_{gpu}x{meta['count']}_{name}.json"


def newest(folder: Path = RESULTS_DIR, pattern: str = "*_*_*.json") -> list[Path]:
    """The newest file of each (GPU, count, benchmark), by these: names begin with the UTC time."""
    found = {path.name.split("_", 1)[1]: path for path in sorted(folder.glob(pattern))}
    return [found[name] for name in sorted(found)]


def output_path(asked: str | None, meta: dict[str, object], name: str) -> Path | None:
    """Where a run is written: the file or folder asked for, else `benchmarks/results`.

    None for a CPU unless asked for: its figures are not results.
    """
    if asked is not None:
        path = Path(asked)
        return path / file_name(meta, name) if path.is_dir() else path
    return None if meta["gpu"] == "cpu" else RESULTS_DIR / file_name(meta, name)
