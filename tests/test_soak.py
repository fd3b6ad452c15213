"""The short form of `make soak`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .interpreting import needs_interpreter


@needs_interpreter
@pytest.mark.parametrize(
    ("work", "calls"), [pytest.param("decode", 5, marks=pytest.mark.slow), ("tp_linear", 10)]
)
def test_a_few_calls(work: str, calls: int) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "tests.soak", work, "--calls", str(calls), "--seed", "3",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    said = f"soak: {calls} calls of {work} on 2 cpu ranks, seed 3, no mismatch and no hang"
    assert said in done.stdout
