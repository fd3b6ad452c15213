"""The facts about this machine, read once. Nothing here judges, and nothing here raises: what could
not be read has a default, and its reason stands in `Machine.unread`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

EXTRAS = {
    "models": ("safetensors", "tokenizers", "sentencepiece", "gguf", "huggingface_hub", "jinja2"),
    "cli": ("typer", "rich"),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "transformers": ("transformers",),
    "bench": ("matplotlib",),
}
_SMI_SECONDS = 10


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    gib: float
    uuid: str = ""


@dataclass
class Machine:
    fdattn: str = "version unknown"
    python: str = ""
    system: str = ""
    torch: str = ""
    cuda: str | None = None
    hip: str | None = None
    arches: list[str] = field(default_factory=list)
    triton: str | None = None
    numpy: str | None = None
    gloo: bool = False
    nccl: str | None = None
    gpus: list[Gpu] = field(default_factory=list)
    cuda_error: str = ""
    peers: list[list[bool]] = field(default_factory=list)
    smi: list[tuple[str, str]] | None = None  # (name, driver version) of each; None: no nvidia-smi
    smi_error: str = ""
    shm: tuple[int, int] | None = None  # bytes: size, free
    container: str = ""
    table: str = ""  # the path of the tuned table, where there is a file
    tuned: list[str] = field(default_factory=list)  # GPUs that it has a record of, for our triton
    missing: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def read(self, what: str, probe: Callable[[], T], default: T) -> T:
        try:
            return probe()
        except Exception as error:
            self.unread[what] = f"{type(error).__name__}: {error}"
            return default

    @property
    def driver(self) -> str:
        return self.smi[0][1] if self.smi else ""


def inspect() -> Machine:
    machine = Machine(python=platform.python_version(), system=platform.system())
    read = machine.read
    machine.fdattn = read("torch_fdattn's version", _own_version, machine.fdattn)
    read("torch", lambda: _read_torch(machine), None)
    machine.triton = read("triton", _triton_version, None)
    machine.numpy = read("numpy", lambda: _version("numpy"), None)
    if machine.torch:
        read("CUDA", lambda: _read_cuda(machine), None)
    machine.peers = read("peer access", lambda: _peer_matrix(len(machine.gpus)), [])
    read("nvidia-smi", lambda: _read_smi(machine), None)
    machine.shm = read("/dev/shm", _shm_size, None)
    machine.container = read("container", lambda: container_sign(_read_file), "")
    read("the tuned table", lambda: _read_table(machine), None)
    machine.missing = read("extras", _missing_extras, {})
    return machine


def container_sign(read_file: Callable[[str], str | None]) -> str:
    """The sign by which this process stands in a container, or "". `read_file` gives None where
    there is no such file."""
    for path in ("/.dockerenv", "/run/.containerenv"):
        if read_file(path) is not None:
            return path
    groups = read_file("/proc/1/cgroup") or ""
    for word in ("docker", "kubepods", "containerd", "libpod", "lxc"):
        if word in groups:
            return f"{word} in /proc/1/cgroup"
    return ""


def _read_file(path: str) -> str | None:
    file = Path(path)
    return file.read_text(errors="replace") if file.exists() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_version() -> str:
    from torch_fdattn.version import __version__

    if _version("torch-fdattn") is None:
        return f"{__version__}, from its source folder (not installed by pip)"
    return __version__


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


def _read_torch(machine: Machine) -> None:
    import torch

    machine.torch = str(torch.__version__)
    machine.cuda, machine.hip = torch.version.cuda, torch.version.hip
    if torch.distributed.is_available():
        machine.gloo = torch.distributed.is_gloo_available()
        if torch.distributed.is_nccl_available():
            machine.nccl = ".".join(map(str, torch.cuda.nccl.version()))


def _read_cuda(machine: Machine) -> None:
    import torch

    if not (machine.cuda or machine.hip):
        return
    machine.arches = torch.cuda.get_arch_list()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
        if not usable:
            try:
                torch.cuda.init()
            except Exception as error:
                # torch warns of an old driver at the first look, and says less when it raises.
                machine.cuda_error = str(caught[0].message) if caught else str(error)
            return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        machine.gpus.append(
            Gpu(
                found.name,
                (found.major, found.minor),
                found.total_memory / 2**30,
                str(getattr(found, "uuid", "")),
            )
        )


def _peer_matrix(count: int) -> list[list[bool]]:
    if count < 2:
        return []
    import torch

    return [
        [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)]
        for i in range(count)
    ]


def _read_smi(machine: Machine) -> None:
    """Every GPU of the machine, whatever CUDA_VISIBLE_DEVICES says."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return
    done = subprocess.run(
        [command, "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=_SMI_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        machine.smi, machine.smi_error = [], (done.stdout + done.stderr).strip()
        return
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    machine.smi = [(name.strip(), driver.strip()) for name, driver in rows]


def _read_table(machine: Machine) -> None:
    from torch_fdattn import tables
    from torch_fdattn.version import __version__

    path = tables.default_path()
    if path is None or not tables.is_expected(path):
        return
    machine.table = str(path)
    versions = {"triton": machine.triton, "torch_fdattn": __version__}
    machine.tuned = [x["gpu"] for x in tables.read(path) if versions.items() <= x.items()]


def _shm_size() -> tuple[int, int] | None:
    if not Path("/dev/shm").exists():
        return None
    usage = shutil.disk_usage("/dev/shm")
    return usage.total, usage.free


def _missing_extras() -> dict[str, list[str]]:
    return {
        extra: [name for name in names if importlib.util.find_spec(name) is None]
        for extra, names in EXTRAS.items()
    }
