"""Tile sizes of the portable attention kernels, as data, with each branch's reason."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch

from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores


@dataclass(frozen=True)
class TileConfig:
    """One kernel's tile: BLOCK_M queries by BLOCK_N keys, warps, software pipeline depth."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        """BLOCK_M x BLOCK_N w num_warps s num_stages, as 128x64w8s3; `parse` reads it."""
        return f"{self.block_m}x{self.block_n}w{self.num_warps}s{self.num_stages}"

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)", text)
        if match is None:
            raise ValueError(f"config must look like 128x64w8s3, got {text!r}")
        return cls(*map(int, match.groups()))

    def checked(self) -> TileConfig:
        """Itself, where every portable kernel can have it; ValueError naming the size otherwise."""
        for name, (least, most) in _LIMITS.items():
            size = getattr(self, name)
            power = name == "num_stages" or (isinstance(size, int) and size & (size - 1) == 0)
            if (
                isinstance(size, bool)
                or not isinstance(size, int)
                or not least <= size <= most
                or not power
            ):
                kind = "an int" if name == "num_stages" else "a power of two"
                raise ValueError(f"{name} must be {kind} from {least} to {most}, got {size!r}")
        return self


@dataclass(frozen=True)
class BackwardConfig:
    """The two sweeps of the backward: over queries for dK and dV, over keys for dQ."""

    dkdv: TileConfig
    dq: TileConfig


#: Sizes that all kernels can have: rows are padded to 128, sides must divide TILE_MULTIPLE.
_LIMITS = {"block_m": (16, 128), "block_n": (16, 128), "num_warps": (1, 16), "num_stages": (1, 8)}
#: Every tile's sides divide it: rows in whole blocks of it need no border for their end.
TILE_MULTIPLE = 128

#: Keys that a query sees at most in what counts as a short window.
_SHORT_WINDOW = 2048

# Small tiles let small shapes span several of them; the interpreter has no other wish.
_INTERPRETED = TileConfig(16, 16, 1, 1)


def forward_config(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], borders: bool = True,
    scores: Scores = NO_SCORES, dropout: Dropout = NO_DROPOUT, short_window: bool = False,
) -> TileConfig:  # fmt: skip
    """The forward's tile for a device of this compute capability and the larger head dim of K and V.

    Without `borders`, no tile is masked; `scores` are what modifies them; dropout's bits take the registers of
    an explicit mask; short_window: `is_short_window`.
    """
    if INTERPRET:
        return _INTERPRETED
    if head_dim > 256:
        return _largest_dims_tile(dtype, capability)
    if dtype == torch.float32:
        return _fp32_tile(head_dim)
    masked = scores.attn_mask is not None
    if capability[0] == 9 and (masked or dropout.p) and head_dim <= 128:
        # Swept on one H100 (docs/notes/attention.md).
        return TileConfig(64, 64, 4, 3) if head_dim <= 64 else TileConfig(128, 64, 8, 3)
    if masked and dropout.p and capability[0] < 8:
        return TileConfig(32, 16 if head_dim > 64 else 32, 8, 2)  # more spills on AMD; not measured
    if dropout.p or (masked and capability[0] != 9):
        return TileConfig(64, 64 if head_dim <= 64 else 32, 8, 2)  # spills nothing; not measured
    if capability[0] == 9:
        if head_dim <= 128 and short_window:
            return TileConfig(64, 64, 4, 3)
        # Swept on one H100 (docs/notes/attention.md): 427 TFLOP/s at hd64 16k causal, 511 at hd128 16k full, 557 at hd256
        # 16k causal. At hd128 the wider key tile wins 1 to 2 % where nothing is masked, else it loses 2 %.
        if not borders and 64 < head_dim <= 128:
            return TileConfig(128, 128, 8, 3)
        return TileConfig(128, 64, 4 if head_dim <= 64 else 8, 3 if head_dim <= 128 else 2)
    # Ampere, Ada and AMD: 100 KiB (64 KiB on AMD) of shared memory hold fewer stages.
    if head_dim <= 64:
        return TileConfig(128, 64, 4, 2)
    if head_dim <= 128:
        return TileConfig(128, 32, 4, 2)
    return TileConfig(64, 32, 4, 1)


def backward_config(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], scores: Scores = NO_SCORES,
    dropout: Dropout = NO_DROPOUT, short_window: bool = False,
) -> BackwardConfig:  # fmt: skip
    """The backward's tiles, as `forward_config`."""
    if INTERPRET:
        return BackwardConfig(_INTERPRETED, _INTERPRETED)
    if head_dim > 256:
        plain = not (scores.changes_tiles or dropout.p)
        both = TileConfig(16, 16, 8, 1)
        if plain and capability[0] == 9 and dtype != torch.float32:
            both = TileConfig(64, 32, 8, 1)  # swept on one H200 (docs/notes/attention.md)
        return BackwardConfig(both, both)
    if dtype == torch.float32:
        return BackwardConfig(_fp32_tile(head_dim), _fp32_tile(head_dim))
    masked = scores.attn_mask is not None
    if capability[0] == 9 and (masked or dropout.p) and head_dim <= 128:
        # Swept on one H100 (docs/notes/attention.md): four warps of 64 x 64 at hd64 and 128 keys at hd128 win over what
        # spills less, by up to half.
        if head_dim <= 64:
            dkdv = TileConfig(64, 64, 4, 3 if masked else 2)
            return BackwardConfig(dkdv, TileConfig(64, 64, 4, 3))
        return BackwardConfig(TileConfig(64, 128, 8, 2), TileConfig(128, 64, 8, 3))
    if capability[0] == 9 and (scores.changes_tiles or dropout.p) and head_dim > 128:
        # The plain tiles spill up to 648 bytes a thread in dK/dV; these up to 120. Not measured.
        return BackwardConfig(TileConfig(32, 64, 8, 2), TileConfig(128, 32, 8, 2))
    if capability[0] != 9 and (masked or dropout.p):
        small = TileConfig(32, 32, 8, 1)  # spills little; not measured
        if masked and dropout.p and capability[0] < 8 and head_dim > 64:
            # 32 x 32 spills up to 436 bytes a thread at hd128. Not measured.
            return BackwardConfig(TileConfig(16, 32, 8, 1), TileConfig(16, 32, 8, 1))
        wide = capability[0] >= 8 and head_dim <= 128  # on AMD it spilled 888 bytes a thread
        return BackwardConfig(small, TileConfig(64, 64, 8, 2) if wide else small)
    if capability[0] == 9:
        # Swept on one H100 (docs/notes/attention.md). At hd128 three stages win 16 % over two in the dK/dV sweep where nothing
        # is masked; at hd256 only narrow key tiles leave the dQ sweep its registers, and a third stage wins 30 %.
        # Softcap and ALiBi spill up to 150 bytes a thread in dK/dV, and yet win 40 % over tiles that do not.
        if head_dim <= 64:
            # With softcap or ALiBi not measured: 280 to 660 bytes of spills less.
            rows = 64 if short_window or scores.changes_tiles else 128
            return BackwardConfig(TileConfig(64, 64, 4, 3), TileConfig(rows, 64, 4, 3))
        if head_dim <= 128:
            if not short_window:
                return BackwardConfig(TileConfig(64, 128, 8, 3), TileConfig(128, 64, 8, 3))
            # 64 x 64 spills up to 232 bytes a thread in dQ with softcap and ALiBi.
            dq = TileConfig(64, 32, 4, 3) if scores.changes_tiles else TileConfig(64, 64, 4, 2)
            return BackwardConfig(TileConfig(32, 64, 4, 3), dq)
        return BackwardConfig(TileConfig(64, 64, 8, 2), TileConfig(128, 32, 8, 3))
    if head_dim <= 128:
        # With options 64 keys spilled 208 bytes a thread at hd128 on sm_80. Not measured.
        dkdv = TileConfig(32, 32 if scores.changes_tiles else 64, 4, 2)
        return BackwardConfig(dkdv, TileConfig(64, 32, 4, 2))
    return BackwardConfig(TileConfig(32, 32, 4, 1), TileConfig(32, 32, 4, 1))


def mask_gradient_config(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> TileConfig:
    """The tile of a mask whose gradient one program sums. But for sm_90 not measured: what does not spill."""
    if INTERPRET:
        return _INTERPRETED
    if head_dim > 256:
        wide = dtype != torch.float32 and capability[0] >= 8
        return TileConfig(32, 32, 8, 1) if wide else TileConfig(16, 16, 8, 1)
    if dtype == torch.float32:
        return _fp32_tile(head_dim)
    if capability[0] == 9 and head_dim <= 128:  # swept on one H100 (docs/notes/attention.md)
        return TileConfig(64, 64, 4, 3) if head_dim <= 64 else TileConfig(128, 64, 8, 2)
    return TileConfig(64, 64 if head_dim <= 128 else 32, 8, 1)


def _largest_dims_tile(dtype: torch.dtype, capability: tuple[int, int]) -> TileConfig:
    """Head dims above 256, padded to 512: what fits into registers and, in fp32 or on AMD, 64 KiB. Measured on sm_90 alone."""
    if dtype == torch.float32 or capability[0] < 8:
        return TileConfig(16, 16, 8, 1)
    if capability[0] == 9:
        return TileConfig(64, 32, 8, 2)  # swept on one H200 (docs/notes/attention.md)
    return TileConfig(32, 32, 8, 1)


def _fp32_tile(head_dim: int) -> TileConfig:
    """fp32 dots run on the FMA units, whose operands are whole rows in registers.

    64 x 32 and 32 x 32 with 4 warps spilled 1 to 15 KB a thread (`python -m benchmarks resources`);
    these tiles spill nothing but a few bytes in the hd256 dK/dV sweep.
    """
    return TileConfig(32, 32 if head_dim <= 64 else 16, 8, 1)


def has_borders(mask: Mask, kv_len: int) -> bool:
    """Whether some tile needs a mask: the mask hides something, or the keys end within a tile."""
    return not mask.hides_nothing or kv_len % TILE_MULTIPLE != 0


def is_short_window(mask: Mask, kv_capacity: int) -> bool:
    """Whether a program has so few tiles, by a window that hides something, that its beginning and end count.

    Such programs are made small enough for two to share an SM, of which one computes while the other loads its
    first tiles or stores its results (docs/notes/attention.md). Sequences that are as short are not: plain causal ones lost by it.
    """
    sides = mask.window_left, mask.window_right
    return min(sides) >= 0 and sum(sides) < min(_SHORT_WINDOW, kv_capacity - 1)


#: Bytes that the heads of one swizzle read: they should stay in the L2, of which an H100 has 50 MB.
_SWIZZLE_BYTES = 8 << 20


def heads_per_swizzle(mask: Mask, heads: int, head_bytes: int, packed: bool) -> int:
    """How many of all heads, each of which reads head_bytes repeatedly, run at the same time
    (`tiles.block_coordinates`; more than there are would overflow its int32).

    More than one pays where the first blocks are the longest, which those of packed sequences are not. Swept on one
    H100 (docs/notes/attention.md): 8 MiB won over 4 and 16, all heads at once lost up to a tenth.
    """
    if packed or mask.window_right < 0 or mask.window_left >= 0:
        return 1
    return max(1, min(heads, _SWIZZLE_BYTES // max(1, head_bytes)))


@functools.cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """The CUDA compute capability; (0, 0) for the interpreter and for AMD."""
    if device.type != "cuda" or torch.version.hip:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 dots are exact unless torch's own setting for fp32 matmuls allows tf32."""
    # The getter of torch's newer switch also sees the older ones (allow_tf32, set_float32_matmul_precision);
    # the older getter raises once the newer switch was used.
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"
