"""A GPU and a process group that are not there: what the package asks of them, answered.

For a process that does nothing else: `install` is not taken back. Tensors are on the CPU (of ops: their kernels for CPU
and CUDA tensors are one function) or on the meta device (of strategies below the ops, which multiply matrices, too).
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import torch

import torch_fdattn
from tests.golden import recorder


class Device(NamedTuple):
    """A GPU as tiles, grids and dispatch see it."""

    hardware: str  # of attention's dispatch table
    capability: tuple[int, int]
    multiprocessors: int
    fast_memory: bool = False


H100 = Device("sm_90", (9, 0), 132)
H200 = Device("sm_90", (9, 0), 132, fast_memory=True)
A100 = Device("sm_80", (8, 0), 108)
B200 = Device("sm_100", (10, 0), 148)
MI300 = Device("AMD", (0, 0), 304)

RANK, WORLD = 1, 4

#: The device of the call under way, the size of its process group, and who is told the names of channels' memory.
now = types.SimpleNamespace(device=H100, world=WORLD, names=None)


def modules() -> list[types.ModuleType]:
    """All of the package that launches kernels, imported."""
    for package in ("launch", "ops", "dist"):
        folder = importlib.import_module(f"torch_fdattn.{package}")
        for found in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            importlib.import_module(found.name)
    return [x for name, x in sys.modules.items() if name.startswith(f"{torch_fdattn.__name__}.")]


def install() -> None:
    everything = modules()
    from torch_fdattn.dist import consensus, groups
    from torch_fdattn.dist.symm import availability
    from torch_fdattn.dist.symm import channel as channels
    from torch_fdattn.launch import device, launches, pdl
    from torch_fdattn.ops import library
    from torch_fdattn.ops import pdl as dependent
    from torch_fdattn.ops.attention import configs, dispatch
    from torch_fdattn.ops.decode import schedule

    rows_of_table = dispatch._rows

    def everywhere(function: Callable, answer: Callable) -> None:
        """Replaces a function in each module that has imported it."""
        places = [(m, n) for m in everything for n, value in vars(m).items() if value is function]
        assert places, function
        for module, name in places:
            setattr(module, name, answer)

    def rows_for(way, hardware, *rest):
        return rows_of_table(way, now.device.hardware, *rest)

    everywhere(library.use_triton, lambda tensor: True)
    everywhere(dispatch._rows, rows_for)
    everywhere(configs.device_capability, lambda device: now.device.capability)
    everywhere(device.num_sms, lambda device: now.device.multiprocessors)
    everywhere(schedule.fast_memory, lambda device: now.device.fast_memory)
    early = pdl.supports_pdl
    everywhere(dependent.uses_pdl, lambda tensor: early(now.device.capability))
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
        multi_processor_count=now.device.multiprocessors
    )

    everywhere(groups.rank_and_size, lambda *args: (RANK, now.world))
    everywhere(consensus.check_equal_on_all_ranks, lambda *args, **kwargs: None)
    everywhere(availability.unsupported_reason, lambda *args: None)
    everywhere(channels.channel, _channel)

    recorder.limits_of(launches.Launch, "through_triton", "max_ctas_per_sm")
    recorder.install()


def _channel(group_name: str, purpose: str, half_bytes: int, device: torch.device):
    """As `channel.channel` makes it; its memory is named by its purpose."""
    from torch_fdattn.dist.symm.channel import size_of_half
    from torch_fdattn.dist.symm.signals import STATE_SIZE
    from torch_fdattn.dist.symm.symmetric_memory import PeerMemory

    half_bytes = size_of_half(half_bytes)
    memory = torch.empty(2 * half_bytes, dtype=torch.uint8, device=device)
    addresses, state, fault = (
        torch.empty(count, dtype=torch.int64, device=device) for count in (now.world, STATE_SIZE, 1)
    )
    where = purpose.replace("/", "_").replace("torch.", "")
    tensors = dict(memory=memory, addresses=addresses, state=state, fault=fault)
    now.names.add({f"channel_{where}.{name}": x for name, x in tensors.items()})
    return types.SimpleNamespace(
        rank=RANK, world=now.world, half_bytes=half_bytes, state=state, enter=lambda: None, outgrown=False,
        memory=PeerMemory(memory, addresses, None, (memory,) * now.world),
        fault=types.SimpleNamespace(tensor=fault, raise_if_set=lambda: None),
    )  # fmt: skip


def kernels() -> set[str]:
    """The package's kernels, by the names that launches have; functions that kernels call are none."""
    from triton.runtime.jit import JITFunction

    found = (
        (module.__name__.removeprefix(recorder.PACKAGE), name, value)
        for module in modules()
        for name, value in vars(module).items()
    )
    return {
        f"{module}.{name}"
        for module, name, value in found
        if isinstance(value, JITFunction) and name.endswith("_kernel")
        and value.fn.__module__ == recorder.PACKAGE + module
    }  # fmt: skip
