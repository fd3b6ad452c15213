"""Versions, extras, and which kernels a call will run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch_fdattn.environment import interpreting
from torch_fdattn.extras import install_command

from .findings import Finding
from .machine import EXTRAS, Machine
from .remedies import NEWER_DRIVER

MIN_PYTHON, MIN_TORCH, MIN_TRITON = (3, 11), (2, 11), (3, 6)
#: What the Makefile pins; pip alone takes whatever is newest.
NEWEST_TESTED = {"torch": "2.13.0", "triton": "3.7.1"}
# The NVIDIA driver's least major version for each CUDA major version (minor-version compatibility).
MIN_DRIVER = {11: 450, 12: 525, 13: 580}


def release(version: str) -> tuple[int, ...]:
    """`2.13.0a0+cpu` -> (2, 13, 0); what does not start with a number -> ()."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def check_versions(machine: Machine, env: Mapping[str, str]) -> list[Finding]:
    return [
        Finding("ok", "fdattn", machine.fdattn),
        _check_minimum("python", machine.python, MIN_PYTHON, "install a newer Python"),
        _torch(machine),
        _triton(machine, env),
        *_interpreter_trap(machine, env),
        *([_runtime(machine), _nccl(machine)] if machine.torch else []),
    ]


def check_kernels(machine: Machine, env: Mapping[str, str]) -> list[Finding]:
    """Which kernels run for CUDA tensors and for CPU tensors."""
    found = []
    if machine.gpus:
        found.append(_cuda_kernels(machine, env))
    if interpreting(env) and machine.triton:
        text = "CPU tensors: the Triton kernels, interpreted (TRITON_INTERPRET=1): slow, for tests"
        found.append(Finding("note", "kernels", text))
    elif interpreting(env):
        text = "TRITON_INTERPRET=1 asks for the interpreter, but triton is not installed"
        found.append(Finding("fail", "kernels", text, "pip install 'triton>=3.6', or unset it"))
    else:
        found.append(_cpu_kernels(env))
    return found


def check_extras(machine: Machine) -> list[Finding]:
    if "extras" in machine.unread:
        return []
    complete = [extra for extra in EXTRAS if not machine.missing.get(extra)]
    found = [Finding("ok", "extras", f"complete: {', '.join(complete)}")] if complete else []
    for extra, names in machine.missing.items():
        if names:
            text = f"{extra}: missing {', '.join(names)}"
            found.append(Finding("note", "extras", text, install_command(extra)))
    return found


def check_table(machine: Machine) -> list[Finding]:
    """Whether the tuned table, where there is one, speaks for the GPUs here."""
    if not machine.table or "the tuned table" in machine.unread:
        return []
    gpus = list(dict.fromkeys(gpu.name for gpu in machine.gpus))
    if without := [name for name in gpus if name not in machine.tuned]:
        text = f"{machine.table} has no record of {', '.join(without)} with triton {machine.triton}: the shipped tables are used"
        return [Finding("note", "tuned", text, "fdattn tune")]
    return [Finding("ok", "tuned", f"{machine.table}: {', '.join(gpus) or 'no GPU here asks it'}")]


def check_unread(machine: Machine) -> list[Finding]:
    """What could not be read about the machine, and why. A torch that does not import is a failure,
    of which `check_versions` speaks."""
    return [
        Finding("warn", "probe", f"could not read {what}: {reason}")
        for what, reason in machine.unread.items()
        if what not in ("torch", "triton")
    ]


def _check_minimum(name: str, version: str, minimum: tuple[int, int], remedy: str) -> Finding:
    bound = f"{minimum[0]}.{minimum[1]}"
    newest = NEWEST_TESTED.get(name)
    if newest and release(version)[:2] > release(newest)[:2]:
        text = f"{version} (supported: >= {bound}), newer than the newest tested, {newest}"
        return Finding("note", name, text)
    if release(version)[:2] >= minimum:
        return Finding("ok", name, f"{version} (supported: >= {bound})")
    return Finding("fail", name, f"{version} is too old (supported: >= {bound})", remedy)


def _torch(machine: Machine) -> Finding:
    if not machine.torch:
        reason = machine.unread.get("torch", "unknown reason")
        return Finding("fail", "torch", f"does not import: {reason}", "pip install 'torch>=2.11'")
    return _check_minimum("torch", machine.torch, MIN_TORCH, "pip install 'torch>=2.11'")


def _triton(machine: Machine, env: Mapping[str, str]) -> Finding:
    remedy = "pip install 'triton>=3.6' (torch's own wheels for Linux bring the matching one)"
    if machine.triton:
        return _check_minimum("triton", machine.triton, MIN_TRITON, remedy)
    level = "fail" if machine.gpus else "note"
    if "triton" in machine.unread:
        text = f"does not import: {machine.unread['triton']}"
        return Finding("fail" if machine.gpus else "warn", "triton", text, remedy)
    text = "not installed: CPU tensors only"
    return Finding(level, "triton", text, remedy if machine.gpus else "")


def interpreter_trap(triton: str | None, numpy: str | None) -> str | None:
    """Why this release of triton cannot interpret kernels with this one of numpy; None where it can."""
    if not (triton and numpy) or release(triton)[:2] != (3, 6) or release(numpy)[:2] < (2, 4):
        return None
    return (
        f"triton {triton}'s interpreter breaks on numpy {numpy} (>= 2.4): "
        "TRITON_INTERPRET=1 fails with 'only 0-dimensional arrays can be converted'"
    )


def _interpreter_trap(machine: Machine, env: Mapping[str, str]) -> list[Finding]:
    text = interpreter_trap(machine.triton, machine.numpy)
    if text is None:
        return []
    level = "fail" if interpreting(env) else "note"
    return [Finding(level, "numpy", text, "pip install 'numpy<2.4' where the interpreter is used")]


def _runtime(machine: Machine) -> Finding:
    if machine.hip:
        return Finding("ok", "runtime", f"ROCm {machine.hip}")
    driver = f"driver {machine.driver}" if machine.driver else "no driver found by nvidia-smi"
    if not machine.cuda:
        return Finding("ok", "runtime", f"torch is a CPU build; {driver}")
    needed = MIN_DRIVER.get(release(machine.cuda)[0])
    installed = release(machine.driver)
    if installed and needed and installed[0] < needed:
        text = f"driver {machine.driver} is too old for CUDA {machine.cuda} (needs >= {needed})"
        # The forward-compatibility package makes an old data-centre driver work: no failure then.
        return Finding("note" if machine.gpus else "fail", "runtime", text, NEWER_DRIVER)
    return Finding("ok", "runtime", f"CUDA {machine.cuda}, {driver}")


def _nccl(machine: Machine) -> Finding:
    text = f"NCCL {machine.nccl or 'not in this torch'}, gloo {'yes' if machine.gloo else 'no'}"
    if machine.gloo or machine.nccl:
        return Finding("ok", "backends", text)
    return Finding("note", "backends", f"{text}: only one process can work together")


def _cpu_kernels(env: Mapping[str, str]) -> Finding:
    if env.get("TORCH_FDATTN_REFERENCE") == "1":  # as ops/attention/cpu.py reads it
        text = (
            "CPU tensors: the reference for all calls (TORCH_FDATTN_REFERENCE=1): slow, for tests"
        )
        return Finding("note", "kernels", text)
    text = "CPU tensors: torch's flash kernel; the reference in plain PyTorch for softcap, dropout, float64"
    return Finding("ok", "kernels", text)


def _cuda_kernels(machine: Machine, env: Mapping[str, str]) -> Finding:
    if not machine.triton:
        text = "CUDA tensors: none, because triton is missing"
        return Finding("fail", "kernels", text, "pip install 'triton>=3.6'")
    if interpreting(env):
        text = "CUDA tensors: the Triton kernels, interpreted on the CPU (TRITON_INTERPRET=1)"
        return Finding("warn", "kernels", text, "unset TRITON_INTERPRET to run on the GPU")
    if machine.hip:
        text = "ROCm tensors: portable Triton kernels (tested by compilation only)"
        return Finding("note", "kernels", text)
    oldest = min(gpu.capability for gpu in machine.gpus)
    if oldest < (8, 0):
        text = f"CUDA tensors: portable Triton kernels, untested on sm_{oldest[0]}{oldest[1]}"
        return Finding("warn", "kernels", text, "use an Ampere GPU or later (sm_80 and up)")
    return Finding("ok", "kernels", "CUDA tensors: portable Triton kernels")
