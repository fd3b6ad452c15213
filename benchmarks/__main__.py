"""`python -m benchmarks NAME`: runs a benchmark, or shows results; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from examples.kernel_ladder import run as ladder
from examples.training_curves import command as training
from tests.compile_only import resources

from . import show
from .cases import (
    ATTENTION_CASES,
    COMPILE_CASES,
    DECODE_CASES,
    DIST_DECODE_CASES,
    FEATURE_CASES,
    GENERATE_CASES,
    SWEEPS,
    select,
    swept,
)
from .distributed import commands as distributed
from .report.tables import render
from .results import Recorder, Results, collect_meta, output_path

if TYPE_CHECKING:
    from .peers import Implementation
    from .runner import Run

_CASES = {
    "attention": ATTENTION_CASES,
    "compile": COMPILE_CASES,
    "decode": DECODE_CASES,
    "dist_decode": DIST_DECODE_CASES,
    "generate": GENERATE_CASES,
    "host": [case for case in DECODE_CASES if case.page is None],
}
_PEERS = {"attention": "cudnn,fa2,flex", "decode": "fdattn/full,cudnn,fa2"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for a wrong command; `compare` and `readme` may say 1."""
    words = distributed.normalised(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(words)
    try:
        return options.run(options, words)
    except (ValueError, OSError) as failure:
        parser.error(str(failure))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Benchmarks of torch_fdattn against its peers and floors.",
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")

    for name, text in (
        ("attention", "prefill and training: forward and backward TFLOP/s"),
        ("decode", "one query token against a cache: µs, GB/s, percent of a pure read"),
    ):
        command = names.add_parser(name, help=text)
        command.add_argument(
            "--vs",
            default=_PEERS[name],
            metavar="A,B",
            help="peers of cudnn, fa2, flex, fa3, fa4, flashinfer, eager; or all, none (default: %(default)s)",
        )
        command.add_argument(
            "--cases", metavar="TEXT", help="comma-separated parts of names or labels"
        )
        if name == "attention":
            command.add_argument("--passes", default="forward,backward", metavar="A,B")
            command.add_argument(
                "--backward", dest="passes", action="store_const", const="backward", help="--passes backward"
            )  # fmt: skip
            command.add_argument(
                "--features",
                action="store_true",
                help="biases, windows, dropout … in place of the baseline cases, against flex,sdpa",
            )
            for size in ("block-m", "block-n", "num-warps", "num-stages"):
                command.add_argument(
                    f"--{size}", metavar="A,B", type=numbers, help="a sweep: ours with these tile sizes too"
                )  # fmt: skip
        else:
            _add_sweep(command)
            command.add_argument(
                "--trace", metavar="PATH", help="also a trace of a few calls of each, for Perfetto"
            )
        command.add_argument("--repeats", type=int, default=3, help="rounds over all (default: 3)")
        command.add_argument("--peers-dir", metavar="DIR", help="folder of unpacked peer wheels")
        _add_run_options(command)
        command.set_defaults(run=_run_cases)

    command = names.add_parser("floors", help="the machine alone: matmul and pure reads")
    command.add_argument("--cases", metavar="TEXT", help="decode cases whose K and V are read")
    command.add_argument("--repeats", type=int, default=3)
    _add_run_options(command)
    command.set_defaults(run=_run_floors)

    command = names.add_parser("compile", help="layers of transformers' models under torch.compile")
    command.add_argument("--cases", metavar="TEXT")
    command.add_argument("--repeats", type=int, default=3)
    _add_run_options(command)
    command.set_defaults(run=_run_compile)

    command = names.add_parser("generate", help="a real model: tokens/s, also under torchrun")
    command.add_argument("--cases", metavar="TEXT")
    command.add_argument("--repeats", type=int, default=3)
    _add_run_options(command)
    command.set_defaults(run=_run_generate)

    distributed.add_commands(names)
    ladder.add_command(names)
    resources.add_command(names)
    training.add_command(names)

    command = names.add_parser("host", help="the host time of one eager decode call by parts")
    command.add_argument("--cases", metavar="TEXT", help="default: the first decode case")
    command.add_argument("--repeats", type=int, default=15)
    _add_run_options(command)
    command.set_defaults(run=_run_host)

    command = names.add_parser("list", help="the cases of a benchmark")
    command.add_argument("benchmark", choices=sorted(_CASES))
    _add_sweep(command)
    command.set_defaults(run=_list)

    show.add_commands(names)
    return parser


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _add_sweep(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--sweep", nargs="?", const="all", metavar="A,B",
        help=f"decode's sweeps instead of the baseline cases: all, or of {', '.join(SWEEPS)}",
    )  # fmt: skip


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", metavar="PATH", help="file or folder for results (default: benchmarks/results)"
    )
    command.add_argument("--html", metavar="PATH", help="also one HTML page with all results")
    command.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for tiny cases")
    command.add_argument(
        "--budget-s", type=float, metavar="S", help="start no new case after S seconds"
    )


def _run_cases(options: argparse.Namespace, words: Sequence[str]) -> int:
    _select(options)  # before torch is imported: a typo should not take seconds
    if options.peers_dir is not None:
        import site

        site.addsitedir(options.peers_dir)
    from torch_fdattn.environment import interpreting

    from . import attention, decode, features, peers
    from .peers.tiled import swept as swept_tiles

    vs, sizes = options.vs, _tile_sizes(options)
    if sizes and vs == _PEERS["attention"]:
        vs = "none"  # a sweep compares ours with ours, unless peers are named
    if getattr(options, "features", False):
        chosen = features.chosen("flex,sdpa" if vs == _PEERS["attention"] else vs)
    else:
        chosen = peers.chosen(vs)
    swept = swept_tiles(chosen[0], sizes)
    if swept and options.device == "cpu" and not interpreting(os.environ):
        raise ValueError(
            "tile sizes need kernels: a GPU or TRITON_INTERPRET=1, got --device cpu alone"
        )
    run = _start(options, words, (chosen[0], *swept, *chosen[1:]))
    if options.name == "attention":
        passes = [word.strip() for word in options.passes.split(",")]
        if not set(passes) <= set(attention.PASSES):
            raise ValueError(
                f"--passes must be of {', '.join(attention.PASSES)}, got {options.passes!r}"
            )
        attention.measure(run, _select(options), passes)
    else:
        decode.measure(run, _select(options))
        if options.trace is not None:
            from .profiling import trace_decode

            count = trace_decode(run, _select(options), options.trace)
            print(f"Trace of {count} implementations of cases: {options.trace}", file=sys.stderr)
    return _finish(run.recorder, options)


def _tile_sizes(options: argparse.Namespace) -> dict[str, list[int]]:
    """The sizes of a sweep over tiles, empty where none is asked for."""
    names = ("block_m", "block_n", "num_warps", "num_stages")
    return {name: x for name in names if (x := getattr(options, name, None)) is not None}


def _run_floors(options: argparse.Namespace, words: Sequence[str]) -> int:
    from . import decode, floors

    run = _start(options, words, ())
    floors.record_matmul(run.recorder, run.timer, options.repeats)
    contiguous = [case for case in DECODE_CASES if case.page is None]
    decode.measure(run, select(contiguous, options.cases, tiny_only=False))
    return _finish(run.recorder, options)


def _run_host(options: argparse.Namespace, words: Sequence[str]) -> int:
    cases = _select(options)
    from . import host

    run = _start(options, words, ())
    host.measure(run, cases if options.cases else cases[:1])
    return _finish(run.recorder, options, host.render)


def _run_compile(options: argparse.Namespace, words: Sequence[str]) -> int:
    cases = _select(options)
    from . import compiled

    run = _start(options, words, compiled.WAYS)
    compiled.measure(run, cases)
    return _finish(run.recorder, options)


def _run_generate(options: argparse.Namespace, words: Sequence[str]) -> int:
    _select(options)
    import torch

    from . import generate, peers
    from . import ranks as processes

    processes.under_torchrun()  # names what is missing or wrong among its variables
    device, group = generate.join(torch.device(options.device))
    if group is not None and options.budget_s is not None:
        raise ValueError("--budget-s must not be given under torchrun: ranks' clocks differ")
    options.device = str(device)
    ours = peers.OURS if group is None else generate.Sharded()
    run = _start(options, words, (ours,), *(() if group is None else (group.rank(), group.size())))
    try:
        generate.measure(run, _select(options), group)
    finally:
        if group is not None:
            torch.distributed.destroy_process_group()
    first = group is None or run.recorder.path is not None
    return _finish(run.recorder, options) if first else 0


def _select(options: argparse.Namespace) -> list:
    return select(_cases(options, options.name), options.cases, tiny_only=options.device == "cpu")


def _cases(options: argparse.Namespace, name: str) -> Sequence:
    if getattr(options, "features", False):
        return FEATURE_CASES
    axes = getattr(options, "sweep", None)
    if axes is None:
        return _CASES[name]
    if name != "decode":
        raise ValueError(f"--sweep must be given for decode, got it for {name}")
    return swept(axes)


def _start(
    options: argparse.Namespace,
    words: Sequence[str],
    implementations: Sequence[Implementation],
    rank: int = 0,
    world_size: int = 1,
) -> Run:
    import torch

    from .runner import Budget, Run
    from .timing import Timer

    if options.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {options.repeats}")
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device must be cpu on a machine without CUDA, got cuda")
        if device.index is not None:
            torch.cuda.set_device(device)
        device = torch.device("cuda", torch.cuda.current_device())
    meta = collect_meta(words, device, world_size)
    # The documents show the newest file of each name: a sweep must not take the place of the baselines.
    name = f"{options.name}-sweep" if getattr(options, "sweep", None) else options.name
    name = "attention-features" if getattr(options, "features", False) else name
    name = f"{name}-tiles" if _tile_sizes(options) else name
    path = output_path(options.json, meta, name) if rank == 0 else None
    recorder = Recorder(Results(meta), path)
    return Run(Timer(device), recorder, implementations, options.repeats, Budget(options.budget_s))


def _finish(
    recorder: Recorder, options: argparse.Namespace, shown: Callable[[Results], str] = render
) -> int:
    print(shown(recorder.results), end="")
    if recorder.path is None:
        print("\nNot written: figures from a CPU are not results (--json FILE writes them).")
    else:
        print(f"\nWritten to {recorder.path}")
    if options.html is not None:
        from .report.html_page import write_html

        print(f"Written to {write_html(recorder.results, options.html)}")
    return 0


def _list(options: argparse.Namespace, _: Sequence[str]) -> int:
    for case in _cases(options, options.benchmark):
        print(f"{case.name:56}{case.label}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
