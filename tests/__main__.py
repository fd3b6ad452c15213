"""Runs the layers of the suite one after the other, adds up what ran, and says last what failed.

    python -m tests cpu | capabilities | slow | smollm2 | browser | overlays | gpu | shared-gpu | multigpu | vllm

Each layer (`layers.py`) is a process of its own, since TRITON_INTERPRET must be set before torch_fdattn is imported and
the distributed tests run under torchrun.
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

from tests.layers import Layer, layers

#: Reasons to skip that follow from the kind of run. Anything else, a missing package above all, is a check
#: that was not made, and fails the layer.
EXPECTED_SKIPS = re.compile(
    r"""(^|Skipped:\ |:\ )(
        needs\ a\ CUDA\ device(\ of\ sm_90)? | needs\ \d+\ CUDA\ devices,\ found\ \d+ | needs\ (at\ most\ )?\d+\ ranks(:\ .*)?
        | needs\ \d+\ GiB\ of\ free\ GPU\ memory,\ found\ \d+
        | tests\ a\ kernel:\ needs\ a\ CUDA\ device\ or\ TRITON_INTERPRET=1
        | compiles\ kernels,\ which\ the\ interpreter\ replaces | the\ interpreter\ has\ no\ bfloat16
        | float64\ runs\ on\ the\ CPU\ only | of\ memory\ that\ CPU\ processes\ share | a\ process\ group\ exists | another\ ptxas\ may\ be\ right
        | torch\ 2\.11\ crashes\ while\ it\ loads\ an\ AOTInductor\ package\ on\ CUDA
        | transformers\ before\ 5\.23\ compares\ indices\ of\ local\ tokens
        | transformers\ before\ 5\.19\ hands\ out\ no\ tables\ of\ pages
        | this\ torch\ has\ no\ varlen_attn\ over\ pages
        | triton\ 3\.6.*'s\ interpreter\ breaks\ on\ numpy\ .*
    )('\))?$""",
    re.VERBOSE,
)
#: Lines of a rank's output that are shown where no test of rank 0 says what is wrong.
_LAST_LINES = 12


@dataclass
class Outcome:
    """What came of a layer; problems: a sentence each."""

    layer: Layer
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("passed", "failed", "skipped"), 0)
    )
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> str:
        numbers = " ".join(f"{self.counts[key]:5} {key}" for key in ("passed", "failed", "skipped"))
        verdict = "FAILED" if self.problems else "ok"
        return f"{self.layer.name:28}{numbers} {self.seconds:6.0f} s  {verdict}"


def run(layer: Layer, folder: Path) -> Outcome:
    """One layer; under torchrun the counts are those of rank 0."""
    outcome, report, logs = Outcome(layer), folder / "report.xml", folder / "logs"
    launcher: list[str] = []
    if layer.ranks:
        # Rank 0's output is shown (and only rank 0 writes the report), the others' stays in the logs.
        launcher = [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layer.ranks),
            "--log-dir", str(logs), "--redirects", "3", "--tee", "0:3",
        ]  # fmt: skip
    pytest = ["-m", "pytest", "-q", *layer.arguments, f"--junitxml={report}"]
    # Inductor's compile workers would be a process more for each of pytest's: on few processors it takes, and gives nothing.
    defaults = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment = {**defaults, **os.environ, **layer.environment}
    # The layers start some hundreds of processes, each of which would compile all that it imports.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.monotonic()
    code = subprocess.run(
        [sys.executable, *launcher, *pytest], env=environment, check=False
    ).returncode
    outcome.seconds = time.monotonic() - start
    if report.exists():
        read(report, outcome)
    if code and not outcome.problems:
        told = "no test of rank 0 failed" if layer.ranks else "no test failed"
        outcome.problems.append(f"{told}, but the run ended with exit code {code}")
        outcome.problems += last_lines(logs)
    if not outcome.problems and not outcome.counts["passed"]:
        outcome.problems.append("no test ran")
    return outcome


def read(report: Path, outcome: Outcome) -> None:
    """Adds what pytest's report says to the outcome."""
    suite = ET.parse(report).getroot().find("testsuite")
    for case in suite.iter("testcase"):
        wrong = [x for x in case if x.tag in ("failure", "error")]
        skipped = case.find("skipped")
        kind = "failed" if wrong else "passed" if skipped is None else "skipped"
        outcome.counts[kind] += 1
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        for x in wrong:
            first = (x.get("message") or "").strip().split("\n")[0]
            outcome.problems.append(f"{name}: {first[:300]}")
    # The reason of a module skipped as a whole stands in the text alone.
    reasons = {(x.text or x.attrib.get("message", "")).strip() for x in suite.iter("skipped")}
    outcome.problems += [
        f"a check was skipped that this machine should make: {reason}"
        for reason in sorted(reasons)
        if not EXPECTED_SKIPS.search(reason)
    ]


def last_lines(logs: Path) -> list[str]:
    """What the ranks of a layer that ended without a word wrote last."""
    told = []
    for path in sorted(logs.glob("*/attempt_0/*/std*.log")):
        lines = [x for x in path.read_text(errors="replace").splitlines() if x.strip()]
        if lines:
            tail = "\n      ".join(lines[-_LAST_LINES:])
            told.append(f"rank {path.parent.name} wrote last ({path.stem}):\n      {tail}")
    return told


def closing(outcomes: list[Outcome], command: str) -> str:
    """The last lines of a run: a row for each layer, and in plain words what failed."""
    rows = [outcome.row() for outcome in outcomes]
    totals = {key: sum(x.counts[key] for x in outcomes) for key in outcomes[0].counts}
    rows.append(", ".join(f"{value} {key}" for key, value in totals.items()))
    failed = [x for x in outcomes if x.problems]
    if not failed:
        return "\n".join([*rows, f"Everything that {command} runs passed."])
    rows.append(f"\n{len(failed)} of {len(outcomes)} layers of {command} failed:")
    for outcome in failed:
        rows.append(f"  {outcome.layer.name}:")
        rows += [f"    {problem}" for problem in outcome.problems]
    return "\n".join(rows)


def main() -> int:
    kind = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    outcomes = []
    for layer in layers(kind):
        print(f"\n=== {layer.name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run(layer, Path(folder)))
    print("\n" + closing(outcomes, f"python -m tests {kind}"))
    return int(any(x.problems for x in outcomes))


if __name__ == "__main__":
    sys.exit(main())
