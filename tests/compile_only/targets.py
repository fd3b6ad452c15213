"""The compilation targets with the limits of one processor (SM or CU) of each, and occupancy from them.

Sources: NVIDIA's CUDA Programming Guide, appendix Compute Capabilities (registers, warps, blocks and shared
memory per multiprocessor and block; 1 KiB of shared memory a block is the system's own) and the Ampere, Hopper
and Blackwell tuning guides; granularities are those of the CUDA occupancy calculator. AMD's CDNA3 and CDNA4 ISA
documents, and LLVM's AMDGPU target (`AMDGPUBaseInfo.cpp`: waves per EU, allocation granules, barriers), whose own
figure for registers stands in each kernel's assembly (held by `test_resources.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

KIB = 1024


@dataclass(frozen=True)
class Arch:
    """A target, the capability that the config tables see, and its limits.

    shared_limit: bytes a block may take; shared_size: what a processor has for all of its blocks.
    Registers are counted by warp: each of `units` schedulers has room for `unit_registers` of each lane
    of all its warps.
    """

    name: str
    target: GPUTarget
    capability: tuple[int, int]
    shared_limit: int
    shared_size: int
    shared_granule: int
    shared_reserved: int  # of every block, by the system
    unit_registers: int
    register_granule: int
    max_warps: int
    max_blocks: int
    units: int = 4


def _nvidia(name: str, major: int, shared_size: int) -> Arch:
    # 64 Ki registers in four partitions, 32 lanes a warp, handed out in eights a lane.
    return Arch(
        name, GPUTarget("cuda", 10 * major, 32), (major, 0), (shared_size - 1) * KIB, shared_size * KIB,
        shared_granule=128, shared_reserved=KIB, unit_registers=512, register_granule=8, max_warps=64,
        max_blocks=32,
    )  # fmt: skip


def _amd(name: str, shared_size: int, shared_granule: int) -> Arch:
    # VGPRs and AGPRs are one file of 512 a lane of each SIMD; 16 barriers a CU bound blocks of several waves.
    return Arch(
        name, GPUTarget("hip", name, 64), (0, 0), shared_size * KIB, shared_size * KIB,
        shared_granule=shared_granule, shared_reserved=0, unit_registers=512, register_granule=8, max_warps=32,
        max_blocks=16,
    )  # fmt: skip


ARCHS = {
    arch.name: arch
    for arch in (
        _nvidia("sm_80", 8, 164),
        _nvidia("sm_90", 9, 228),
        _nvidia("sm_100", 10, 228),
        _amd("gfx942", 64, 512),
        _amd("gfx950", 160, 1280),
    )
}


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel one processor holds at once; `limit`: what allows no more."""

    blocks: int
    warps: int
    max_warps: int
    limit: str

    @property
    def percent(self) -> float:
        return 100 * self.warps / self.max_warps


def occupancy(arch: Arch, warps: int, registers: int, shared: int) -> Occupancy:
    """Of a kernel of so many warps (or waves) a block, registers a lane and bytes of shared memory.

    Grids too small to fill the processors, and clusters, are not considered.
    """
    per_unit = arch.unit_registers // _rounded(max(registers, 1), arch.register_granule)
    taken = _rounded(shared + arch.shared_reserved, arch.shared_granule)
    # LLVM: a wave that is a block of its own takes no barrier, and only waves bound it.
    most = arch.max_warps if arch.target.backend == "hip" and warps == 1 else arch.max_blocks
    bounds = {
        "registers": min(per_unit * arch.units, arch.max_warps) // warps,
        "shared memory": arch.shared_size // taken if taken else most,
        "warps": arch.max_warps // warps,
        "blocks": most,
    }
    blocks = min(bounds.values())
    # Of several that bind, the one that no tile can change is named first.
    limit = next(name for name in ("blocks", "warps", *bounds) if bounds[name] == blocks)
    return Occupancy(blocks, blocks * warps, arch.max_warps, limit)


def _rounded(value: int, granule: int) -> int:
    return -(-value // granule) * granule
