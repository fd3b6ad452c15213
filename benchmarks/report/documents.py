"""The generated parts of documents, made from the newest results file of each benchmark.

README.md has the summary, docs/performance.md all results, docs/notes/scaling.md the model of times over GPUs.

python -m benchmarks readme            rewrite them
python -m benchmarks readme --check    exit 1 where they are not what the files say
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

from ..results import RESULTS_DIR, ROOT, Results, newest
from . import crossovers, scaling, summary
from .parallel import HEAD, lines_of
from .tables import render_summary

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
SCALING = ROOT / "docs" / "notes" / "scaling.md"
_LINK = "../benchmarks/results"
# One section each, in this order; a multi-GPU run of a benchmark stands for itself.
_ORDER = ("attention", "decode", "serve", "generate")
#: Long tables, host times, and what is no speed: the page links to their files alone.
_LINKED = (
    "attention-tiles",
    "attention-features-tiles",
    "resources",
    "train-gpt",
    "train-t5",
    "quantised-caches-bf16",
    "quantised-caches-fp32",
    "decode-sweep",
    "host",
    "ladder",
    "ladder-contiguous",
    "dist-decode-correctness",
    "dist-decode-latency",
)
#: Runs over the ranks of a group: one table for all of them.
_DISTRIBUTED = ("ring", "tp-", "ag-gemm", "gemm-rs", "e2e")
#: Tables with eager calls, and the training step, of which the backend makes another graph since a date.
_EAGER = ("decode", "dist-decode-compare")
_TRAIN, _TRAIN_CHANGED = "compile-train", "2026-11-27T12:56:00Z"
_TRAIN_NOTE = (
    "The backend makes another graph of a training step now: these are figures of the commit above."
)


def newest_files(folder: Path = RESULTS_DIR) -> list[Path]:
    """The newest file of each (benchmark, GPU, count): names begin with the UTC time."""
    order = {name: index for index, name in enumerate(_ORDER)}
    return sorted(newest(folder), key=lambda path: (order.get(_benchmark(path), 99), path.name))


def section(folder: Path = RESULTS_DIR) -> str:
    parts, distributed, linked, named = [], [], [], set[str]()
    for path in newest_files(folder):
        if _benchmark(path).startswith(_DISTRIBUTED):
            distributed.append(path)
            continue
        link = f"[`{path.name}`]({_LINK}/{path.name})"
        if _benchmark(path) in _LINKED:
            linked.append(link)
            continue
        run = Results.load(path)
        heading = _benchmark(path)
        if heading in named:  # of another machine: a link must reach either
            heading += " on {count} {gpu}".format(**run.meta)
        named.add(heading)
        parts.append(f"### {heading}\n\n{render_summary(run)}\n{_caption(path, run)}From {link}.\n")
    if distributed:
        parts.append(_distributed_section(distributed))
    if linked:
        parts.append(f"More, for `python -m benchmarks table` or `html`: {', '.join(linked)}.\n")
    return "\n".join(parts) or "Not measured yet.\n"


def _caption(path: Path, run: Results) -> str:
    """What has changed since the run, as the table's caption says it."""
    text = summary.eager_note([run]) if _benchmark(path) in _EAGER else ""
    if _benchmark(path) == _TRAIN and str(run.meta["date"]) < _TRAIN_CHANGED:
        text = _TRAIN_NOTE
    if _benchmark(path) == "serve" and any(row.impl == "nano-vllm" for row in run.rows):
        return "nano-vllm's attention is FlashAttention-3's. "
    return f"**{text}** " if text else ""


def _distributed_section(paths: list[Path]) -> str:
    """A table for each machine and commit of all its runs over ranks, each of which is a file of few lines."""
    lines: dict[str, list[str]] = {}
    runs = [Results.load(path) for path in paths]
    for run in runs:
        machine = "{count} × {gpu}, torch {torch}, triton {triton}, commit {commit}".format(
            **run.meta
        )
        lines.setdefault(machine, []).extend(lines_of(run))
    links = ", ".join(f"[`{path.name}`]({_LINK}/{path.name})" for path in paths)
    parts = [
        "### Over several GPUs",
        "torch: eager PyTorch with NCCL on the same weights, activations replicated, one all-reduce a "
        "layer; for ring attention torch's context_parallel, or one device where that is not measured. "
        f"Ours: decode steps and prefill passes in CUDA graphs, single layers eager. {summary.eager_note(runs)}",
    ]
    for machine in sorted(lines):
        if lines[machine]:
            parts += [f"{machine}:", "\n".join([*HEAD, *lines[machine]])]
    return "\n\n".join([*parts, f"From {links}.\n"])


def updated(text: str, name: str, made: str) -> str:
    """The text of a document with its section of that name made anew."""
    marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(rf"({marks[0]}).*?({marks[1]})", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the document must have {marks[0].strip()} and {marks[1]}, got neither")
    return pattern.sub(lambda found: f"{found[1]}{made}{found[2]}", text)


def documents() -> dict[Path, Callable[[str], str]]:
    """Each document with generated parts, and what makes its text anew."""
    sections = {
        README: {"summary": summary.section},
        PERFORMANCE: {"results": section, "crossovers": crossovers.section},
        SCALING: {"scaling": scaling.section},
    }

    def make(made: dict[str, Callable[[], str]], text: str) -> str:
        for name, of in made.items():
            text = updated(text, name, of())
        return text

    return {path: functools.partial(make, made) for path, made in sections.items()}


def _benchmark(path: Path) -> str:
    return path.stem.rsplit("_", 1)[1]
