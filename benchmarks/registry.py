"""Every benchmark as data: what it is called, its options, its cases, the module that measures it.

`runner.py` runs them. This file needs no torch: a typo should not take seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import cases

METHODS = (
    "auto", "nccl", "one_shot", "two_shot", "low_latency", "gemm_all_reduce", "two_shot_multimem",
)  # fmt: skip
STRATEGIES = ("auto", "collective", "copy_engine", "fused", "low_latency")
RING_STRATEGIES = ("ring", "all_gather", "one_sided", "ulysses", "star", "auto")
TILE_SIZES = ("block_m", "block_n", "num_warps", "num_stages")
PEERS = {"attention": "cudnn,fa2,flex", "decode": "fdattn/full,cudnn,fa2"}
FEATURE_PEERS = "flex,sdpa"
KV_DTYPES = ("fp8_e4m3", "fp8_e5m2", "int8")


class Option(NamedTuple):
    """An option of a command line: a flag and `argparse`'s keywords."""

    flag: str
    keywords: dict[str, object]


@dataclass(frozen=True)
class Benchmark:
    """What `python -m benchmarks NAME` measures.

    module: of this package, with what `runner.py` asks for. over_ranks: runs on the ranks of a process group,
    and starts them with --gpus N; may_be_over_ranks: on those that torchrun started, else on one device.
    """

    name: str
    help: str
    module: str
    options: tuple[Option, ...]
    cases: Sequence = ()
    over_ranks: bool = False
    may_be_over_ranks: bool = False

    def add_to(self, names) -> argparse.ArgumentParser:
        """Adds the parser to argparse's subparsers `names`."""
        command = names.add_parser(self.name, help=self.help)
        for flag, keywords in self.options:
            command.add_argument(flag, **keywords)
        command.set_defaults(benchmark=self)
        return command

    def positive(self) -> Iterable[str]:
        """The options that count something."""
        return (x.flag for x in self.options if x.keywords.get("type") is int)


def option(flag: str, help: str, **keywords: object) -> Option:
    return Option(flag, {"help": help, **keywords})


def flag(name: str, help: str, **keywords: object) -> Option:
    return option(name, help, action="store_true", **keywords)


def count(flag: str, help: str, default: int | None = None) -> Option:
    said = f" (default: {default})" if default is not None else ""
    return option(flag, help + said, type=int, default=default, metavar="N")


def comma_separated(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def choices_of(names: Sequence[str], none: bool = False) -> Callable[[str], list[str]]:
    """A type of option: comma-separated words of `names`, each once; `none`: that word is none of them."""

    def parsed(text: str) -> list[str]:
        found = [] if none and text == "none" else comma_separated(text)
        if wrong := [word for word in found if word not in names]:
            last = " or none" if none else ""
            raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}{last}, got {wrong[0]!r}")  # fmt: skip
        return list(dict.fromkeys(found))

    return parsed


RESULTS = (
    option("--json", "file or folder for results (default: benchmarks/results)", metavar="PATH"),
    option("--html", "also one HTML page with all results", metavar="PATH"),
)
REPEATS = count("--repeats", "rounds over all", 3)
CASES = option("--cases", "comma-separated parts of names or labels", metavar="TEXT")
ONE_DEVICE = (
    CASES,
    *RESULTS,
    option("--device", "cuda, cuda:N, or cpu for tiny cases", default="cuda"),
    option("--budget-s", "start no new case after S seconds", type=float, metavar="S"),
)
PEERS_DIR = option("--peers-dir", "folder of unpacked peer wheels", metavar="DIR")
SWEEP = option(
    "--sweep", f"decode's sweeps instead of the baseline cases: all, or of {', '.join(cases.SWEEPS)}",
    nargs="?", const="all", metavar="A,B",
)  # fmt: skip


def _versus(name: str) -> Option:
    text = "peers of cudnn, fa2, flex, fa3, fa4, flashinfer, eager; or all, none (default: %(default)s)"
    return option("--vs", text, default=PEERS[name], metavar="A,B")


_ATTENTION = (
    option("--passes", "of forward, backward", default="forward,backward", metavar="A,B"),
    option("--backward", "--passes backward", dest="passes", action="store_const", const="backward"),
    flag("--features", "biases, windows, dropout … in place of the baseline cases, against flex,sdpa"),
    *(
        option(f"--{size.replace('_', '-')}", "a sweep: ours with these tile sizes too", type=numbers, metavar="A,B")
        for size in TILE_SIZES
    ),
)  # fmt: skip
_DECODE = (
    SWEEP,
    option("--trace", "also a trace of a few calls of each, for Perfetto", metavar="PATH"),
)

_RANKS = (
    count("--gpus", "start N ranks on this machine"),
    option("--dtype", "default: bf16, fp32 on a CPU", choices=("bf16", "fp16", "fp32")),
    count("--repeats", "rounds over all; e2e_inference runs each once", 3),
    *RESULTS,
    option("--device", "default: cuda", default="cuda", choices=("cuda", "cpu")),
)
_RING = (
    count("--seq", "tokens", 1024),
    count("--dim", "head dim", 64),
    count("--heads", "heads", 1),
    count("--kv-heads", "heads of K and V (default: as many)"),
    flag("--causal", "causal attention"),
    count("--documents", "packed documents of so many tokens in the mean, beside one sequence of all"),
    option("--shards", "default: zigzag", choices=("contiguous", "zigzag"), default="zigzag"),
    option(
        "--strategy", f"of {', '.join(RING_STRATEGIES)} (default: ring)",
        type=choices_of(RING_STRATEGIES), default=["ring"], metavar="A,B",
    ),
    flag("--backward", "also forward and backward together"),
    option("--no-single", "no single device", dest="single", action="store_false"),
    flag("--vs-torch", "also torch's context_parallel"),
    count("--queued", "also so many calls one after another", 1),
    option("--torch-backend", "of torch's", choices=("cudnn", "fa2"), default="cudnn"),
)  # fmt: skip
_MODEL = (
    option("--model", "a built-in shape (default: %(default)s)", default="Qwen/Qwen3-32B"),
    option(
        "--allreduce-method", f"of {', '.join(METHODS[:-1])} (default: nccl)",
        type=choices_of(METHODS), default=["nccl"], metavar="A,B",
    ),
    option(
        "--strategy", f"of all-gather and reduce-scatter: of {', '.join(STRATEGIES)} (default: auto)",
        type=choices_of(STRATEGIES), default=["auto"], metavar="A,B",
    ),
    # A layer alone takes and ignores it, so that one line serves all runs of a model.
    count("--layers", "of the model"),
)  # fmt: skip
_FORM = (
    flag("--use-allreduce", "not all-gather, reduce-scatter"),
    flag("--check", "against one process with all weights"),
)
_TIMELINE = option(
    "--timeline", "also a plot of one call of each, stream by stream", metavar="F.svg"
)
_LAYER = (*_MODEL, *_FORM, _TIMELINE)
_ROWS = count("--M", "tokens", 4096)
_MODE = ("prefill", "decode")
_CROSSOVER = (
    option(
        "--models", "built-in shapes (default: Qwen/Qwen3-32B,meta-llama/Meta-Llama-3-70B; on a CPU tiny-qwen3)",
        type=comma_separated, metavar="A,B",
    ),
    option(
        "--rows", "numbers of rows M (default: powers of two from 1 to 16384; on a CPU 1,4)",
        type=numbers, metavar="A,B",
    ),
    option(
        "--table", "where the choices go (default: the package's crossovers.json; on a CPU nowhere)",
        metavar="F.json",
    ),
)  # fmt: skip
DIST_DECODE_KINDS = ("correctness", "compare", "latency", "scaling")
_DIST_DECODE = (
    option("--case", "default: compare", choices=DIST_DECODE_KINDS, default="compare"),
    CASES,
    *(
        count(f"--{name}", "of one case instead")
        for name in ("batch", "heads", "kv-heads", "kv-len", "head-dim")
    ),
    option(
        "--lengths", "of full, uniform, power, short: how long the sequences are (default: full; in correctness "
        "full,uniform,short)", metavar="A,B",
    ),
    option(
        "--strategies", "default: all, in compare without hierarchical; in scaling auto",
        type=comma_separated, metavar="A,B",
    ),
    option("--sizes", "of scaling: the numbers of ranks (default: every one)", type=numbers, metavar="A,B"),
    option(
        "--vs", "peers of nccl (gloo on a CPU), mpi; or none (default: nccl,mpi)",
        type=choices_of(("nccl", "mpi"), none=True), default=["nccl", "mpi"], metavar="A,B",
    ),
    flag("--nccl-symmetric", "also NCCL's symmetric kernels (nccl_symm)"),
)  # fmt: skip


def _one(name: str, help: str, module: str, *options: Option, cases: Sequence) -> Benchmark:
    return Benchmark(name, help, module, (*options, *ONE_DEVICE), cases)


def _ranks(name: str, help: str, module: str, *options: Option, cases: Sequence = ()) -> Benchmark:
    text = help + "; also under torchrun"
    return Benchmark(name, text, f"distributed.{module}", (*options, *_RANKS), cases, True)


_CONTIGUOUS = [case for case in cases.DECODE_CASES if case.page is None]
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        _one(
            "attention", "prefill and training: forward and backward TFLOP/s", "attention",
            _versus("attention"), *_ATTENTION, REPEATS, PEERS_DIR, cases=cases.ATTENTION_CASES,
        ),
        _one(
            "decode", "one query token against a cache: µs, GB/s, percent of a pure read", "decode",
            _versus("decode"), *_DECODE, REPEATS, PEERS_DIR, cases=cases.DECODE_CASES,
        ),
        _one(
            "fp8", "attention_fp8 beside bf16 and FlashAttention-3's: forward TFLOP/s, errors", "fp8",
            REPEATS, PEERS_DIR, cases=cases.FP8_CASES,
        ),
        _one("floors", "the machine alone: matmul and pure reads", "floors", REPEATS, cases=_CONTIGUOUS),
        _one(
            "compile", "layers of transformers' models under torch.compile", "compiled", REPEATS,
            option("--no-compile-times", "steps alone", dest="compile_times", action="store_false"),
            cases=cases.COMPILE_CASES,
        ),
        Benchmark(
            "cpu", "attention of CPU tensors beside torch's SDPA, eager and compiled", "cpu",
            (
                count("--repeats", "rounds over all", 9), CASES, *RESULTS,
                option("--device", "cpu", default="cpu", choices=("cpu",)),
                option("--budget-s", "start no new case after S seconds", type=float, metavar="S"),
            ),
            cases.CPU_CASES,
        ),
        Benchmark(
            "generate", "a real model: tokens/s, also under torchrun", "generate",
            (REPEATS, *ONE_DEVICE), cases.GENERATE_CASES, may_be_over_ranks=True,
        ),
        Benchmark(
            "quantised_caches", "KL divergence and perplexity of a real model over caches of one byte an element",
            "quantised_caches",
            (
                option("--model", "as models.load_model's (default: %(default)s)", default="smollm2"),
                option("--texts", "files (default: some prose of the tests)", type=comma_separated, default=[], metavar="A,B"),
                count("--tokens", "of each text, at most", 1024),
                option(
                    "--kv-dtypes", f"of {', '.join(KV_DTYPES)} (default: all)", type=choices_of(KV_DTYPES),
                    default=list(KV_DTYPES), metavar="A,B",
                ),
                option("--dtype", "of weights and the cache that they are compared with (default: bf16, fp32 on a CPU)", choices=("bf16", "fp16", "fp32")),
                *RESULTS,
                option("--device", "cuda, cuda:N, or cpu", default="cuda"),
            ),
        ),
        _one(
            "host", "the host time of one eager decode call by parts; of the first decode case, or of --cases", "host",
            count("--repeats", "rounds over all", 15), cases=_CONTIGUOUS,
        ),
        _one(
            "sweep_attention", "attention's kernels, each alone, at lists of tiles", "sweep_attention",
            option("--kernels", "default: %(default)s", default="forward,dkdv,dq", metavar="A,B"),
            option("--configs", "instead of the built-in lists, e.g. 128x64w8s3", metavar="A,B"),
            count("--jobs", "threads that compile", 8), REPEATS, cases=cases.ATTENTION_CASES,
        ),
        _ranks("ring", "ring attention against one device", "ring", *_RING),
        _ranks("tp_mlp", "a tensor-parallel MLP", "layers", _ROWS, *_LAYER),
        _ranks("ag_gemm", "all-gather, then the gate and up matmul", "matmuls", _ROWS, *_LAYER),
        _ranks("gemm_rs", "the down matmul, then reduce-scatter", "matmuls", _ROWS, *_LAYER),
        _ranks(
            "tp_attn", "a tensor-parallel attention layer", "layers", count("--bsz", "sequences", 32),
            count("--seq-len", "tokens of each", 128),
            option("--mode", "default: prefill", choices=_MODE, default="prefill"), *_LAYER,
        ),
        _ranks("tp_crossover", "from how many rows on which strategy is the fastest", "crossover", *_CROSSOVER),
        _ranks(
            "e2e", "a whole model: prefill and decode step", "end_to_end", count("--bsz", "sequences", 8),
            count("--seq-len", "tokens of each", 256), option("--mode", "default: both", choices=_MODE),
            flag("--eager", "also our decode step without its CUDA graph"),
            count("--kv-ranks", "ranks that share the cache by position, the model split over the others; ours alone", 1),
            *_MODEL, *_FORM,
        ),
        _ranks(
            "e2e_inference", "a whole generation: latency and tokens/s", "end_to_end",
            count("--bsz", "sequences", 128), count("--gen-len", "new tokens", 128),
            count("--max-length", "tokens in all", 150),
            option(
                "--backend", "default: all_reduce", choices=("torch", "ag_rs", "all_reduce", "auto"),
                default="all_reduce",
            ),
            *_MODEL,
        ),
        _ranks(
            "dist_decode", "decode over a sharded KV cache; also under mpirun", "dist_decode", *_DIST_DECODE,
            cases=cases.DIST_DECODE_CASES,
        ),
    )
}  # fmt: skip
#: Commands whose code stands elsewhere, with an `add_command` of their own.
ELSEWHERE = (
    "examples.kernel_ladder.run", "tests.compile_only.resources", "examples.training_curves.command",
    "benchmarks.serving",
    "benchmarks.distributed.suite",
)  # fmt: skip


def cases_of(options: argparse.Namespace, name: str) -> Sequence:
    """The cases that a command line is about, before --cases."""
    if getattr(options, "features", False):
        return cases.FEATURE_CASES
    axes = getattr(options, "sweep", None)
    if axes is None:
        return BENCHMARKS[name].cases
    if name != "decode":
        raise ValueError(f"--sweep must be given for decode, got it for {name}")
    return cases.swept(axes)
