"""A rank that dies or halts, met by ring attention's portable strategies: the others get an exception in time; see
ring_fault_worker.py. What the one-sided strategies do then: test_faults.py.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "ring_fault_worker.py"


def lose_a_rank(fault: str, strategy: str, ranks: int, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), fault, strategy, str(ranks), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" after ") == ranks - 1, done.stdout


COMMUNICATING = "ring", "all_gather", "ulysses", "ulysses_ring", "star"
#: Each fault is among the quick ones.
QUICK = {("kill", "ring"), ("stop", "all_gather"), ("stop", "ring"), ("backward", "ulysses")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    # What "query_split" computes forward needs no other rank.
    for case in (
        *itertools.product(("kill", "stop", "backward"), COMMUNICATING),
        ("backward", "query_split"),
    )
]


@pytest.mark.parametrize(("fault", "strategy"), CASES)
def test_the_other_rank_gets_an_exception(fault: str, strategy: str, tmp_path: Path) -> None:
    lose_a_rank(fault, strategy, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", COMMUNICATING)
def test_seven_others_get_an_exception(strategy: str, tmp_path: Path) -> None:
    lose_a_rank("kill", strategy, 8, tmp_path)
