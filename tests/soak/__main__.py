"""The command line of the soak; see the package."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests import fast_interpreter
from tests.soak import decode, loop, tp_linear
from torch_fdattn.dist import set_timeout
from torch_fdattn.ops.library import INTERPRET

#: What is called, and how often by default.
WORKS = {"decode": (decode.Decode, 100_000), "tp_linear": (tp_linear.Linear, 50_000)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("work", nargs="?", choices=WORKS, default="decode")
    parser.add_argument("--calls", type=int, help="default: 100,000 of decode, 50,000 of tp_linear")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    work, calls = WORKS[options.work]
    calls = options.calls or calls
    # A hang ends in a dump of stacks alone: what names its seed must have been said before.
    if os.environ["RANK"] == "0":
        print(f"soak of {options.work}: {calls} calls, seed {options.seed}", flush=True)
    fast_interpreter.install()
    faulthandler.dump_traceback_later(loop.HANG_S, exit=True)
    cuda = not INTERPRET and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        # Or BLAS may sum parts of a product in 16 bits, which no bound on its rounding covers.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=loop.HANG_S))
    set_timeout(60)
    start = time.monotonic()
    counts = loop.soak(work, calls, options.seed, device)
    dist.barrier()
    if dist.get_rank() == 0:
        listed = ", ".join(f"{value} {name}" for name, value in sorted(counts.items()))
        print(
            f"soak: {calls} calls of {options.work} on {dist.get_world_size()} {device.type} ranks, seed "
            f"{options.seed}, no mismatch and no hang in {time.monotonic() - start:.0f} s ({listed})",
            flush=True,
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
