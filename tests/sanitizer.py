"""compute-sanitizer over drawn cases of every op: `python -m tests.sanitizer` on a machine with a GPU.

memcheck sees an access outside an allocation, so PyTorch's caching of memory is off: each tensor is an
allocation of its own. A planted overrun comes first, which must be reported, or a clean run says nothing.
racecheck sees hazards in shared memory. Both slow a kernel down a great deal, hence the few cases a tool.
Needs compute-sanitizer of CUDA 13. Of 13.0 (2025.3.1) racecheck ended some cases with "Internal Sanitizer Error",
without a hazard; that of the wheel nvidia-cuda-sanitizer-api 13.5.25 did not, and the wheel's goes first.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
FOUND = 99  # the exit code that the tool is asked for
#: Kernels that are looked at; PyTorch's have mangled names, and racecheck finds hazards in some of them.
OURS = "^_?[a-z_]+_kernel"
DRAWN = {
    "attention": "tests/ops/attention/test_attention_drawn.py::test_drawn",
    "features": "tests/ops/attention/test_attention_features.py::test_drawn",
    "varlen_attention": "tests/ops/varlen_attention/test_varlen_drawn.py::test_drawn",
    "decode": "tests/ops/decode/test_decode_drawn.py::test_drawn",
    "serving": "tests/ops/decode/test_serving_drawn.py::test_drawn",
    "append_kv": "tests/ops/append_kv/test_append_drawn.py::test_drawn",
    "merge_states": "tests/ops/merge_states/test_merge_drawn.py::test_drawn",
    "hopper": "tests/ops/attention/test_hopper_drawn.py::test_drawn",
    "hopper_varlen": "tests/ops/varlen_attention/test_varlen_hopper_drawn.py::test_drawn",
    "hopper_fp8": "tests/ops/attention_fp8/test_fp8_hopper_drawn.py::test_drawn",
}
#: Taken whole: what drawn cases are too short to reach.
FILES = {
    "row_ranges": "tests/ops/attention/test_row_ranges.py",
    "hopper_pairs": "tests/ops/attention/test_hopper_pairs.py",
    "hopper_packed_pages": "tests/ops/attention/test_hopper.py::test_packed_sequences_over_pages",
    "hopper_pages": "tests/ops/varlen_attention/test_varlen_hopper_pages.py",
}


@dataclass(frozen=True)
class Job:
    """One process under one tool."""

    tool: str
    name: str
    arguments: tuple[str, ...]

    def run(self, sanitizer: str, limit_s: float) -> tuple[int, str]:
        """(exit code, output); -1 where the time did not suffice."""
        command = [
            sanitizer, "--tool", self.tool, "--error-exitcode", str(FOUND), "--kernel-name", f"regex={OURS}",
            sys.executable, *self.arguments,
        ]  # fmt: skip
        environment = {
            **os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1", "CUDA_LAUNCH_BLOCKING": "1",
            "FDATTN_DRAWN": "1000",  # on a GPU tests have fewer seeds than may be asked for
        }  # fmt: skip
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return (
                -1,
                f"no end within {limit_s:.0f} s\n{(late.stdout or b'').decode(errors='replace')}",
            )
        return done.returncode, done.stdout + done.stderr


def find_sanitizer() -> str:
    """compute-sanitizer of the CUDA toolkit, or of NVIDIA's wheel `nvidia-cuda-sanitizer-api`."""
    wheel = importlib.util.find_spec("nvidia")
    places = [
        str(path)
        for folder in (wheel.submodule_search_locations if wheel else ())
        for path in Path(folder).glob("cu*/bin/compute-sanitizer")
    ]
    places.append(shutil.which("compute-sanitizer"))
    found = next((place for place in places if place), None)
    if found is None:
        sys.exit("compute-sanitizer was not found: it is part of the CUDA toolkit and of the wheel nvidia-cuda-sanitizer-api")  # fmt: skip
    return found


def plant_overrun() -> None:
    """Writes one element behind a tensor."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def overrun_kernel(out, count):
        tl.store(out + count, 1.0)

    out = torch.zeros(128, device="cuda")
    overrun_kernel[(1,)](out, out.numel())  # 512 bytes: what allocations are rounded up to
    torch.cuda.synchronize()


def jobs(tool: str, ops: list[str], cases: int, shards: int) -> list[Job]:
    """The cases of each op in `shards` processes, or a file's tests in one."""
    made = []
    for op in ops:
        if op in FILES:
            made.append(Job(tool, op, (*PYTEST, FILES[op])))
            continue
        for shard in range(min(shards, cases)):
            ids = [f"{DRAWN[op]}[{seed}]" for seed in range(shard, cases, shards)]
            made.append(Job(tool, f"{op}, {len(ids)} cases", (*PYTEST, *ids)))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer", description=__doc__)
    parser.add_argument("--tool", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--ops", nargs="+", choices=[*DRAWN, *FILES], default=[*DRAWN, *FILES])
    parser.add_argument("--cases", type=int, default=24, help="of each op (default: %(default)s)")
    parser.add_argument(
        "--shards", type=int, default=3, help="processes an op (default: %(default)s)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=600, help="for one process (default: %(default)s)"
    )
    parser.add_argument("--overrun", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.overrun:
        plant_overrun()
        return 0

    sanitizer, failed = find_sanitizer(), False
    code, text = Job("memcheck", "overrun", ("-m", "tests.sanitizer", "--overrun")).run(
        sanitizer, options.limit_s
    )
    if code != FOUND or "Invalid __global__ write" not in text:
        print(f"memcheck did not report the planted overrun (exit code {code}):\n{text[-2000:]}")
        return 1
    print("memcheck: the planted overrun was reported", flush=True)

    def timed(job: Job) -> tuple[Job, int, str, float]:
        start = time.monotonic()
        return job, *job.run(sanitizer, options.limit_s), time.monotonic() - start

    chosen = [
        job
        for tool in options.tool
        for job in jobs(tool, options.ops, options.cases, options.shards)
    ]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        for job, code, text, seconds in pool.map(timed, chosen):
            failed |= code != 0
            said = [
                line
                for line in text.splitlines()
                if " passed" in line or " failed" in line or "SUMMARY" in line
            ]
            print(
                f"{job.tool} {job.name}: exit code {code}, {seconds:.0f} s; {'; '.join(said)}",
                flush=True,
            )
            if code:
                reports = [line for line in text.splitlines() if line.startswith("=====")]
                print("\n".join(reports[:60]), text[-2000:], sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
