"""`fdattn doctor`: what this machine can run, why not, and how to mend it.

Facts are read once (`machine`), judged by functions of those facts and the environment (`software`,
`gpus`, `host`, `torchrun`), and tried where only a trial tells (`trial`, `ranks`). Nothing here
raises or waits without bound.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch_fdattn.environment import parse_integer

from . import gpus, host, ranks, software, torchrun, trial
from .findings import Finding, as_json, failures, lines, screen
from .machine import Machine, inspect
from .remedies import remedy_for
from .torchrun import TorchrunLaunch

__all__ = ["Finding", "main"]

KERNEL_SECONDS = 120.0  # a first call compiles
# Far above what rounding does to values near 1, far below what a wrong kernel does.
_CLOSE = {"cuda": 1e-2, "cpu": 1e-3}


def main(json: bool = False, *, timeout: float = 30.0) -> int:
    """Prints the screen (rank 0) or the failures (other ranks); 0 if nothing must be mended.

    `timeout` bounds, in seconds, the wait for other ranks and then the all-reduce.
    """
    env = os.environ
    machine = inspect()
    launch, launch_findings = torchrun.check_launch(env, torchrun.real_network())
    rank = launch.rank if launch else _rank(env)
    rendezvous = None
    if launch and (machine.gloo or machine.nccl):
        rendezvous, findings = ranks.join(launch, ranks.own_card(machine, launch), timeout)
        launch_findings += findings
        if rendezvous and len(rendezvous.cards) == launch.world:
            launch_findings.append(ranks.add_up(rendezvous, timeout))
    findings = judge(machine, env, launch, launch_findings)
    findings += try_kernels(machine, launch)
    if rendezvous:
        rendezvous.await_first(timeout + KERNEL_SECONDS)
    try:
        show(findings, rank, json)
    finally:  # the others wait for it even where the screen could not be written
        if rendezvous:
            rendezvous.leave()
    return 1 if failures(findings) else 0


def judge(
    machine: Machine,
    env: Mapping[str, str],
    launch: TorchrunLaunch | None = None,
    launch_findings: list[Finding] | None = None,
) -> list[Finding]:
    """All findings that need no trial, in the screen's order."""
    processes = launch.local_world if launch else 1
    checks: list[Callable[[], list[Finding]]] = [
        lambda: software.check_versions(machine, env),
        lambda: gpus.check_gpus(machine, env),
        lambda: gpus.check_local_rank(machine, launch.local_rank if launch else 0),
        lambda: gpus.check_peers(machine),
        lambda: gpus.check_multicast(machine, env),
        lambda: host.check_shared_memory(machine, processes),
        lambda: host.check_container(machine),
        lambda: launch_findings or [],
        lambda: software.check_unread(machine),
        lambda: software.check_extras(machine),
        lambda: software.check_kernels(machine, env),
        lambda: software.check_table(machine),
    ]
    findings = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:
            text = f"a check failed: {type(error).__name__}: {error}"
            findings.append(Finding("warn", "doctor", text, "please report this"))
    return findings


def try_kernels(machine: Machine, launch: TorchrunLaunch | None) -> list[Finding]:
    """One small call on the CPU and on each GPU that this process uses."""
    devices = ["cpu"] + [f"cuda:{index}" for index in range(len(machine.gpus))]
    if launch and machine.gpus:
        devices = ["cpu", devices[1 + launch.local_rank % len(machine.gpus)]]
    if not machine.triton:
        devices = ["cpu"]
    result = trial.run("kernels", {"devices": devices}, KERNEL_SECONDS)
    return judge_kernels(result, devices)


def judge_kernels(result: Mapping[str, Any], devices: list[str]) -> list[Finding]:
    what = "a small attention and decode"
    failed = result.get("failed", {})
    if "error" in result:
        failed = {", ".join(devices): result["error"]}
    found = []
    for device, error in failed.items():
        text = f"{what} on {device} failed: {error}"
        remedy = remedy_for(error, "see docs/troubleshooting.md; report it if it stays")
        found.append(Finding("fail", "trial", text, remedy))
    errors = result.get("errors", {})
    shown = ", ".join(f"{device} {error:.0e}" for device, error in errors.items())
    wrong = [device for device in errors if not errors[device] < _CLOSE[device.split(":")[0]]]
    if wrong:
        text = f"{what}: wrong on {', '.join(wrong)} (largest errors: {shown})"
        found.append(Finding("fail", "trial", text, "report this with the versions above"))
    elif errors:
        found.append(Finding("ok", "trial", f"{what}: right (largest errors: {shown})"))
    return found


def show(findings: list[Finding], rank: int, json: bool) -> None:
    if rank == 0:
        print(as_json(findings) if json else screen(findings), flush=True)
        return
    # Rank 0's JSON stands alone on stdout.
    out = sys.stderr if json else sys.stdout
    for finding in failures(findings):
        print("\n".join([f"rank {rank}:", *lines(finding)]), file=out, flush=True)


def _rank(env: Mapping[str, str]) -> int:
    """The rank that speaks when the launch as a whole is not usable: 0 if in doubt."""
    return max(0, parse_integer(env.get("RANK", "")) or 0)
