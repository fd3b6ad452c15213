"""`python -m benchmarks NAME`: runs a benchmark, or shows results; see benchmarks/README.md and docs/measuring.md."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import show
from .registry import BENCHMARKS, ELSEWHERE


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for a wrong command; 1 where a check, `compare` or `readme` says so."""
    argv = normalised(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return options.run(options, argv)
    except (ValueError, OSError) as failure:
        parser.error(str(failure))


def normalised(argv: Sequence[str]) -> list[str]:
    """`--use_allreduce` as `--use-allreduce`; values stay as they are."""
    found = []
    for word in argv:
        option, equals, value = word.partition("=")
        found.append(option.replace("_", "-") + equals + value if word.startswith("--") else word)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Benchmarks of torch_fdattn against its peers and floors.",
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for benchmark in BENCHMARKS.values():
        benchmark.add_to(names).set_defaults(run=_run)
    for module in ELSEWHERE:
        importlib.import_module(module).add_command(names)
    show.add_commands(names)
    return parser


def _run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if options.benchmark.over_ranks:
        from .distributed import mpi

        mpi.adopt()  # before torch is imported, since it sets how many threads torch takes
    from . import runner

    return runner.run(options, argv)


if __name__ == "__main__":
    sys.exit(main())
