"""What each kernel costs on each GPU generation, compiled without a GPU: registers, spills, shared memory.

The launchers themselves are called, on meta tensors, with `JITFunction.run` replaced by a recorder: a
kernel is compiled with the arguments, strides, attributes and options of a real launch. As a program it
prints a table:

    python -m tests.compile_only.resources --op backward --arch sm_90 --dtype bf16 --head-dim 64 128
    python -m tests.compile_only.resources --op backward --tile 64,64,8,2     (another tile than configured)

Registers and stack (spills) of NVIDIA kernels come from `cuobjdump --dump-resource-usage`, those of AMD
kernels from the metadata in their assembly.
Must not run with TRITON_INTERPRET=1, which replaces the kernels by interpreted ones.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.compile_only.uniform_registers import disassembled, read_before_written
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.kernel import launch_append
from torch_fdattn.ops.attention.backward import launch_backward
from torch_fdattn.ops.attention.configs import (
    BackwardConfig,
    TileConfig,
    backward_config,
    forward_config,
)
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.attention.forward import has_borders, launch_forward
from torch_fdattn.ops.decode.launch import Cache, launch_decode
from torch_fdattn.ops.merge_states.kernel import launch_merge, launch_merge_backward
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

KIB = 1024


@dataclass(frozen=True)
class Arch:
    """A compilation target, the capability that the config tables see, and its limits."""

    name: str
    target: GPUTarget
    capability: tuple[int, int]
    shared_limit: int


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm_80", GPUTarget("cuda", 80, 32), (8, 0), 163 * KIB),
        Arch("sm_90", GPUTarget("cuda", 90, 32), (9, 0), 227 * KIB),
        Arch("sm_100", GPUTarget("cuda", 100, 32), (10, 0), 227 * KIB),
        Arch("gfx942", GPUTarget("hip", "gfx942", 64), (0, 0), 64 * KIB),
        Arch("gfx950", GPUTarget("hip", "gfx950", 64), (0, 0), 160 * KIB),
    )
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

CACHES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}

_LENGTHS = dict(kv_lens=torch.empty(2, dtype=torch.int32, device="meta"))
_APPENDED = _LENGTHS | {"new_lens": torch.empty(2, dtype=torch.int32, device="meta")}
_SHARDED = dict(
    **_LENGTHS,
    q_start=torch.empty(2, dtype=torch.int32, device="meta"),
    kv_start=torch.empty(2, dtype=torch.int32, device="meta"),
    kv_block=16,
    kv_stride=64,
)
MASKS = {
    "full": Mask(),
    "causal": Mask(window_right=0),
    "window": Mask(window_left=511, window_right=0),
    "padded": Mask(**_LENGTHS),
    "sharded": Mask(**_SHARDED, window_right=0),
    "all": Mask(**_SHARDED, window_left=511, window_right=0),
}

#: What attention takes besides a mask of positions, by name.
SCORES = {
    "": Scores(),
    "softcap": Scores(softcap=30.0),
    "alibi": Scores(alibi_slopes=torch.empty(32, device="meta")),
    "sinks": Scores(sinks=torch.empty(32, device="meta")),
    "mask": Scores(attn_mask=torch.empty(2, 1, 4096, 4096, dtype=torch.bool, device="meta")),
    "bias": Scores(attn_mask=torch.empty(32, 4096, 4096, dtype=torch.bfloat16, device="meta")),
    "scores": Scores(30.0, torch.empty(2, 32, device="meta"), torch.empty(32, device="meta")),
}


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch."""

    kernel: JITFunction
    args: tuple
    kwargs: dict


@dataclass(frozen=True)
class Case:
    """What decides which kernel is compiled: the op, its inputs' kind, and the target."""

    op: str
    arch: str
    dtype: str
    head_dim: int
    mask: str = "causal"
    rows: int = 4  # decode's group, append's tokens
    cache: str = (
        "same"  # decode's and append's: dtype, or one of CACHES; "-paged" after it (also varlen's)
    )
    v_dim: int | None = None  # where it is not head_dim
    tile: TileConfig | None = None  # in place of the configured one; both sweeps of the backward
    batch: int = 2  # decode's: how many items a processor has
    scores: str = ""  # attention's: one of SCORES
    dropout_p: float = 0.0

    def __str__(self) -> str:
        rows = f"-rows{self.rows}-{self.cache}" if self.op in ("decode", "append") else ""
        rows += f"-{self.cache}" if self.op.startswith("varlen") and self.cache != "same" else ""
        rows += f"-batch{self.batch}" if self.batch != 2 else ""
        rows += f"-v{self.v_dim}" if self.v_dim else ""
        rows += f"-{self.scores}" if self.scores else ""
        rows += "-dropout" if self.dropout_p else ""
        return f"{self.op}-{self.arch}-{self.dtype}-hd{self.head_dim}-{self.mask}{rows}"


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of a processor; `spills` in bytes a thread.

    undefined: on sm_90, instructions that read uniform registers which nothing has written.
    """

    kernel: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    undefined: tuple[str, ...] = ()


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records launches instead of launching."""
    launches: list[Launch] = []

    def run(self, *args, grid, warmup, **kwargs):
        launches.append(Launch(self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(kind: str, dim: int, dtype: torch.dtype, batch: int = 2) -> Cache:
    name, _, paged = kind.partition("-")
    k = _meta(batch, 8, 65536, dim, dtype=CACHES.get(name, dtype))
    scale = _meta(8, 1).expand(k.shape[:3]) if name in CACHES else None
    if not paged:
        return Cache(k, k.clone(), None, scale, scale)
    k = k.view(batch * 4096, 16, 8, dim).transpose(1, 2)
    table = _meta(batch, 4096, dtype=torch.int32)
    scale = None if scale is None else _meta(batch * 4096, 8, 16)
    return Cache(k, torch.empty_like(k), table, scale, scale)


def _append_call(case: Case) -> Append:
    """Everything at once: ragged lengths, rope of K and q at given positions, scales."""
    dim, dtype, tokens = case.head_dim, DTYPES[case.dtype], case.rows
    q, k = (_meta(2, tokens, heads, dim, dtype=dtype).transpose(1, 2) for heads in (32, 8))
    cache, v = _cache(case.cache, dim, dtype), k.clone()
    if case.v_dim:
        cache, v = cache._replace(v=_cache(case.cache, case.v_dim, dtype).v), v[..., : case.v_dim]
    angles, positions = _meta(65536, dim // 2), _meta(2, tokens, dtype=torch.int64)
    return Append(
        cache.k, cache.v, cache.page_table, k, v, **_APPENDED, k_scale=cache.k_scale,
        v_scale=cache.v_scale, q=q, cos=angles, sin=angles.clone(), positions=positions,
    )  # fmt: skip


def _packed(case: Case) -> Packed | None:
    """Two sequences, their keys packed too or on pages of 16."""
    if not case.op.startswith("varlen"):
        return None
    begins, table = _meta(3, dtype=torch.int32), _meta(2, 4096, dtype=torch.int32)
    if case.cache.endswith("paged"):
        return Packed(begins, None, table)
    return Packed(begins, begins.clone())


def record(case: Case) -> list[Launch]:
    """The launches of one call of an op, in order."""
    arch, dtype, dim = ARCHS[case.arch], DTYPES[case.dtype], case.head_dim
    mask, scale = MASKS[case.mask], dim**-0.5
    with recorded() as launches:
        if case.op == "decode":
            q = _meta(case.batch, 8 * case.rows, 1, dim, dtype=dtype)
            lse, cache = _meta(*q.shape[:-1]), _cache(case.cache, dim, dtype, case.batch)
            out = torch.empty_like(q)
            if case.v_dim:
                cache = cache._replace(v=_cache(case.cache, case.v_dim, dtype, case.batch).v)
                out = _meta(*q.shape[:-1], case.v_dim, dtype=dtype)
            mask = Mask(
                *(None if x is None else _meta(case.batch, dtype=x.dtype) for x in mask[:3]),
                *mask[3:],
            )
            launch_decode(
                q, cache, mask, scale, out, lse, config=case.tile, wanted=64,
                capability=arch.capability,
            )  # fmt: skip
        elif case.op == "append":
            launch_append(_append_call(case))
        elif case.op == "merge":
            outs, lses = _meta(8, 2, 32, 512, dim, dtype=dtype), _meta(8, 2, 32, 512)
            out, lse = outs[0].clone(), lses[0].clone()
            launch_merge(outs, lses, out, lse)
            launch_merge_backward(
                out, lse, outs, lses, out, lse, torch.empty_like(outs), torch.empty_like(lses)
            )
        else:
            q, k = _meta(2, 32, 4096, dim, dtype=dtype), _meta(2, 8, 4096, dim, dtype=dtype)
            packed = _packed(case)
            if packed is not None:
                q, k = (by_heads(_meta(8192, heads, dim, dtype=dtype)) for heads in (32, 8))
                if packed.page_table is not None:
                    k = _cache("same-paged", dim, dtype).k
            v_dim, scores = case.v_dim or dim, SCORES[case.scores]
            dropout = Dropout(case.dropout_p, _meta(2, dtype=torch.int64))
            v, out = (
                _meta(*k.shape[:3], v_dim, dtype=dtype),
                _meta(*q.shape[:3], v_dim, dtype=dtype),
            )
            lse, widest = _meta(*q.shape[:-1]), max(dim, v_dim)
            if case.op.endswith("forward"):
                config = case.tile or forward_config(
                    widest,
                    dtype,
                    arch.capability,
                    has_borders(mask, k.shape[2]),
                    scores,
                    dropout,
                )
                launch_forward(q, k, v, mask, scale, out, lse, scores, dropout, config, packed)
            else:
                config = backward_config(widest, dtype, arch.capability, scores, dropout)
                if case.tile:
                    config = BackwardConfig(case.tile, case.tile)
                trained = [
                    x if x is not None and x.is_floating_point() else None for x in scores[1:]
                ]
                wanted = Scores(0.0, *(None if x is None else torch.empty_like(x) for x in trained))
                launch_backward(
                    out.clone(), lse.clone(), q, k, v, out, lse, mask, scale,
                    torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), scores, wanted, dropout,
                    config, packed,
                )  # fmt: skip
    return launches


def compile_launch(launch: Launch, arch: Arch):
    """The compiled kernel of a recorded launch, as `JITFunction.run` would compile it."""
    kernel = launch.kernel
    backend = make_backend(arch.target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launch.args, **launch.kwargs)
    options, signature, constants, attrs = kernel._pack_args(
        backend, launch.kwargs, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attrs)
    return triton.compile(source, target=arch.target, options=options.__dict__)


def resources(case: Case) -> list[Resources]:
    """Compiles every kernel of a case and reads what each takes."""
    return [_resources(launch, ARCHS[case.arch]) for launch in record(case)]


def _resources(launch: Launch, arch: Arch) -> Resources:
    compiled = compile_launch(launch, arch)
    read: Callable = _nvidia_usage if arch.target.backend == "cuda" else _amd_usage
    registers, spills = read(compiled)
    meta = compiled.metadata
    name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
    undefined = ()
    if arch.name == "sm_90":
        undefined = tuple(read_before_written(disassembled(compiled.asm["cubin"])))
    return Resources(
        name, meta.num_warps, meta.num_stages, registers, spills, meta.shared, undefined
    )


def _nvidia_usage(compiled) -> tuple[int, int]:
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


_COLUMNS = "{:<20}{:<8}{:<6}{:>5}  {:<16}{:<15}{:>6}{:>7}{:>6}{:>8}{:>11}  {}"


def rows_of(case: Case) -> list[str]:
    """The table's lines for one case; a target that refuses the kernel says why."""
    try:
        found = resources(case)
    except Exception as error:  # whatever the compiler raises belongs into the table
        message = str(error).strip().splitlines()[-1] if str(error) else type(error).__name__
        return [f"{case}: {type(error).__name__}: {message}"]
    limit = ARCHS[case.arch].shared_limit
    lines = []
    for item in found:
        notes = ["SPILLS"] * (item.spills > 0) + ["OVER THE LIMIT"] * (item.shared > limit)
        notes += ["UNDEFINED REGISTERS"] * bool(item.undefined)
        lines.append(
            _COLUMNS.format(
                item.kernel,
                case.arch,
                case.dtype,
                case.head_dim,
                f"{case.mask} {case.scores}",
                f"{case.rows} {case.cache}"
                if case.op in ("decode", "append", "varlen_forward")
                else "",
                item.warps,
                item.stages,
                item.registers,
                item.spills,
                f"{item.shared / KIB:.1f} KiB",
                " ".join(notes),
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", default=["forward", "backward", "decode", "merge"])
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=DTYPES)
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--mask", nargs="+", default=["causal"], choices=MASKS)
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[4], help="decode's group, append's tokens"
    )
    parser.add_argument("--cache", nargs="+", default=["same"], help="decode's and append's cache")
    parser.add_argument("--scores", nargs="+", default=[""], choices=SCORES)
    parser.add_argument("--tile", help="block_m,block_n,num_warps,num_stages")
    options = parser.parse_args()
    tile = TileConfig(*map(int, options.tile.split(","))) if options.tile else None
    cases = [
        Case(op, arch, dtype, dim, mask, rows, cache, tile=tile, scores=scores)
        for op, arch, dtype, dim, mask, rows, cache, scores in itertools.product(
            options.op,
            options.arch,
            options.dtype,
            options.head_dim,
            options.mask,
            options.rows,
            options.cache,
            options.scores,
        )
    ]
    header = (
        "kernel",
        "arch",
        "dtype",
        "dim",
        "mask",
        "rows",
        "warps",
        "stages",
        "regs",
        "spills",
        "shared",
        "",
    )
    print(_COLUMNS.format(*header))
    for case in cases:
        print("\n".join(rows_of(case)), flush=True)


if __name__ == "__main__":
    main()
