"""The options of the tensor-parallel runs, and what is wrong with them."""

from __future__ import annotations

import argparse
import os
import sys

METHODS = (
    "auto", "nccl", "one_shot", "two_shot", "low_latency", "gemm_epilogue", "two_shot_multimem",
)  # fmt: skip
STRATEGIES = ("auto", "collective", "copy_engine", "fused", "low_latency")
#: Those that are kernels of ours: on a CPU they are interpreted.
KERNELS = ("copy_engine", "fused", "low_latency", "gemm_epilogue")
#: Runs of a model that is built for one strategy.
_MODELS = ("e2e", "e2e_inference")


def add(command: argparse.ArgumentParser, layers: bool = False, generation: bool = False) -> None:
    """layers: of a whole model; generation: its strategy is --backend."""
    command.add_argument("--model", default="Qwen/Qwen3-32B", help="a built-in shape")
    command.add_argument(
        "--allreduce-method", type=_list_of(METHODS), default=["nccl"], metavar="A,B",
        help=f"of {', '.join(METHODS[:-1])} (default: nccl)",
    )  # fmt: skip
    command.add_argument(
        "--strategy", type=_list_of(STRATEGIES), default=["auto"], metavar="A,B",
        help=f"of all-gather and reduce-scatter: of {', '.join(STRATEGIES)} (default: auto)",
    )  # fmt: skip
    # A layer alone takes and ignores it, so that one line serves all runs of a model.
    command.add_argument("--layers", type=int, help="of the model" if layers else argparse.SUPPRESS)
    if generation:  # e2e checks the logits
        command.set_defaults(use_allreduce=False, check=False)
        return
    command.add_argument(
        "--use-allreduce", action="store_true", help="not all-gather, reduce-scatter"
    )
    command.add_argument(
        "--check", action="store_true", help="against one process with all weights"
    )
    if not layers:
        command.add_argument(
            "--timeline", metavar="F.svg", help="also a plot of one call of each, stream by stream"
        )


def add_crossover(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--models", metavar="A,B", type=lambda text: text.split(","),
        help="built-in shapes (default: Qwen/Qwen3-32B,meta-llama/Meta-Llama-3-70B; on a CPU tiny-qwen3)",
    )  # fmt: skip
    command.add_argument(
        "--rows", metavar="A,B", type=lambda text: [int(word) for word in text.split(",")],
        help="numbers of rows M (default: powers of two from 1 to 16384; on a CPU 1,4)",
    )  # fmt: skip
    command.add_argument(
        "--table", metavar="F.json",
        help="where the choices go (default: the package's crossovers.json; on a CPU nowhere)",
    )  # fmt: skip


def _list_of(names: tuple[str, ...]):
    def words(text: str) -> list[str]:
        found = [word.strip() for word in text.split(",")]
        if wrong := [word for word in found if word not in names]:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, got {wrong[0]!r}")
        return list(dict.fromkeys(found))

    return words


def check(options: argparse.Namespace) -> None:
    """What is wrong with the options alone, before any process or tensor is made."""
    methods = getattr(options, "allreduce_method", None)
    if methods is None:
        return
    if "two_shot_multimem" in methods:
        raise ValueError(
            "--allreduce-method two_shot_multimem needs NVLink multicast, which torch_fdattn does not "
            "use: take one_shot, two_shot or nccl"
        )
    if _reduces(options) and options.strategy != ["auto"]:
        raise ValueError(
            "--strategy must be left out where activations are replicated (--allreduce-method is that of their "
            f"all-reduce), got {','.join(options.strategy)}"
        )
    for name in ("allreduce_method", "strategy") if options.name in _MODELS else ():
        if len(found := getattr(options, name)) > 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be one of a model, got {','.join(found)}"
            )


def check_method(options: argparse.Namespace, device_type: str) -> None:
    """That the methods of all-reduce, where they are used, work on the ranks' device and dtype."""
    if getattr(options, "allreduce_method", None) is None or not _reduces(options):
        return
    import torch

    from torch_fdattn.dist import symmetric_memory

    from ..runner import DTYPES

    try:
        for method in set(options.allreduce_method) & set(symmetric_memory.METHODS):
            symmetric_memory.check(method, torch.device(device_type), DTYPES[options.dtype])
    except (NotImplementedError, TypeError) as refusal:
        raise ValueError(f"--allreduce-method: {refusal}") from None


def interpret_on_cpu(options: argparse.Namespace, ranks: int) -> None:
    """Kernels of ours that were asked for run on CPUs, too; before anything of ours is imported, which reads at once
    whether to interpret. ranks: of this machine."""
    asked = [*getattr(options, "allreduce_method", []), *getattr(options, "strategy", [])]
    if options.name != "tp_crossover" and not set(asked) & set(KERNELS):
        return
    import torch

    on_cpu = options.device == "cpu" or torch.cuda.device_count() < ranks
    if on_cpu and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _reduces(options: argparse.Namespace) -> bool:
    return options.use_allreduce or getattr(options, "backend", None) == "all_reduce"


def file_name(options: argparse.Namespace) -> list[str]:
    """The parts of a run's file name that tell its form and ways apart."""
    reduces = _reduces(options)
    form = getattr(options, "backend", "all_reduce" if reduces else "ag_rs")
    ways, first = (options.allreduce_method, "nccl") if reduces else (options.strategy, "auto")
    return [part.replace("_", "-") for part in (form, *ways) if part != first]
