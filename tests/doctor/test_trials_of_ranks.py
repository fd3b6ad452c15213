"""The doctor in several real processes: an all-reduce that works, ranks that do not come, and one
that comes and then stays silent. BOUND, at which a test gives up on a process, is far below torch's
own time-outs of 10 and 30 minutes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import checkout
from tests.ports import free_port
from torch_fdattn.doctor.torchrun import PROBE_SECONDS

TIMEOUT = 6.0
# torch is imported by every process and by its trials, all at once on two busy cores.
START_SECONDS = 60.0
BOUND = PROBE_SECONDS + TIMEOUT + START_SECONDS

WHOLE = """
import sys
from torch_fdattn.doctor import main
sys.exit(main())
"""
IMPATIENT = f"""
import sys
from torch_fdattn import doctor
doctor.try_kernels = lambda *_: []
sys.exit(doctor.main(timeout={TIMEOUT}))
"""
ABSENT = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit(0)
"""
SILENT = """
import os, time
from torch_fdattn.doctor import ranks, torchrun
from torch_fdattn.doctor.machine import inspect
launch, _ = torchrun.check_launch(os.environ, torchrun.real_network())
ranks.join(launch, ranks.own_card(inspect(), launch), 30)
time.sleep(100)
"""


def environment(**variables):
    dropped = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "TRITON_INTERPRET")
    given = checkout.environment()
    kept = {k: v for k, v in given.items() if not any(part in k for part in dropped)}
    # One GPU cannot serve two ranks, and gloo is what is tested here.
    gloo = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **gloo, **variables}


def torchrun(program, *, processes=2, seconds=BOUND, **variables):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--standalone", str(program)]  # torchrun finds a port that stays its own
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment(**variables),
        check=False,
    )


def launched_by_hand(source, rank, port):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(RANK=str(rank), **variables),
    )


def test_all_reduce_of_two_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WHOLE)
    done = torchrun(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok   torchrun    RANK 0 of WORLD_SIZE 2" in done.stdout
    assert "ok   ranks       all 2 ranks met, on 1 machine(s)" in done.stdout
    assert "ok   all-reduce  gloo on cpu: right, 1 MiB" in done.stdout
    assert done.stdout.count("fdattn doctor:") == 1
    assert len(done.stdout.splitlines()) <= 40
    assert "rank 1" not in done.stdout


@pytest.mark.multigpu
def test_all_reduce_of_two_gpus(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WHOLE)
    done = torchrun(program, seconds=180, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok   all-reduce  nccl on cuda:0: right, 1 MiB" in done.stdout


def test_a_missing_rank_under_torchrun_is_named_within_the_bound(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ABSENT + IMPATIENT)
    done = torchrun(program)
    assert done.returncode != 0
    assert "FAIL ranks       1 of 2 ranks did not come within 6 s: 1" in done.stdout
    assert "all-reduce" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, "1 of 2 ranks did not come within 6 s: 1"), (1, "could not be reached within 6 s")],
)
def test_a_rank_launched_alone_by_hand_ends_within_the_bound(rank, message):
    alone = launched_by_hand(IMPATIENT, rank, free_port())
    shown, _ = alone.communicate(timeout=BOUND)
    assert alone.returncode == 1
    assert message in shown


@pytest.mark.slow
def test_a_rank_that_stays_silent_ends_the_all_reduce_within_the_bound():
    port = free_port()
    silent = launched_by_hand(SILENT, 1, port)
    try:
        speaking = launched_by_hand(IMPATIENT, 0, port)
        shown, _ = speaking.communicate(timeout=BOUND)
        assert speaking.returncode == 1
        assert "ok   ranks       all 2 ranks met" in shown
        assert "FAIL all-reduce  gloo on cpu: not done within 6 s:" in shown
    finally:
        silent.kill()
        silent.communicate()
