"""`python -m benchmarks train`: trains once for each way to attend, and says what the curves differ by.

    python -m benchmarks train --model gpt --steps 300 --plot curves.svg

`fdattn` and `sdpa` differ in rounding alone, but a training amplifies the last bit of its first step. What that
amounts to is measured: torch's own attention once more (its backwards on GPUs add up in any order), by its other
backends, `sdpa/math` and `sdpa/efficient`, and from weights that were nudged by a rounding. The largest gap between
two of these is called noise (a gap is the mean over steps of the losses' distance), and ours to all of them, in the
mean, is to be within it. One training more or less decides that: `--seeds 3` compares in three, and says what two
seeds differ by, which is another noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.tables import render
from benchmarks.results import Recorder, Results, collect_meta, describe, output_path

if TYPE_CHECKING:
    from .run import Curve, Setup
    from .text import Text

_TEXT_BYTES = 8 << 20
#: Curves have this many points at most: each is a mean over the steps since the last one.
_POINTS = 60
_BASE = "sdpa"


def add_command(names) -> None:
    """Adds the parser to argparse's subparsers `names`."""
    command = names.add_parser(
        "train", help="loss curves of a small GPT or T5-like model, ours beside torch's attention"
    )
    command.add_argument("--model", default="gpt", metavar="NAME", help="gpt (default) or t5")
    command.add_argument(
        "--attention", default="fdattn,sdpa,sdpa/again,sdpa/math,sdpa/efficient,sdpa/nudged1,sdpa/nudged2,sdpa/nudged3", metavar="A,B",
        help="of fdattn, sdpa, sdpa/again, sdpa/math, sdpa/efficient, sdpa/flash, sdpa/cudnn, sdpa/nudged1 to 3 (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--steps", type=int, default=300, help="default: 300")
    command.add_argument("--size", metavar="NAME", help="small (default on GPUs) or tiny (on CPUs)")
    command.add_argument("--dtype", metavar="T", help="bf16 by autocast (default on GPUs) or fp32")
    command.add_argument("--seed", type=int, default=0, help="of weights and order (default: 0)")
    command.add_argument("--seeds", type=int, default=1, help="so many, from --seed on (default: 1)")  # fmt: skip
    command.add_argument("--device", help="default: cuda where there is one, else cpu")
    command.add_argument("--json", metavar="PATH", help="file or folder (default: benchmarks/results)")  # fmt: skip
    command.add_argument("--html", metavar="PATH", help="also one HTML page with all results")
    command.add_argument("--plot", metavar="PATH", help="also the curves as a plot (needs matplotlib)")  # fmt: skip
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from .text import standard_library

    setup, ways = _setup(options)
    text = standard_library(_TEXT_BYTES)
    meta = collect_meta(words, setup.device)
    path = output_path(options.json, meta, f"train-{setup.model}")
    recorder = Recorder(Results(meta), path)
    found = []
    for seed in range(options.seed, options.seed + options.seeds):
        found.append(
            compare(dataclasses.replace(setup, seed=seed), ways, text, recorder, options.seeds > 1)
        )
    print(render(recorder.results), end="")
    print(f"\n{verdict(found)}\nText: {len(text.training)} bytes of the standard library, {text.digest}.")  # fmt: skip
    if path is not None:
        print(f"Written to {path}")
    if options.html is not None:
        from benchmarks.report.html_page import write_html

        print(f"Written to {write_html(recorder.results, options.html)}")
    if options.plot is not None:
        from benchmarks.report.plot import plot

        try:
            print(f"Written to {plot(recorder.results, Path(options.plot))}")
        except RuntimeError as failure:
            raise ValueError(str(failure)) from failure
    return 0


def _setup(options: argparse.Namespace) -> tuple[Setup, list[str]]:
    import torch

    from benchmarks.runner import DTYPES

    from .models import MODELS, SIZES
    from .run import Setup
    from .ways import way

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = device.type == "cuda"
    size, dtype = options.size or ("small" if gpu else "tiny"), options.dtype or ("bf16" if gpu else "fp32")  # fmt: skip
    for name, given, known in (
        ("model", options.model, MODELS), ("size", size, SIZES), ("dtype", dtype, ("bf16", "fp32")),
    ):  # fmt: skip
        if given not in known:
            raise ValueError(f"--{name} must be of {', '.join(known)}, got {given!r}")
    for name in ("steps", "seeds"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    ways = list(dict.fromkeys(word.strip() for word in options.attention.split(",")))
    for name in ways:
        way(name)
    return Setup(
        options.model, SIZES[size], options.steps, DTYPES[dtype], options.seed, device
    ), ways


def compare(
    setup: Setup, ways: Sequence[str], text: Text, recorder: Recorder, says_seed: bool = False
) -> dict[str, Curve]:  # fmt: skip
    """Trains once for each way; the curves, and rows of them. A way that fails is a row with the reason."""
    from benchmarks.runner import DTYPES

    from .run import gap, train

    (dtype,), found = [name for name, x in DTYPES.items() if x == setup.dtype], {}
    of_seed = f" seed {setup.seed}" if says_seed else ""
    for name in ways:
        try:
            found[name] = train(setup, name, text)
        except Exception as failure:
            recorder.error(f"{setup.model}{of_seed}", name, describe(failure))
            continue
        curve = found[name]
        print(f"{name}: {curve.losses[-1]:.4f} after {setup.steps} steps of {curve.step_ms:.1f} ms", file=sys.stderr)  # fmt: skip
    case = setup.model
    for name, curve in found.items():
        case = f"{setup.model} {curve.parameters / 1e6:.1f}M {dtype}{of_seed}"
        every = -(-setup.steps // _POINTS)
        for begin in range(0, setup.steps, every):
            part = curve.losses[begin : begin + every]
            recorder.add(f"{case} step {begin + len(part)}", name, "train_loss", statistics.fmean(part))  # fmt: skip
        recorder.add(case, name, "val_loss", curve.validation)
        recorder.add(case, name, "step_ms", curve.step_ms)
        if name != _BASE and _BASE in found:
            recorder.add(case, name, "loss_gap", gap(curve, found[_BASE]))
    recorder.save()
    return found


def verdict(found: Sequence[Mapping[str, Curve]]) -> str:
    """One line: whether our curves are as near to torch's as torch's own are to each other. A mapping a seed."""
    from .run import gap

    ours, noise, seeds = [], [], []
    for curves in found:
        torchs = [curve for name, curve in curves.items() if name.split("/")[0] == _BASE]
        if "fdattn" not in curves or len(torchs) < 2:
            return f"Without fdattn and two runs of {_BASE} there is no noise to compare with."
        ours.append(statistics.fmean(gap(curves["fdattn"], curve) for curve in torchs))
        noise.append(max(gap(a, b) for a, b in itertools.combinations(torchs, 2)))
        seeds.append(torchs[0])
    said = "within" if statistics.fmean(ours) <= max(noise) else "MORE than"
    line = (
        f"fdattn's curve is {statistics.fmean(ours):.2e} nats a step from torch's {len(torchs)}, in the mean over "
        f"them: {said} the noise of {max(noise):.2e}, by which these differ at most from each other."
    )
    if len(found) == 1:
        return line
    apart = statistics.fmean(gap(a, b) for a, b in itertools.combinations(seeds, 2))
    by_seed = ", ".join(f"{a:.2e} ({b:.2e})" for a, b in zip(ours, noise, strict=True))
    return f"{line} By seed: {by_seed}. Two seeds of {_BASE} differ by {apart:.2e}."
