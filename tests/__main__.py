"""Runs the layers of the suite one after the other and adds up what ran.

    python -m tests cpu | slow | gpu | multigpu

Each layer is a process of its own, since TRITON_INTERPRET must be set before torch_fdattn is imported and
the distributed tests run under torchrun. The last line counts all tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Layer:
    """One run of pytest; `ranks` > 0 runs it under torchrun."""

    name: str
    arguments: tuple[str, ...]
    ranks: int = 0
    environment: dict[str, str] = field(default_factory=dict)


INTERPRET = {"TRITON_INTERPRET": "1"}
#: Reasons to skip that follow from the kind of run. Anything else, a missing package above all, is a check
#: that was not made, and fails the layer.
EXPECTED_SKIPS = re.compile(
    r"""(^|Skipped:\ |:\ )(
        needs\ a\ CUDA\ device | needs\ \d+\ CUDA\ devices,\ found\ \d+ | needs\ \d+\ ranks(:\ .*)?
        | needs\ \d+\ GiB\ of\ free\ GPU\ memory,\ found\ \d+
        | tests\ a\ kernel:\ needs\ a\ CUDA\ device\ or\ TRITON_INTERPRET=1
        | compiles\ kernels,\ which\ the\ interpreter\ replaces | the\ interpreter\ has\ no\ bfloat16
        | float64\ runs\ on\ the\ CPU\ only | of\ memory\ that\ CPU\ processes\ share | a\ process\ group\ exists | another\ ptxas\ may\ be\ right
        | torch\ 2\.11\ crashes\ while\ it\ loads\ an\ AOTInductor\ package\ on\ CUDA
        | triton\ 3\.6.*'s\ interpreter\ breaks\ on\ numpy\ .*
    )('\))?$""",
    re.VERBOSE,
)
_NOT_DISTRIBUTED = ("tests", "--ignore=tests/dist")
_PARALLEL = ("-n", "2", "--dist", "worksteal")
#: `cpu` is to take less than 25 minutes on two processors: what it leaves out, `slow` and `gpu` run.
_QUICK = ("-m", "not slow")
#: Tests of several busy processes each: side by side they take longer than one after the other.
_PROCESSES = (
    "tests/engine/test_ranks.py",
    "tests/engine/test_mesh.py",
    "tests/benchmarks/test_distributed.py",
    "tests/benchmarks/test_tp_ways.py",
    "tests/test_faults.py",
    "tests/test_soak.py",
)


#: Whole layers compiled, which every rank does for itself: two of them show that ranks do not mix their graphs.
COMPILED = "test_compiles_into_one_graph or test_compiles_whole"


#: What Inductor makes of a graph is the same for all strategies but their names.
INDUCED = "through_inductor and (fused or low_latency)"


def distributed(ranks: int, *names: str, only: str = "", marked: str = "") -> Layer:
    """The distributed tests, or the files of these names alone; `only` is pytest's -k, `marked` its -m."""
    files = tuple(f"tests/dist/test_{name}.py" for name in names) or ("tests/dist",)
    chosen = (*(("-k", only) if only else ()), *(("-m", marked) if marked else ()))
    return Layer(f"distributed, {ranks} ranks", (*files, *chosen), ranks)


def one_sided(ranks: int, *files: str, only: str = "") -> Layer:
    """The tests of the one-sided exchanges, whose kernels are interpreted; `only` is pytest's -k."""
    chosen = tuple(f"tests/dist/test_{file}.py" for file in files)
    return Layer(
        f"one-sided, {ranks} ranks", (*chosen, *(("-k", only) if only else ())), ranks, INTERPRET
    )


def layers(kind: str) -> list[Layer]:
    if kind == "cpu":
        return [
            # Three on two processors: many of these wait, for processes and time-outs.
            Layer(
                "CPU",
                (
                    *_NOT_DISTRIBUTED,
                    *(f"--ignore={file}" for file in _PROCESSES),
                    *("-n", "3", "--dist", "worksteal"),
                    *_QUICK,
                ),
            ),
            Layer("CPU, several processes", (*_PROCESSES, *_QUICK)),
            Layer(
                "interpreter",
                (*_NOT_DISTRIBUTED, *_PARALLEL, "-m", "interpreter and not slow"),
                0,
                INTERPRET,
            ),
            distributed(2, marked="not slow"),
            # What does not divide by three: heads, rows, positions.
            distributed(
                3,
                "ring_attention",
                "decode",
                "tp_linear",
                "compiled_matmuls",
                "kv_cache",
                "agreement",
                only=f"not ({COMPILED} or through_inductor)",
                marked="not slow",
            ),
            # The two-dimensional mesh, ranks beyond KV heads; and one rank, where nothing is split.
            distributed(
                4,
                "ring_attention",
                "parallelize",
                "tp_layers",
                "kv_cache",
                "engine",
                only=f"not ({COMPILED} or test_drawn)",
            ),
            distributed(1, "ring_attention", only=f"not ({COMPILED})"),
            one_sided(
                2,
                "one_sided",
                "strategies",
                "signals",
                "fused_parts",
                "tp_one_sided",
                "tp_failures",
                "row_norm",
                "known_mlp",
                "gathered_swiglu",
                "float8_weights",
                "compiled_matmuls",
                only=f"not ({INDUCED})",
            ),
            one_sided(3, "lamport_two_shot"),
            # More than one peer to wait for, overlapping groups; shares that do not divide.
            one_sided(
                3,
                "one_sided",
                "strategies",
                "fused_parts",
                "tp_one_sided",
                "row_norm",
                only="test_one_launch or test_overlapping or test_rows_that_do_not_divide or test_uneven or test_ranks_that_merge or test_a_rank or choose_alike",
            ),
        ]
    if kind == "slow":
        slow = (*_NOT_DISTRIBUTED, *_PARALLEL, "-m")
        return [
            Layer("CPU, slow", (*slow, "slow and not interpreter")),
            Layer("interpreter, slow", (*slow, "slow and interpreter"), 0, INTERPRET),
            distributed(2, marked="slow"),
            one_sided(2, "compiled_matmuls", only=INDUCED),
            distributed(3, "compiled_matmuls", only="through_inductor"),
            *(distributed(ranks, only=COMPILED) for ranks in (3, 4)),
            distributed(4, "context_parallel"),
            distributed(4, "ring_attention", only="test_drawn"),
            distributed(3, "tp_layers", "parallelize"),
            distributed(1, "tp_layers", "tp_linear", "parallelize"),
        ]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "gpu":
        if not gpus:
            sys.exit("gpu needs a CUDA device, found none")
        return [Layer("GPU", (*_NOT_DISTRIBUTED, "-n", str(min(8, os.cpu_count() or 1))))]
    if kind == "multigpu":
        if gpus < 2:
            sys.exit(f"multigpu needs 2 CUDA devices or more, found {gpus}")
        return [
            Layer("several GPUs, one process", (*_NOT_DISTRIBUTED, "-m", "multigpu")),
            *(distributed(ranks) for ranks in (2, 4, 8) if ranks <= gpus),
        ]
    sys.exit(f"usage: python -m tests cpu|slow|gpu|multigpu, got {kind!r}")


def run(layer: Layer, folder: Path) -> tuple[int, dict[str, int]]:
    """(exit code, counts) of one layer; under torchrun those of rank 0."""
    report = folder / "report.xml"
    launcher: list[str] = []
    if layer.ranks:
        # Rank 0's output is shown (and only rank 0 writes the report), the others' stays in the logs.
        launcher = [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layer.ranks),
            "--log-dir", str(folder / "logs"), "--redirects", "3", "--tee", "0:3",
        ]  # fmt: skip
    pytest = ["-m", "pytest", "-q", *layer.arguments, f"--junitxml={report}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **layer.environment}
    code = subprocess.run(
        [sys.executable, *launcher, *pytest], env=environment, check=False
    ).returncode
    if not report.exists():
        return code or 1, {}
    suite = ET.parse(report).getroot().find("testsuite")
    counts = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    # The reason of a module skipped as a whole stands in the text alone.
    reasons = {(x.text or x.attrib.get("message", "")).strip() for x in suite.iter("skipped")}
    unexpected = {reason for reason in reasons if not EXPECTED_SKIPS.search(reason)}
    for reason in sorted(unexpected):
        print(f"a check was skipped that this machine should make: {reason}")
    return code or int(bool(unexpected)), counts


def main() -> int:
    chosen = layers(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    rows, totals, failed = [], {"passed": 0, "failed": 0, "skipped": 0}, False
    for layer in chosen:
        print(f"\n=== {layer.name}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            code, counts = run(layer, Path(folder))
        wrong = counts.get("failures", 0) + counts.get("errors", 0)
        skipped = counts.get("skipped", 0)
        passed = counts.get("tests", 0) - wrong - skipped
        failed |= code != 0 or not passed
        for key, value in (("passed", passed), ("failed", wrong), ("skipped", skipped)):
            totals[key] += value
        seconds = time.monotonic() - start
        verdict = "ok" if code == 0 and passed else f"FAILED (exit code {code})"
        rows.append(
            f"{layer.name:28}{passed:6} passed {wrong:4} failed {skipped:5} skipped {seconds:6.0f} s  {verdict}"
        )
    print("\n" + "\n".join(rows))
    print(", ".join(f"{value} {key}" for key, value in totals.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
