"""`python -m benchmarks resources`: the table of what kernels take, for any target, on a machine without a GPU.

python -m benchmarks resources --op backward --target sm_90 gfx942 --head-dim 64 128 --scores scores
python -m benchmarks resources --op forward --target sm_90 --tile 128x128w8s3 64x64w4s2
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.tables import failures, heading, join, markdown_table
from benchmarks.results import NO_GPU, Recorder, Results, collect_meta, file_name

if TYPE_CHECKING:
    from .compiled import Resources
    from .launches import Case

_COLUMNS = (
    "kernel", "inputs", "target", "tile", "warps", "stages", "registers", "spills, B", "shared, KiB",
    "blocks a processor", "occupancy, %", "limited by", "",
)  # fmt: skip


def add_command(names) -> None:
    """Adds the parser to argparse's subparsers `names`."""
    command = names.add_parser(
        "resources", help="registers, spills, shared memory and occupancy of every kernel; no GPU"
    )
    for flag, default, text in (
        (
            "--op",
            ("forward", "backward"),
            "of forward, backward, varlen_forward, varlen_backward, decode, append, merge",
        ),
        ("--target", None, "of sm_80, sm_90, sm_100, gfx942, gfx950 (default: all)"),
        ("--dtype", ("bf16",), "of bf16, fp16, fp32"),
        ("--mask", ("causal",), "of full, causal, window, padded, sharded, all"),
        (
            "--scores",
            ("",),
            "attention's options: of softcap, alibi, sinks, mask, row, bias, scores",
        ),
        ("--cache", ("same",), "decode's and append's: of same, e4m3, e5m2, int8, each -paged too"),
        ("--tile", (None,), "instead of the configured one, as 128x64w8s3; attention and decode"),
    ):
        said = f" (default: {' '.join(default)})" if default and default[0] else ""
        command.add_argument(flag, nargs="+", default=default, metavar="X", help=text + said)
    command.add_argument("--head-dim", nargs="+", type=int, default=(64, 128, 256), metavar="N")
    command.add_argument(
        "--rows", nargs="+", type=int, default=(4,), metavar="N", help="decode's group, append's tokens"
    )  # fmt: skip
    command.add_argument("--dropout", action="store_true", help="attention's, with 0.1")
    command.add_argument("--json", metavar="PATH", help="file or folder for the rows")
    command.add_argument("--html", metavar="PATH", help="also one HTML page with all results")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    from torch_fdattn.environment import interpreting

    if interpreting(os.environ):
        raise ValueError("TRITON_INTERPRET must be unset to compile kernels, got it set")
    import torch

    cases = list(_cases(options))
    recorder = Recorder(Results(collect_meta(argv, torch.device("cpu")) | {"gpu": NO_GPU}), None)
    if options.json is not None:
        path = Path(options.json)
        recorder.path = path / file_name(recorder.results.meta, "resources") if path.is_dir() else path  # fmt: skip
    print(heading(recorder.results, note="") + "\n")
    print(report(cases, recorder))
    recorder.save()
    if options.html is not None:
        from benchmarks.report.html_page import write_html

        print(f"Written to {write_html(recorder.results, options.html)}")
    return 0


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    from benchmarks.runner import DTYPES
    from torch_fdattn.ops.attention.configs import TileConfig

    from .launches import CACHES, MASKS, OPS, SCORES, Case
    from .targets import ARCHS

    targets = options.target or tuple(ARCHS)
    caches = [f"{name}{paged}" for name in ("same", *CACHES) for paged in ("", "-paged")]
    for name, given, known in (
        ("op", options.op, OPS), ("target", targets, ARCHS), ("mask", options.mask, MASKS),
        ("dtype", options.dtype, DTYPES),
        ("scores", options.scores, SCORES), ("cache", options.cache, caches),
    ):  # fmt: skip
        if unknown := [x for x in given if x not in known]:
            raise ValueError(f"--{name} must be of {', '.join(filter(None, known))}, got {unknown[0]}")  # fmt: skip
    tiles = [None if text is None else TileConfig.parse(text) for text in options.tile]
    seen = set()
    for op, dtype, dim, mask, scores, rows, cache, tile, target in itertools.product(
        options.op, options.dtype, options.head_dim, options.mask, options.scores, options.rows,
        options.cache, tiles, targets,
    ):  # fmt: skip
        attention = op.endswith(("forward", "backward"))
        serving = dict(rows=rows, cache=cache) if op in ("decode", "append") else {}
        if op == "varlen_forward":
            serving = dict(cache="same-paged" if cache.endswith("paged") else "same")
        scored = dict(scores=scores, dropout_p=0.1 * options.dropout) if attention else {}
        tiled = dict(tile=tile) if attention or op == "decode" else {}
        case = Case(op, target, dtype, dim, mask, **serving, **scored, **tiled)
        if case not in seen:  # what an op does not ask for is no second case of it
            seen.add(case)
            yield case


def report(cases: Sequence[Case], recorder: Recorder) -> str:
    """The table as Markdown; the same figures go into the recorder, a target's refusal as an error."""
    from .compiled import resources
    from .targets import ARCHS

    lines = []
    for case in cases:
        with recorder.guard(inputs_of(case), case.arch, case.op, _never_fatal):
            arch = ARCHS[case.arch]
            for found in resources(case):
                held = found.occupancy(arch)
                cells = _cells(case, found) | {
                    "blocks a processor": str(held.blocks), "occupancy, %": f"{held.percent:.0f}",
                    "limited by": held.limit,
                }  # fmt: skip
                notes = ["spills"] * (found.spills > 0)
                notes += ["over the limit"] * (found.shared > arch.shared_limit)
                notes += ["undefined registers"] * bool(found.undefined)
                lines.append([*(cells[name] for name in _COLUMNS[:-1]), ", ".join(notes)])
                name = f"{found.kernel} {inputs_of(case)} {_config(found)}"
                for metric, value in (
                    ("registers", found.registers), ("spill_bytes", found.spills),
                    ("shared_KiB", found.shared / 1024), ("occupancy", held.percent),
                ):  # fmt: skip
                    recorder.add(name, case.arch, metric, value)
    return join(markdown_table(_COLUMNS, lines), failures(recorder.results)).rstrip("\n")


def inputs_of(case: Case) -> str:
    """What a kernel is compiled for, but for the target."""
    parts = [case.dtype, f"hd{case.head_dim}"]
    parts += [case.mask] if case.op not in ("append", "merge") else []
    parts += [f"{case.rows} rows", case.cache] if case.op in ("decode", "append") else []
    parts += ["paged"] if case.op == "varlen_forward" and case.cache != "same" else []
    parts += [case.scores] * bool(case.scores) + ["dropout"] * bool(case.dropout_p)
    return " ".join(parts)


def _config(found: Resources) -> str:
    return f"{found.tile}w{found.warps}s{found.stages}"


def _cells(case: Case, found: Resources) -> dict[str, str]:
    values = (
        found.kernel, inputs_of(case), case.arch, found.tile, found.warps, found.stages, found.registers,
        found.spills, f"{found.shared / 1024:.1f}",
    )  # fmt: skip
    return dict(zip(_COLUMNS, map(str, values), strict=False))


def _never_fatal(failure: BaseException) -> None:
    """No device can have been lost: the compiler's refusal is a row."""
