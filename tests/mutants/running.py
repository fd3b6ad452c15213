"""Running the tests on a copy of the tree, with a fault planted in it or none."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests import checkout
from tests.mutants.faults import Fault, Tests

ROOT = Path(__file__).parents[2]
#: Seconds that a run may take: a busy machine needs more.
LIMIT_S = 900


class Outcome(NamedTuple):
    """What came of a run: whether the tests passed, failed, or neither (an error, a time-out), and their last line."""

    verdict: str
    summary: str
    seconds: float


def copy_tree(folder: Path) -> None:
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("torch_fdattn", "tests", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)


def plant(fault: Fault, folder: Path) -> None:
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(
            f"the fault {fault.name!r} must find its text exactly once in {fault.file}, "
            f"got {text.count(fault.old)} times: {fault.old!r}"
        )
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def command(tests: Tests, folder: Path) -> list[str]:
    """pytest, which stops at the first failure; what is slow is not run: `make test` itself must notice."""
    marked = "interpreter and not slow" if tests.interpret and not tests.ranks else "not slow"
    pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.paths, "-m", marked]
    pytest += ["-k", tests.keyword] if tests.keyword else []
    if tests.ranks:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(tests.ranks)]
        logs = ["--log-dir", str(folder / "logs"), "--redirects", "3", "--tee", "0:3"]
        return [*torchrun, *logs, *pytest]
    return [*pytest, "-n", "2"] if tests.interpret else pytest


def can_run(tests: Tests) -> bool:
    """Whether this machine has the GPU that the tests need."""
    import torch

    if not tests.needs_sm_90:
        return True
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def run(tests: Tests, fault: Fault | None = None, limit_s: float = LIMIT_S) -> Outcome:
    """The tests on a copy of the tree, with the fault in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        if fault is not None:
            plant(fault, folder)
        environment = checkout.environment(name, OMP_NUM_THREADS="1")
        environment["TRITON_INTERPRET"] = "1" if tests.interpret else "0"
        start = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, *command(tests, folder)], cwd=folder, env=environment, capture_output=True,
                text=True, timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome("neither", f"no end within {limit_s:g} s", time.monotonic() - start)
    return outcome_of(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def outcome_of(code: int, out: str, err: str, seconds: float) -> Outcome:
    lines = [line for line in out.splitlines() if "passed" in line or "failed" in line]
    summary = (lines or [f"exit code {code}: {err[-200:]}"])[-1]
    # 1: tests failed; 2: the same where pytest-xdist stopped the other worker. No test found (5) or a
    # tree that does not import ("error") is no failure of a test.
    failed = code in (1, 2) and " failed" in summary and " error" not in summary
    return Outcome("passed" if code == 0 else "failed" if failed else "neither", summary, seconds)
