"""From a recorded launch to machine code, and what it takes of a processor.

Registers and stack (spills) of NVIDIA kernels come from `cuobjdump --dump-resource-usage`, those of AMD
kernels from the metadata in their assembly.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from torch_fdattn.launch.driver_launch import DriverLaunch

from .barriers import unused_barriers
from .launches import Case, Launch, record
from .targets import ARCHS, Arch, Occupancy, occupancy
from .uniform_registers import disassembled, read_before_written


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of a processor; `spills` in bytes a thread.

    tile: BLOCK_M x BLOCK_N, where the kernel has them.
    undefined: on sm_90, instructions that read uniform registers which nothing has written.
    """

    kernel: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    undefined: tuple[str, ...] = ()
    tile: str = ""

    def occupancy(self, arch: Arch) -> Occupancy:
        return occupancy(arch, self.warps, self.registers, self.shared)


def compile_launch(launch: Launch, arch: Arch):
    """The compiled kernel of a recorded launch, as `JITFunction.run` would compile it."""
    kernel = launch.kernel
    backend = make_backend(arch.target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launch.args, **launch.kwargs)
    options, signature, constants, attrs = kernel._pack_args(
        backend, launch.kwargs, bound, specialization, options
    )
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constants, attrs)
    compiled = triton.compile(source, target=arch.target, options=options.__dict__)
    if arch.target.backend == "cuda":
        assert knows_parameters(launch, compiled), compiled.asm["ptx"].partition("{")[0]
        assert not unused_barriers(compiled.asm["ttgir"])
    return compiled


def knows_parameters(launch: Launch, compiled) -> bool:
    """Whether the driver's launch lays out the parameters that the kernel has, Triton's own included."""
    own = {k: v for k, v in launch.kwargs.items() if k in launch.kernel.signature.parameters}
    bound = launch.kernel.signature.bind(*launch.args, **own)
    bound.apply_defaults()
    kernel = SimpleNamespace(src=compiled.src, metadata=compiled.metadata, function=0)
    driver = SimpleNamespace(cuLaunchKernelEx=None)
    return DriverLaunch(kernel, (1, 1, 1), bound.args, driver).matches(compiled.asm["ptx"])


def resources(case: Case) -> list[Resources]:
    """Compiles every kernel of a case and reads what each takes."""
    return [resources_of(launch, ARCHS[case.arch]) for launch in record(case)]


def resources_of(launch: Launch, arch: Arch) -> Resources:
    compiled = compile_launch(launch, arch)
    read: Callable = nvidia_usage if arch.target.backend == "cuda" else _amd_usage
    registers, spills = read(compiled)
    meta = compiled.metadata
    name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
    undefined = ()
    if arch.name == "sm_90":
        undefined = tuple(read_before_written(disassembled(compiled.asm["cubin"])))
    sides = [str(launch.kwargs[x]) for x in ("BLOCK_M", "BLOCK_N") if x in launch.kwargs]
    return Resources(
        name, meta.num_warps, meta.num_stages, registers, spills, meta.shared, undefined, "x".join(sides)
    )  # fmt: skip


def nvidia_usage(compiled) -> tuple[int, int]:
    """(registers, bytes of stack and spills a thread) of a cubin."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\d+)", text)[1])
    return registers, int(re.search(r"STACK:(\d+)", text)[1]) + int(
        re.search(r"LOCAL:(\d+)", text)[1]
    )


def _amd_usage(compiled) -> tuple[int, int]:
    """(vector registers, bytes of scratch a thread) of a code object, from its assembly's metadata."""
    text = compiled.asm["amdgcn"]
    fields = (r"\.vgpr_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)")
    registers, scratch = (int(re.search(field, text)[1]) for field in fields)
    return registers, scratch
