"""What is wrong with the options of runs over ranks, before any process or tensor is made; their files' names."""

from __future__ import annotations

import argparse
import os
import sys

#: Strategies and methods that are kernels of ours: on a CPU they are interpreted.
KERNELS = ("copy_engine", "fused", "low_latency", "gemm_all_reduce")
#: Runs that launch kernels of ours whatever is asked for.
_ALWAYS_KERNELS = ("tp_crossover", "dist_decode")
#: Runs of a model that is built for one strategy.
_MODELS = ("e2e", "e2e_inference")


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for what is wrong with the options alone."""
    if not hasattr(options, "allreduce_method"):
        return
    if "two_shot_multimem" in options.allreduce_method:
        raise ValueError(
            "--allreduce-method two_shot_multimem needs NVLink multicast, which torch_fdattn does not "
            "use: take one_shot, two_shot or nccl"
        )
    if reduces(options) and options.strategy != ["auto"]:
        raise ValueError(
            "--strategy must be left out where activations are replicated (--allreduce-method is that of their "
            f"all-reduce), got {','.join(options.strategy)}"
        )
    for name in ("allreduce_method", "strategy") if options.name in _MODELS else ():
        if len(found := getattr(options, name)) > 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be one of a model, got {','.join(found)}")
    from .models import config_named

    config_named(options.model, options.layers)


def check_method(options: argparse.Namespace, device_type: str) -> None:
    """That the methods of all-reduce, where they are used, work on the ranks' device and dtype."""
    if not hasattr(options, "allreduce_method") or not reduces(options):
        return
    import torch

    from torch_fdattn.dist.symm import symmetric_memory

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
    if options.name not in _ALWAYS_KERNELS and not set(asked) & set(KERNELS):
        return
    import torch

    on_cpu = options.device == "cpu" or torch.cuda.device_count() < ranks
    if on_cpu and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def reduces(options: argparse.Namespace) -> bool:
    """Whether activations are replicated."""
    named = getattr(options, "backend", None) == "all_reduce"
    return named or getattr(options, "use_allreduce", False)


def file_name(options: argparse.Namespace) -> str:
    """Runs that differ in form, variants or size have files of their own."""
    form = getattr(options, "backend", "all_reduce" if reduces(options) else "ag_rs")
    variants, first = (options.strategy, "auto")
    if reduces(options):
        variants, first = (options.allreduce_method, "nccl")
    parts = [options.name, *(part for part in (form, *variants) if part != first)]
    parts += [mode] if (mode := getattr(options, "mode", None)) else []
    parts += [f"bsz{options.bsz}"] if hasattr(options, "bsz") else []
    parts += [f"kv{kv}"] if (kv := getattr(options, "kv_ranks", 1)) > 1 else []
    return "-".join(parts).replace("_", "-")
