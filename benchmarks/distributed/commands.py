"""The command lines of the distributed runs; underscores in options are taken for hyphens."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from . import parallel_options

NAMES = (
    "ring", "tp_mlp", "ag_gemm", "gemm_rs", "tp_attn", "tp_crossover", "e2e", "e2e_inference", "dist_decode",
)  # fmt: skip
DIST_DECODE = ("correctness", "compare", "latency", "scaling")
STRATEGIES = ("ring", "all_gather", "ulysses", "query_split", "star")


def normalised(words: Sequence[str]) -> list[str]:
    """`--use_allreduce` as `--use-allreduce`; values stay as they are."""
    found = []
    for word in words:
        option, equals, value = word.partition("=")
        found.append(option.replace("_", "-") + equals + value if word.startswith("--") else word)
    return found


def add_commands(names) -> None:
    """Adds the parsers to argparse's subparsers `names`."""
    ring = _command(names, "ring", "ring attention against one device")
    ring.add_argument("--seq", type=int, default=1024, help="tokens (default: 1024)")
    ring.add_argument("--dim", type=int, default=64, help="head dim (default: 64)")
    ring.add_argument("--heads", type=int, default=1)
    ring.add_argument("--causal", action="store_true")
    ring.add_argument("--shards", choices=("contiguous", "zigzag"), default="zigzag")
    ring.add_argument(
        "--strategy", type=_strategies, default=["ring"], metavar="A,B",
        help=f"of {', '.join(name for name in STRATEGIES if name != 'query_split')} (default: ring)",
    )  # fmt: skip
    ring.add_argument("--backward", action="store_true", help="also forward and backward together")
    ring.add_argument("--no-single", dest="single", action="store_false", help="no single device")
    ring.add_argument("--vs-torch", action="store_true", help="also torch's context_parallel")
    ring.add_argument("--torch-backend", choices=("cudnn", "fa2"), default="cudnn")

    for name, text in (
        ("tp_mlp", "a tensor-parallel MLP"),
        ("ag_gemm", "all-gather, then the gate and up matmul"),
        ("gemm_rs", "the down matmul, then reduce-scatter"),
    ):
        command = _command(names, name, text)
        command.add_argument("--M", type=int, default=4096, help="tokens (default: 4096)")
        parallel_options.add(command)
    command = _command(names, "tp_attn", "a tensor-parallel attention layer")
    command.add_argument("--bsz", type=int, default=32)
    command.add_argument("--seq-len", type=int, default=128)
    command.add_argument("--mode", choices=("prefill", "decode"), default="prefill")
    parallel_options.add(command)

    parallel_options.add_crossover(
        _command(names, "tp_crossover", "from how many rows on which strategy is the fastest")
    )

    _add_dist_decode(names)
    command = _command(names, "e2e", "a whole model: prefill and decode step")
    command.add_argument("--bsz", type=int, default=8)
    command.add_argument("--seq-len", type=int, default=256)
    command.add_argument("--mode", choices=("prefill", "decode"), help="default: both")
    command.add_argument(
        "--eager", action="store_true", help="also our decode step without its CUDA graph"
    )
    parallel_options.add(command, layers=True)
    command = _command(names, "e2e_inference", "a whole generation: latency and tokens/s")
    command.add_argument("--bsz", type=int, default=128)
    command.add_argument("--gen-len", type=int, default=128)
    command.add_argument("--max-length", type=int, default=150)
    command.add_argument(
        "--backend", choices=("torch", "ag_rs", "all_reduce", "auto"), default="all_reduce"
    )
    parallel_options.add(command, layers=True, generation=True)


def _add_dist_decode(names) -> None:
    command = _command(names, "dist_decode", "decode over a sharded KV cache; also under mpirun")
    command.add_argument("--case", choices=DIST_DECODE, default="compare")
    command.add_argument(
        "--cases", metavar="TEXT", help="comma-separated parts of cases' names (list dist_decode)"
    )
    for option in ("batch", "heads", "kv-heads", "kv-len", "head-dim"):
        command.add_argument(f"--{option}", type=int, metavar="N", help="of one case instead")
    command.add_argument(
        "--lengths", metavar="A,B",
        help="of full, uniform, power, short: how long the sequences are (default: full; in "
        "correctness full,uniform,short)",
    )  # fmt: skip
    command.add_argument(
        "--strategies", type=_words, metavar="A,B",
        help="default: all, in compare without hierarchical; in scaling auto",
    )  # fmt: skip
    command.add_argument(
        "--vs", type=_peers, default=_peers("nccl,mpi"), metavar="A,B",
        help="peers of nccl (gloo on a CPU), mpi; or none (default: nccl,mpi)",
    )  # fmt: skip
    command.add_argument(
        "--nccl-symmetric", action="store_true", help="also NCCL's symmetric kernels (nccl_symm)"
    )


def _command(names, name: str, text: str) -> argparse.ArgumentParser:
    command = names.add_parser(name, help=text + "; also under torchrun")
    command.add_argument("--gpus", type=int, metavar="N", help="start N ranks on this machine")
    command.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="default: bf16, fp32 on a CPU"
    )
    command.add_argument(
        "--repeats", type=int, default=3,
        help="rounds over all (default: 3); e2e_inference runs each once",
    )  # fmt: skip
    command.add_argument("--json", metavar="PATH", help="file or folder for the results")
    command.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    command.set_defaults(run=run)
    return command


def _strategies(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    if wrong := [word for word in found if word not in STRATEGIES or word == "query_split"]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(STRATEGIES)}, got {wrong[0]!r}")
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _peers(text: str) -> list[str]:
    found = [] if text == "none" else _words(text)
    if wrong := [word for word in found if word not in ("nccl", "mpi")]:
        raise argparse.ArgumentTypeError(f"must be of nccl, mpi or none, got {wrong[0]!r}")
    return found


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """The exit status: 1 where a check fails."""
    from . import mpi

    mpi.adopt()  # before torch is imported, since it sets how many threads torch takes
    from .. import ranks as processes

    here = os.environ.get("LOCAL_WORLD_SIZE") or options.gpus or 1
    parallel_options.interpret_on_cpu(options, int(here))
    _check(options)
    if torchrun := processes.under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if options.gpus not in (None, size):
            raise ValueError(
                f"--gpus must be {size} like torchrun's WORLD_SIZE, or left out, got {options.gpus}"
            )
    else:
        count = options.gpus or (2 if options.name == "ring" else 1)
        if count > 1:
            return processes.start_ranks(count, words)
    import torch.distributed as dist

    ranks = processes.join(options.device)
    try:
        status = _measure(options, words, ranks)
        dist.barrier()  # none leaves while another still talks to it
    finally:
        dist.destroy_process_group()
    if torchrun:
        # With gloo about one process in thirty aborts in a static destructor after main ("terminate called
        # without an active exception", torch 2.13): everything is written, so leave without them.
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.finish()
        os._exit(status)
    return status


def _check(options: argparse.Namespace) -> None:
    """What is wrong with the options alone, before any process or tensor is made."""
    for name in (
        "gpus", "seq", "heads", "M", "bsz", "seq_len", "gen_len", "repeats", "batch", "kv_heads", "kv_len",
        "head_dim",
    ):  # fmt: skip
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    parallel_options.check(options)
    if getattr(options, "model", None) is not None:
        from .models import config_named

        config_named(options.model, options.layers)


def _measure(options: argparse.Namespace, words: Sequence[str], ranks) -> int:
    from ..report.tables import render
    from ..results import Recorder, Results, collect_meta, output_path
    from . import mpi

    options.dtype = options.dtype or ("fp32" if ranks.device.type == "cpu" else "bf16")
    parallel_options.check_method(options, ranks.device.type)
    function, table = _function(options.name, ranks.device.type)
    meta = collect_meta(words, ranks.device, ranks.size, mpi.under_mpirun())
    path = None
    if ranks.rank == 0:
        path = output_path(options.json or _default_path(options), meta, _file_name(options))
    recorder = Recorder(Results(meta), path)
    try:
        holds = function(options, ranks, recorder)
    finally:
        if (
            recorder.results.rows
        ):  # what a run that fails has measured; a wrong command measured nothing
            recorder.save()
    if ranks.rank == 0:
        print(table(recorder.results) or render(recorder.results))
        print(f"Written to {path}" if path else "Not written: figures from a CPU are no results.")
    return 0 if holds else 1


def _function(name: str, device_type: str) -> tuple[Callable, Callable[..., str]]:
    """(what measures it, its table); triton, which they import, reads at once whether to interpret."""
    if name == "dist_decode":
        if device_type == "cpu" and "triton" not in sys.modules:
            os.environ.setdefault("TRITON_INTERPRET", "1")
        from ..report import sharded_decode as decode_report
        from . import dist_decode

        return dist_decode.run, decode_report.table
    if name == "tp_crossover":
        from . import crossover

        return crossover.run, crossover.table
    from ..report import parallel as report
    from . import end_to_end, layers, matmuls, ring

    module = next(m for m in (ring, end_to_end, layers, matmuls) if hasattr(m, name))
    return getattr(module, name), report.table


def _default_path(options: argparse.Namespace) -> str | None:
    """None: among the results. dist_decode writes to the current folder, its two main runs to one name."""
    if options.name != "dist_decode":
        return None
    kind = options.case if options.case in ("latency", "scaling") else "compare"
    return f"{kind}_results.json"


def _file_name(options: argparse.Namespace) -> str:
    """Runs that differ in kind have files of their own, so that the newest of each can be found."""
    parts = [options.name.replace("_", "-")]
    if options.name == "ring":
        parts += [str(options.seq)]
    elif options.name == "dist_decode":
        parts += [options.case]
    elif options.name == "tp_crossover":
        pass
    elif options.name == "e2e_inference":
        parts += [*parallel_options.file_name(options), f"bsz{options.bsz}"]
    else:
        parts += parallel_options.file_name(options)
        if getattr(options, "mode", None):
            parts += [options.mode]
        if hasattr(options, "bsz"):
            parts += [f"bsz{options.bsz}"]
    return "-".join(parts)
