"""Ranks that die, halt, stay away or come late, met by the one-sided strategies; see fault_worker.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .interpreting import needs_interpreter

WORKER = Path(__file__).parent / "fault_worker.py"
#: The first of each pair is lost among the quick tests.
LINEAR = (
    "gather/copy_engine",
    "gather/fused",
    "scatter/fused",
    "scatter/copy_engine",
    "all_reduce/low_latency",
    "all_reduce/gemm_all_reduce",
)
CASES = [
    pytest.param("kill", "fused", marks=pytest.mark.slow),
    ("stop", "push_tiled"),
    ("kill_in_calls", "two_shot"),
    pytest.param("kill_in_calls", "push", marks=pytest.mark.slow),
    ("absent", "fused,two_shot,symm_all_gather"),
    pytest.param("late", "fused,two_shot,push_tiled", marks=pytest.mark.slow),
    ("kill", ",".join(LINEAR[::2])),
    pytest.param("kill", ",".join(LINEAR[1::2]), marks=pytest.mark.slow),
    *(
        pytest.param(x, ",".join(LINEAR), marks=pytest.mark.slow)
        for x in ("stop", "absent", "late")
    ),
    *(pytest.param("kill_in_calls", x, marks=pytest.mark.slow) for x in LINEAR),
]


#: With four ranks more than one waits for another that waits itself.
OF_FOUR = [("kill", "fused,two_shot,all_reduce/gemm_all_reduce,all_reduce/low_latency")]


def lose_a_rank(fault: str, strategies: str, device: str, folder: Path, ranks: int = 3) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FDATTN_FAULT_DEVICE": device}
    environment["FDATTN_FAULT_RANKS"] = str(ranks)
    environment["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    done = subprocess.run(
        [sys.executable, str(WORKER), fault, strategies, str(folder)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    survivors = ranks if fault == "late" else ranks - 1
    assert done.stdout.count("as it should") == survivors, done.stdout


@needs_interpreter
@pytest.mark.parametrize(("fault", "strategies"), CASES)
def test_survivors_go_on(fault: str, strategies: str, tmp_path: Path) -> None:
    lose_a_rank(fault, strategies, "cpu", tmp_path)


@needs_interpreter
@pytest.mark.parametrize(("fault", "strategies"), OF_FOUR)
def test_three_survivors_go_on(fault: str, strategies: str, tmp_path: Path) -> None:
    lose_a_rank(fault, strategies, "cpu", tmp_path, ranks=4)


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("fault", "strategies", "ranks"),
    [*(pytest.param(*case.values, 3, marks=case.marks) if hasattr(case, "values") else (*case, 3) for case in CASES),
     *((*case, 4) for case in OF_FOUR)],
)  # fmt: skip
def test_survivors_go_on_with_gpus(fault: str, strategies: str, ranks: int, tmp_path: Path) -> None:
    found = torch.cuda.device_count()
    if found < ranks:
        pytest.skip(f"needs {ranks} CUDA devices, found {found}")
    lose_a_rank(fault, strategies, "cuda", tmp_path, ranks)
