"""GPUs: seen, hidden or lost; peer access; multicast."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

from torch_fdattn.environment import parse_integer

from .findings import Finding
from .machine import Gpu, Machine
from .remedies import remedy_for

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_MULTICAST_OFF = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


def check_gpus(machine: Machine, env: Mapping[str, str]) -> list[Finding]:
    if not machine.torch:
        return []
    found = []
    for (name, capability, gib), group in groupby(
        enumerate(machine.gpus), key=lambda item: _kind(item[1])
    ):
        indices = [index for index, _ in group]
        which = f"cuda:{indices[0]}" + (f"-{indices[-1]}" if len(indices) > 1 else "")
        text = f"{which}: {name}, sm_{capability[0]}{capability[1]}, {gib} GiB"
        found.append(Finding("ok", "gpu", text))
    if not machine.gpus:
        found.append(_no_gpu(machine, env))
    return found + _visibility(machine, env) + _built_for(machine)


def check_peers(machine: Machine) -> list[Finding]:
    count = len(machine.peers)
    if count < 2:
        return []
    lost = [
        (i, j) for i in range(count) for j in range(count) if i != j and not machine.peers[i][j]
    ]
    pairs = count * (count - 1)
    if not lost:
        return [Finding("ok", "peers", f"direct access between all {count} GPUs ({pairs} pairs)")]
    shown = ", ".join(f"{i}->{j}" for i, j in lost[:4]) + (" ..." if len(lost) > 4 else "")
    text = f"no direct access in {len(lost)} of {pairs} pairs ({shown}): exchange goes through the host"
    remedy = (
        "one-sided exchange needs direct access: choose GPUs that share NVLink or a PCIe switch"
    )
    return [Finding("note", "peers", text, remedy)]


def check_local_rank(machine: Machine, local_rank: int) -> list[Finding]:
    """`fdattn` gives each process the GPU of its LOCAL_RANK."""
    seen = len(machine.gpus)
    if seen == 0 or local_rank < seen:
        return []
    text = (
        f"LOCAL_RANK {local_rank} has no GPU: this process sees {seen} (cuda:0 to cuda:{seen - 1})"
    )
    remedy = "start one process per visible GPU, or use --device cpu"
    return [Finding("fail", "gpu", text, remedy)]


def check_multicast(machine: Machine, env: Mapping[str, str]) -> list[Finding]:
    """Says whether NVLink multicast is switched off. It is never tried: where the fabric is broken,
    trying it can take the GPUs out of service. torch_fdattn does not need it."""
    if len(machine.gpus) < 2:
        return []
    off = [f"{name}={value}" for name, value in _MULTICAST_OFF.items() if env.get(name) == value]
    state = f"switched off by {', '.join(off)}" if off else "not switched off"
    text = f"{state}; not tried, and torch_fdattn does not need it"
    return [Finding("ok" if off else "note", "multicast", text)]


def _kind(gpu: Gpu) -> tuple[str, tuple[int, int], int]:
    return gpu.name, gpu.capability, round(gpu.gib)


def _no_gpu(machine: Machine, env: Mapping[str, str]) -> Finding:
    present = len(machine.smi or [])
    if present and not (machine.cuda or machine.hip):
        text = f"nvidia-smi sees {present} GPU(s), but this torch ({machine.torch}) is a CPU build"
        return Finding("warn", "gpu", text, "install torch's CUDA build to use them")
    hidden = [
        f"{name}={env[name]!r}" for name in _HIDING if env.get(name, "0").strip() in ("", "-1")
    ]
    if hidden:
        level = "warn" if present else "note"
        text = f"{', '.join(hidden)} hides every GPU"
        return Finding(level, "gpu", text, f"unset {hidden[0].split('=')[0]} to use them")
    if machine.smi_error:
        text = f"nvidia-smi fails: {machine.smi_error}"
        return Finding("fail", "gpu", text, "mend the driver: reinstall it or restart the machine")
    if present:
        text = f"nvidia-smi sees {present} GPU(s), but torch cannot use them: "
        text += machine.cuda_error or machine.unread.get("CUDA", "no reason given")
        remedy = "compare the driver with torch's CUDA version"
        return Finding("fail", "gpu", text, remedy_for(text, remedy))
    if machine.cuda or machine.hip:
        reason = f" ({machine.cuda_error})" if machine.cuda_error else ""
        remedy = "start the container with --gpus all if the host has GPUs"
        remedy = remedy if machine.container else ""
        return Finding("note", "gpu", f"none found{reason}: everything runs on the CPU", remedy)
    return Finding(
        "note", "gpu", "none found, and torch is a CPU build: everything runs on the CPU"
    )


def _visibility(machine: Machine, env: Mapping[str, str]) -> list[Finding]:
    """A list that names a GPU which is not there: CUDA stops reading the list at that entry."""
    value = env.get("CUDA_VISIBLE_DEVICES", "")
    present = len(machine.smi or [])
    if value.strip() in ("", "-1"):
        return []
    entries = [entry.strip() for entry in value.split(",")]
    beyond = [entry for entry in entries if (parse_integer(entry) or 0) >= present]
    if present and beyond:
        text = (
            f"CUDA_VISIBLE_DEVICES={value!r} names {', '.join(beyond)}, but this machine has GPUs "
            f"0 to {present - 1}: CUDA ignores the list from there on"
        )
        return [Finding("warn", "gpu", text, "name GPUs that exist, or unset it")]
    if machine.gpus:
        all_of = f" of {present}" if present else ""
        text = f"CUDA_VISIBLE_DEVICES={value!r}: {len(machine.gpus)}{all_of} GPU(s) visible"
        return [Finding("ok", "gpu", text)]
    return []


def _built_for(machine: Machine) -> list[Finding]:
    """GPUs for which this torch holds neither machine code nor PTX that could become it."""
    if machine.hip or not machine.arches:
        return []
    found = []
    for capability in sorted({gpu.capability for gpu in machine.gpus}):
        if not any(_runs(arch, capability) for arch in machine.arches):
            text = (
                f"torch {machine.torch} has no code for sm_{capability[0]}{capability[1]} "
                f"(built for {', '.join(machine.arches)}): 'no kernel image is available'"
            )
            found.append(Finding("fail", "gpu", text, "install a torch build made for this GPU"))
    return found


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    found = re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])([af]?)", arch)
    if not found:
        return True
    kind, built = found.group(1), (int(found.group(2)), int(found.group(3)))
    if found.group(4) == "a":
        return built == capability
    if kind == "compute" and not found.group(4):
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]
