"""Everything over the GPUs of one host in one go: the most important first, each run within a time of its own.

    python -m benchmarks suite --gpus 8 [--out DIR] [--limit-s 480] [--only ring,e2e]

Each run is a command of `python -m benchmarks` under a torchrun of its own: one that fails or hangs costs its time, and the
next one begins. DIR holds a results file and a log of each, and `suite.json`, written anew behind every run: what was run, for
how long, and what came of it. Without as many GPUs the runs are tiny, on CPU processes: that shows that all of them work.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..report import bars
from ..results import ROOT, command_line

PASSED, FAILED, TIMED_OUT, NOT_STARTED = "passed", "failed", "timed out", "not started"
#: From being asked to end to being ended: torchrun ends ranks that do not listen after 30 s.
GRACE_S = 35.0
#: What a run that hangs in its last second takes longer still fits into 8 minutes.
LIMIT_S = 8 * 60 - GRACE_S
#: Less than it takes ranks to start: no run begins so late.
START_S = 12.0
#: Lines of a log that are shown where a run fails.
LAST_LINES = 6


class Step(NamedTuple):
    """A run: its name, its limit in seconds, what follows `python -m benchmarks`, and the same on CPUs.

    `{gpus}` is the number of ranks, `{half}` half of it, `{sizes}` the powers
    of two up to it, `{out}` the folder.
    """

    name: str
    limit_s: float
    command: str
    tiny: str


_TINY = "--model tiny-qwen3 --layers 1 --check"
_DECODE, _TINY_DECODE = (
    "--vs nccl",
    "--vs nccl --cases tiny --lengths full --strategies all_gather,push",
)
_SCALING, _ALL = "--case scaling --sizes {sizes}", "--strategy auto,collective,copy_engine,fused"
_REDUCED, _TINY_REDUCED = "--use-allreduce --allreduce-method auto", f"--use-allreduce {_TINY}"
_RING = "--dim 128 --heads 16 --causal --vs-torch --strategy ring,one_sided --no-single --repeats 1"
_TINY_RING = "--dim 16 --heads 2 --causal --backward"
#: Expected on eight GPUs: some 400 s, by what each took on four.
STEPS = (
    Step(
        "correctness", 60, f"dist_decode --case correctness {_DECODE} --cases 'B1 H32/8 N32768,B64'",
        f"dist_decode --case correctness {_TINY_DECODE}",
    ),
    Step(
        "compare", 90, f"dist_decode --case compare {_DECODE} --cases 'B1 H,B64' --repeats 2",
        f"dist_decode --case compare {_TINY_DECODE}",
    ),
    Step(
        "scaling", 50, f"dist_decode {_SCALING} --heads 64 --kv-len 1048576 --repeats 2",
        f"dist_decode {_SCALING} --cases tiny --strategies all_gather",
    ),
    Step("ag_gemm", 40, f"ag_gemm --M 8192 {_ALL} --repeats 2", f"ag_gemm --M 8 {_TINY}"),
    Step("gemm_rs", 40, f"gemm_rs --M 8192 {_ALL} --repeats 2", f"gemm_rs --M 8 {_TINY}"),
    Step("ring 128k", 50, f"ring --seq 131072 --backward {_RING}", f"ring --seq 64 {_TINY_RING}"),
    Step("ring 1M", 70, f"ring --seq 1048576 {_RING}", f"ring --seq 128 {_TINY_RING}"),
    Step(
        "e2e decode", 45, f"e2e --bsz 8 --seq-len 256 --mode decode {_REDUCED} --repeats 2",
        f"e2e --bsz 2 --seq-len 4 --mode decode {_TINY_REDUCED}",
    ),
    Step(
        "e2e prefill", 45, "e2e --bsz 8 --seq-len 256 --mode prefill --repeats 2",
        f"e2e --bsz 2 --seq-len 4 --mode prefill {_TINY}",
    ),
    Step("tp_mlp", 40, "tp_mlp --M 4096 --repeats 2", f"tp_mlp --M 8 {_TINY}"),
    Step(
        "tp_attn", 40, "tp_attn --bsz 32 --seq-len 128 --mode prefill --repeats 2",
        f"tp_attn --bsz 2 --seq-len 4 --mode prefill {_TINY}",
    ),
    Step(
        "shared cache", 60, f"e2e --bsz 1 --seq-len 32768 --mode decode --kv-ranks {{half}} {_REDUCED} --repeats 2",
        f"e2e --bsz 2 --seq-len 4 --mode decode --kv-ranks {{gpus}} {_TINY_REDUCED}",
    ),
    Step("ring 64k", 50, f"ring --seq 65536 --backward {_RING}", f"ring --seq 32 {_TINY_RING}"),
    Step(
        "tp_crossover", 80, "tp_crossover --models Qwen/Qwen3-32B --rows 1,16,128,1024,8192 --repeats 1 "
        "--table {out}/crossovers.json", "tp_crossover --rows 1",
    ),
    Step("tp_mlp, few rows", 40, f"tp_mlp --M 128 {_REDUCED} --repeats 2", f"tp_mlp --M 2 {_TINY_REDUCED}"),
    Step(
        "tp_attn, few rows", 40, f"tp_attn --bsz 128 --seq-len 128 --mode decode {_REDUCED} --repeats 2",
        f"tp_attn --bsz 2 --seq-len 4 --mode decode {_TINY_REDUCED}",
    ),
)  # fmt: skip


class Outcome(NamedTuple):
    """What came of a step."""

    name: str
    command: str
    status: str
    seconds: float
    reason: str = ""


def add_command(names) -> None:
    command = names.add_parser(
        "suite", help="everything over the GPUs of one host, within 8 minutes"
    )
    command.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks, one a GPU")
    command.add_argument("--out", default="build/suite", metavar="DIR", help="folder of what is written (default: %(default)s)")  # fmt: skip
    command.add_argument("--limit-s", type=float, default=LIMIT_S, metavar="S", help="of all of it (default: %(default)g)")  # fmt: skip
    command.add_argument("--only", metavar="A,B", help="parts of names of runs, as suite.json has them")  # fmt: skip
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if options.gpus < 2:
        raise ValueError(f"--gpus must be at least 2, got {options.gpus}")
    if not options.limit_s > 0:
        raise ValueError(f"--limit-s must be above 0, got {options.limit_s:g}")
    chosen = select(options.only)
    import torch

    folder = Path(options.out).resolve()  # runs have another current folder
    folder.mkdir(parents=True, exist_ok=True)
    on_gpus = torch.cuda.device_count() >= options.gpus
    if not on_gpus:
        found = torch.cuda.device_count()
        print(
            f"{found} GPUs for {options.gpus} ranks: tiny shapes on CPU processes, no results",
            file=sys.stderr,
        )
    outcomes = run(chosen, options.gpus, folder, options.limit_s, on_gpus=on_gpus)
    if on_gpus and (judged := bars.table(folder)):
        (folder / "bars.md").write_text(judged + "\n", "utf-8")
        print(f"\nWhat must hold on eight GPUs (bold: it does not):\n\n{judged}")
    return int(any(outcome.status != PASSED for outcome in outcomes))


def select(text: str | None) -> list[Step]:
    """The steps whose names contain one of the comma-separated parts, or all."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    chosen = [step for step in STEPS if not parts or any(part in step.name for part in parts)]
    if not chosen:
        named = ", ".join(step.name for step in STEPS)
        raise ValueError(f"--only must have parts of the names {named}, got {text!r}")
    return chosen


def arguments(step: Step, gpus: int, folder: Path, on_gpus: bool) -> list[str]:
    """What follows `python -m benchmarks` for so many ranks."""
    sizes = ",".join(str(2**i) for i in range(gpus.bit_length()) if 2**i <= gpus)
    text = step.command if on_gpus else f"{step.tiny} --device cpu --repeats 1"
    filled = text.format(
        half=max(1, gpus // 2), gpus=gpus, sizes=sizes, out=shlex.quote(str(folder))
    )
    return [*shlex.split(filled), "--json", str(folder)]


def run(
    steps: Sequence[Step], gpus: int, folder: Path, limit_s: float, *, on_gpus: bool,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:  # fmt: skip
    """Runs the steps one after the other, writes `suite.json` behind each, and prints a line for each."""
    begin, outcomes = clock(), []
    for step in steps:
        left = limit_s - (clock() - begin)
        given = arguments(step, gpus, folder, on_gpus)
        started = clock()
        if left < START_S:
            status, reason = NOT_STARTED, f"{left:.0f} of {limit_s:g} s were left"
        else:
            log = folder / f"{step.name.replace(', ', '-').replace(' ', '-')}.log"
            status, reason = _run_step(given, gpus, log, min(step.limit_s, left))
        outcome = Outcome(
            step.name, command_line(given, gpus), status, round(clock() - started, 1), reason
        )
        outcomes.append(outcome)
        document = {"gpus": gpus, "on_gpus": on_gpus, "limit_s": limit_s}
        document["runs"] = [outcome._asdict() for outcome in outcomes]
        (folder / "suite.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        print(f"{step.name:20}{outcome.status:12}{outcome.seconds:6.1f} s  {reason}", flush=True)
    return outcomes


def _run_step(given: Sequence[str], gpus: int, log: Path, limit_s: float) -> tuple[str, str]:
    """(status, reason) of a run, whose output goes to `log`."""
    from ..ranks import torchrun

    command, environment = torchrun(gpus, given)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return TIMED_OUT, f"its limit was {limit_s:.0f} s"
        except BaseException:  # interrupted: nothing of it goes on
            _end(process)
            raise
    if code == 0:
        return PASSED, ""
    _show_end(log)
    return FAILED, f"exit status {code}: see {log.name}"


def _end(process: subprocess.Popen) -> None:
    """torchrun, asked to end, ends its ranks; killed at once it would leave them behind."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _show_end(log: Path) -> None:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    print("\n".join(f"    {line}" for line in lines[-LAST_LINES:]), file=sys.stderr)
