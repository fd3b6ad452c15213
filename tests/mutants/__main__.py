"""Plants faults one by one in a copy of the tree; the suite must fail for each.

    python -m tests.mutants [NAME …]       only the faults whose names contain a word

The unmodified copy must pass first. Prints a table; exits 1 where a fault survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.faults import FAULTS, Fault, Tests

ROOT = Path(__file__).parents[2]
LIMIT_S = 900


def copy_tree(folder: Path) -> None:
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("torch_fdattn", "tests", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)


def run(tests: Tests, folder: Path) -> tuple[int, str]:
    """(exit code, last line) of pytest, which stops at the first failure."""
    pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.paths]
    if tests.interpret and not tests.ranks:
        pytest += ["-m", "interpreter"]
    if tests.ranks:
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(tests.ranks),
        ]
        logs = ["--log-dir", str(folder / "logs"), "--redirects", "3", "--tee", "0:3"]
        pytest = [*launcher, *logs, *pytest]
    elif tests.interpret:
        pytest += ["-n", "2"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = "1" if tests.interpret else "0"
    try:
        done = subprocess.run(
            [sys.executable, *pytest], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"no end within {LIMIT_S} s"
    summary = [line for line in done.stdout.splitlines() if "passed" in line or "failed" in line]
    return done.returncode, (summary or [done.stderr[-200:]])[-1]


def plant(fault: Fault, folder: Path) -> None:
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(
            f"the fault {fault.name!r} must find its text exactly once in {fault.file}, "
            f"got {text.count(fault.old)} times: {fault.old!r}"
        )
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def main(words: Sequence[str]) -> int:
    faults = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    if not faults:
        print(f"no fault's name contains any of {list(words)}")
        return 2
    survived = 0
    with tempfile.TemporaryDirectory() as whole:
        copy_tree(Path(whole))
        for tests in dict.fromkeys(fault.tests for fault in faults):
            code, summary = run(tests, Path(whole))
            print(f"{'unmodified: ' + tests.name:44} {summary}", flush=True)
            if code:
                print("the unmodified tree must pass")
                return 1
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            copy_tree(Path(folder))
            plant(fault, Path(folder))
            start = time.monotonic()
            code, summary = run(fault.tests, Path(folder))
        # 1: tests failed; 2: the same where pytest-xdist stopped the other worker. No test found (5) or a
        # tree that does not import ("error") is no catch.
        caught = code in (1, 2) and " failed" in summary and " error" not in summary
        survived += not caught
        seconds = time.monotonic() - start
        end = "caught" if caught else f"SURVIVED ({code}: {summary})"
        print(f"{fault.name:44} {end} in {seconds:.0f} s", flush=True)
    print(f"{len(faults) - survived} faults caught, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
