"""`python -m benchmarks ladder`: every rung as the attention of a real model, timed and checked.

For each rung: the first call (prefill and one decode step, compilation included), then prefill and decode
timed apart over several rounds; then attention alone, on the queries and the cache that the model left:
prefill behind a flushed L2, decode in a CUDA graph over all layers and copies of them (as the benchmarks
`attention` and `decode` do it). The greedy tokens must be the reference's. Everything printed also goes to
a file in `logs/`. On a CPU the kernels run in Triton's interpreter, on a few layers: right or wrong is
what that shows, its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import DATE_FORMAT, Recorder, Results, collect_meta, output_path

from . import RUNGS
from .report import README, updated

if TYPE_CHECKING:
    import torch

MODEL_VARIABLES = ("LLAMA_CHAT_MODEL_PATH", "LLAMA_MODEL_PATH")
#: What a GPU, the interpreter and a debugging run are given where nothing is asked for.
GPU = dict(prompt_tokens=2048, new_tokens=64, layers=None, repeats=5, dtype="bf16")
INTERPRETER = dict(prompt_tokens=40, new_tokens=4, layers=2, repeats=1, dtype="fp32")
DEBUG = dict(prompt_tokens=20, new_tokens=3, layers=1, repeats=1, dtype="fp32")


def add_command(names) -> None:
    """Adds the parser to argparse's subparsers `names`."""
    command = names.add_parser("ladder", help="flash-decode in six steps, inside a real model")
    command.add_argument(
        "--kernel", default="all", type=_rung, metavar="K", help=f"all, or one of {', '.join(RUNGS)}"
    )  # fmt: skip
    command.add_argument(
        "--model",
        help="smollm2, a folder or a .gguf file (default: the environment's LLAMA_CHAT_MODEL_PATH, "
        "else LLAMA_MODEL_PATH, else smollm2)",
    )
    command.add_argument("--prompt-tokens", type=int, metavar="N")
    command.add_argument("--new-tokens", type=int, metavar="N")
    command.add_argument("--layers", type=int, metavar="N", help="only the first N")
    command.add_argument("--repeats", type=int, metavar="N", help="rounds over all kernels")
    command.add_argument("--dtype", choices=("bf16", "fp16", "fp32"))
    command.add_argument(
        "--contiguous", action="store_true", help="also with K and V copied before each call"
    )
    command.add_argument(
        "--debug", action="store_true", help="interpreter, one layer, every call shown and checked"
    )
    command.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU where there is one")  # fmt: skip
    command.add_argument("--json", metavar="PATH", help="file or folder for results")
    command.add_argument("--html", metavar="PATH", help="also one HTML page with all results")
    command.add_argument("--logs", default="logs", metavar="DIR", help="default: %(default)s")
    command.add_argument(
        "--readme", action="store_true", help="only make this folder's README from the results"
    )
    command.set_defaults(run=run)


def _rung(word: str) -> str:
    name = word.replace("_", "-")
    if name not in ("all", *RUNGS):
        raise argparse.ArgumentTypeError(f"must be all or one of {', '.join(RUNGS)}, got {word!r}")
    return name


def model_path(asked: str | None) -> str:
    return asked or next(filter(None, map(os.environ.get, MODEL_VARIABLES)), "smollm2")


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """The exit status: 1 where a rung fails or writes other tokens than the reference."""
    if options.readme:
        README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    device = _device(options)
    sizes = DEBUG if options.debug else INTERPRETER if device.type == "cpu" else GPU
    for name, value in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    _check(options, device)

    from torch_fdattn.models import MissingExtra

    from .measure import climb

    meta = collect_meta(words, device)
    name = "ladder" + ("" if options.kernel == "all" else f"-{options.kernel}")
    path = output_path(options.json, meta, name + ("-contiguous" if options.contiguous else ""))
    recorder = Recorder(Results(meta), path)
    when = datetime.datetime.strptime(str(meta["date"]), DATE_FORMAT).strftime("%Y%m%dT%H%M%SZ")
    with Log(Path(options.logs) / f"{when}_{options.kernel}.log") as log:
        log(str(meta["command"]))
        if device.type == "cpu":
            log(
                "Triton's interpreter on a CPU: shows that the kernels are right; times mean nothing."
            )
        try:
            holds = climb(options, model_path(options.model), device, recorder, log)
        except MissingExtra as missing:
            raise ValueError(str(missing)) from None
        recorder.save()
        log(f"Written to {log.path}" + (f" and {path}" if path else ""))
        if options.html is not None:
            from benchmarks.report.html_page import write_html

            log(f"Written to {write_html(recorder.results, options.html)}")
        if path is None:
            log("No results file: figures from a CPU are not results (--json PATH writes them).")
    return 0 if holds else 1


def _device(options: argparse.Namespace) -> torch.device:
    """Where to run; for a CPU, Triton is set to interpret, which it must be told before its import."""
    import torch

    if options.device == "cuda" and options.debug:
        raise ValueError(
            "--debug runs in Triton's interpreter, on a CPU: got --device cuda with it"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be cpu on a machine without CUDA, got cuda")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if options.device == "cuda" and interpreted:
        raise ValueError("--device cuda must be run without TRITON_INTERPRET=1, got both")
    may = options.device != "cpu" and not options.debug and not interpreted
    if may and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if not interpreted:
        if "triton" in sys.modules:
            raise ValueError("Triton is imported already: start Python with TRITON_INTERPRET=1")
        os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def _check(options: argparse.Namespace, device: torch.device) -> None:
    for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("repeats", 1)):
        if getattr(options, name) < least:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}"
            )
    if options.layers is not None and options.layers < 1:
        raise ValueError(f"--layers must be at least 1, got {options.layers}")
    if device.type == "cpu" and options.dtype == "bf16":
        raise ValueError("--dtype must be fp16 or fp32 in Triton's interpreter, got bf16")
    if device.type == "cpu":
        import numpy
        import triton

        from torch_fdattn.doctor.software import interpreter_trap

        why = interpreter_trap(triton.__version__, numpy.__version__)
        if why is not None:
            raise ValueError(why)


class Log:
    """Prints, and writes the same to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def __enter__(self) -> Log:
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def __call__(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self._file, flush=True)
