"""The trials that could hang or end a process, each run in a process of its own.

`run` starts it, ends it at its time limit and reads the one line that it prints. So no driver that
hangs, no NCCL watchdog that aborts and no illegal memory access takes the doctor along.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

_MARK = "fdattn-trial:"
ELEMENTS = 1 << 18  # 1 MiB: large enough to take the path that real exchanges take


def run(name: str, argument: dict[str, Any], seconds: float, **variables: str) -> dict[str, Any]:
    """What the trial printed, or {"error": why it printed nothing}."""
    program = f"from {__name__} import program; program()"
    command = [sys.executable, "-c", program, name, json.dumps(argument)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    env = {**os.environ, "PYTHONPATH": path, **variables}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {seconds:.0f} s; the trial was ended"}
    except OSError as error:
        return {"error": f"the trial could not be started: {error}"}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line[len(_MARK) :])
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return {"error": f"the trial's process ended with status {done.returncode}: {last}"}


def kernels(argument: dict[str, Any]) -> dict[str, Any]:
    """A small attention and decode on each device, against SDPA in fp64 on the CPU. This asks
    whether the kernels run at all; their accuracy is the test suite's matter."""
    errors, failed = {}, {}
    for device in argument["devices"]:
        try:
            errors[device] = _kernels_on(device)
        except Exception as error:
            failed[device] = f"{type(error).__name__}: {error}"
    return {"errors": errors, "failed": failed}


def _kernels_on(device: str) -> float:
    import torch

    import torch_fdattn

    dtype = torch.float16 if device.startswith("cuda") else torch.float32
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 20, 32, generator=generator, dtype=torch.float64).to(dtype)
    k, v = torch.randn(2, 1, 2, 20, 32, generator=generator, dtype=torch.float64).to(dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    q, k, v = q.to(device), k.to(device), v.to(device)
    out, _ = torch_fdattn.attention(q, k, v, causal=True)
    last, _ = torch_fdattn.decode(q[:, :, -1:], k, v)
    wrong = torch.stack([out.cpu() - expected, last.cpu().expand_as(out) - expected[:, :, -1:]])
    return wrong.abs().max().item()  # NaN stays NaN


def all_reduce(argument: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    rank, world, seconds = argument["rank"], argument["world"], argument["seconds"]
    limit = timedelta(seconds=seconds)
    device = torch.device(argument["device"])
    store = dist.TCPStore(
        argument["host"], argument["port"], None, False, limit, wait_for_workers=False
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        argument["backend"],
        store=dist.PrefixStore(argument["prefix"], store),
        rank=rank,
        world_size=world,
        timeout=limit,
    )
    values = torch.full((ELEMENTS,), rank + 1.0, device=device)
    dist.all_reduce(values)
    lowest, highest = values.min().item(), values.max().item()
    start = time.perf_counter()
    dist.all_reduce(torch.ones(ELEMENTS, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    dist.destroy_process_group()
    total = world * (world + 1) / 2
    if (lowest, highest) != (total, total):
        return {"error": f"wrong sum: expected {total} everywhere, got {lowest} to {highest}"}
    return {"seconds": elapsed}


def program() -> None:
    name, argument = sys.argv[1], json.loads(sys.argv[2])
    try:
        result = {"kernels": kernels, "all_reduce": all_reduce}[name](argument)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(_MARK + json.dumps(result), flush=True)
    # A group whose peers are gone may wait for them on its way out.
    os._exit(0)
