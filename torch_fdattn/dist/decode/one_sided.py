"""The op `fdattn::dist_merge`: partial results of all ranks, merged through symmetric memory by a file a strategy."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.availability import expect_mapped
from torch_fdattn.ops import library

ONE_SIDED = ("symm_all_gather", "push", "push_tiled", "two_shot", "fused")
#: Whether `fused` merges the parts of a split local decode itself (`fused_parts.py`). Ranks need not agree on it.
MERGES_PARTS = True


def strategy(name: str) -> ModuleType:
    """The strategy's file; not at import, since it imports Triton."""
    return importlib.import_module(f"torch_fdattn.dist.decode.{name}")


def merge(
    out: Tensor, lse: Tensor, dtype: torch.dtype, group_name: str, name: str, head_sharded: bool
) -> tuple[Tensor, Tensor]:
    """The merged (out in dtype, lse fp32) of every rank's partial out (B, H, T, DV) and lse (B, H, T), fp32.

    head_sharded: of this rank's H / W heads alone.

    Raises:
        NotImplementedError: the ranks cannot share symmetric memory.
        PeerTimeout: in an earlier call of this strategy a rank's part did not come.
    """
    return torch.ops.fdattn.dist_merge(
        out, lse, group_name, name, dtype, head_sharded, rank_and_size(group_name)[1]
    )


def _merge(part, part_lse, group_name, name, dtype, head_sharded, world_size):
    _check(part, part_lse, name, head_sharded, world_size)
    expect_mapped(f"strategy {name!r}", group_name, part.device)
    if part.numel() == 0:
        return _merge_fake(part, part_lse, group_name, name, dtype, head_sharded, world_size)
    return strategy(name).merge(part, part_lse, dtype, group_name, head_sharded)


def _check(part, part_lse, name, head_sharded, world_size) -> None:
    if name not in ONE_SIDED:
        raise ValueError(f"strategy must be one of {ONE_SIDED}, got {name!r}")
    checks.expect_4d("out", part)
    checks.expect_shape("lse", part_lse, tuple(part.shape[:3]), "out")
    checks.expect_dtype("lse", part_lse, torch.float32, "every exchange")
    checks.expect_dtype("out", part, torch.float32, "every exchange")
    if not part_lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {part_lse.stride()}")
    if head_sharded and part.shape[1] % world_size:
        raise ValueError(
            f"out must have heads that {world_size} ranks divide evenly, got {part.shape[1]}"
        )


def _merge_fake(part, part_lse, group_name, name, dtype, head_sharded, world_size):
    batch, heads, q_len, v_dim = part.shape
    if head_sharded:
        heads = heads // world_size
    out = part.new_empty(batch, heads, q_len, v_dim, dtype=dtype)
    return out, part.new_empty(batch, heads, q_len)


library.define_raw(
    "dist_merge(Tensor out, Tensor lse, str group_name, str strategy, ScalarType dtype, bool head_sharded, "
    "int world_size) -> (Tensor, Tensor)",
    _merge,
    _merge_fake,
)
