"""The short form of `make soak`."""

from __future__ import annotations

import os
import subprocess
import sys

from .interpreting import needs_interpreter


@needs_interpreter
def test_sixteen_calls() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "tests.soak", "--calls", "16",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "soak: 16 calls on 2 cpu ranks, no mismatch and no hang" in done.stdout
