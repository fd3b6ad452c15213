"""What is compiled: one call of an op as a case, recorded instead of launched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from benchmarks.runner import DTYPES
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.kernel import launch_append
from torch_fdattn.ops.attention.backward import launch_backward
from torch_fdattn.ops.attention.configs import (
    BackwardConfig,
    TileConfig,
    backward_config,
    forward_config,
    is_short_window,
)
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.attention.forward import has_borders, launch_forward
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.decode.launch import launch_decode
from torch_fdattn.ops.merge_states.kernel import launch_merge, launch_merge_backward
from torch_fdattn.ops.merge_states.tree_kernel import launch_pair, launch_tree
from torch_fdattn.ops.options import AttentionOptions, DecodeOptions
from torch_fdattn.ops.packed import Packed, by_heads, key_capacity
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.row_ranges import empty_ranges
from torch_fdattn.ops.scores import Scores

from .targets import ARCHS

CACHES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}

_LENGTHS = dict(kv_lens=torch.empty(2, dtype=torch.int32, device="meta"))
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
    "row": Scores(attn_mask=torch.empty(2, 1, 1, 4096, dtype=torch.bool, device="meta")),
    "bias": Scores(attn_mask=torch.empty(32, 4096, 4096, dtype=torch.bfloat16, device="meta")),
    "own bias": Scores(
        attn_mask=torch.empty(2, 32, 4096, 4096, dtype=torch.bfloat16, device="meta")
    ),
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
        "same"  # decode's and append's: dtype or one of CACHES; "-paged" after it (also varlen's)
    )
    v_dim: int | None = None  # where it is not head_dim
    tile: TileConfig | None = None  # in place of the configured one; both sweeps of the backward
    batch: int = 2  # decode's: how many items a processor has
    scores: str = ""  # attention's: one of SCORES
    dropout_p: float = 0.0
    first_head: bool = False  #: whether dropout's seed says which head is the first

    def __str__(self) -> str:
        rows = f"-rows{self.rows}-{self.cache}" if self.op in ("decode", "append") else ""
        rows += f"-{self.cache}" if self.op.startswith("varlen") and self.cache != "same" else ""
        rows += f"-batch{self.batch}" if self.batch != 2 else ""
        rows += f"-v{self.v_dim}" if self.v_dim else ""
        rows += f"-{self.scores}" if self.scores else ""
        rows += "-dropout" if self.dropout_p else ""
        rows += "-heads" if self.first_head else ""
        return f"{self.op}-{self.arch}-{self.dtype}-hd{self.head_dim}-{self.mask}{rows}"


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Records launches instead of launching."""
    launches: list[Launch] = []

    def run(self, *args, grid, warmup, **kwargs):
        launches.append(Launch(self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(kind: str, dim: int, dtype: torch.dtype, batch: int = 2) -> Cache:
    name, _, paged = kind.partition("-")
    k = meta(batch, 8, 65536, dim, dtype=CACHES.get(name, dtype))
    scale = meta(8, 1).expand(k.shape[:3]) if name in CACHES else None
    if not paged:
        return Cache(k, k.clone(), None, scale, scale)
    k = k.view(batch * 4096, 16, 8, dim).transpose(1, 2)
    table = meta(batch, 4096, dtype=torch.int32)
    scale = None if scale is None else meta(batch * 4096, 8, 16)
    return Cache(k, torch.empty_like(k), table, scale, scale)


def record(case: Case) -> list[Launch]:
    """The launches of one call of an op, in order."""
    with recorded() as launches:
        _CALLS[case.op](case)
    return launches


def _decode(case: Case) -> None:
    dtype, dim, mask = DTYPES[case.dtype], case.head_dim, MASKS[case.mask]
    q = meta(case.batch, 8 * case.rows, 1, dim, dtype=dtype)
    lse, cache = meta(*q.shape[:-1]), _cache(case.cache, dim, dtype, case.batch)
    out = torch.empty_like(q)
    if case.v_dim:
        cache = cache._replace(v=_cache(case.cache, case.v_dim, dtype, case.batch).v)
        out = meta(*q.shape[:-1], case.v_dim, dtype=dtype)
    mask = Mask(
        *(None if x is None else meta(case.batch, dtype=x.dtype) for x in mask[:3]),
        *mask[3:],
    )
    launch_decode(
        DecodeCall(q, cache, DecodeOptions(mask, dim**-0.5)), out, lse, config=case.tile, target_splits=64,
        capability=ARCHS[case.arch].capability,
    )  # fmt: skip


def _append(case: Case) -> None:
    """Everything at once: ragged lengths, rope of K and q at given positions, scales."""
    dim, dtype, batch, tokens = case.head_dim, DTYPES[case.dtype], case.batch, case.rows
    q, k = (meta(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2) for heads in (32, 8))
    cache, v = _cache(case.cache, dim, dtype, batch), k.clone()
    if case.v_dim:
        v = v[..., : case.v_dim]
        cache = cache._replace(v=_cache(case.cache, case.v_dim, dtype, batch).v)
    angles, positions = meta(65536, dim // 2), meta(batch, tokens, dtype=torch.int64)
    lens = {x: meta(batch, dtype=torch.int32) for x in ("kv_lens", "new_lens")}
    launch_append(
        Append(
            cache.k, cache.v, cache.page_table, k, v, **lens, k_scale=cache.k_scale,
            v_scale=cache.v_scale, q=q, cos=angles, sin=angles.clone(), positions=positions,
        )
    )  # fmt: skip


def _merge(case: Case) -> None:
    dim, dtype = case.head_dim, DTYPES[case.dtype]
    outs, lses = meta(8, 2, 32, 512, dim, dtype=dtype), meta(8, 2, 32, 512)
    out, lse = outs[0].clone(), lses[0].clone()
    launch_merge(outs, lses, out, lse)
    launch_merge_backward(
        out, lse, outs, lses, out, lse, torch.empty_like(outs), torch.empty_like(lses)
    )
    for leaves in (1, 8):
        launch_tree(outs, lses, outs[: 8 // leaves].clone(), lses[: 8 // leaves].clone(), leaves)
    launch_pair(out, lse, out.clone(), lse.clone(), out.clone(), lse.clone())


def _packed(case: Case) -> Packed | None:
    """Two sequences, their keys packed too or on pages of 16."""
    if not case.op.startswith("varlen"):
        return None
    begins, table = meta(3, dtype=torch.int32), meta(2, 4096, dtype=torch.int32)
    if case.cache.endswith("paged"):
        return Packed(begins, None, table)
    return Packed(begins, begins.clone())


def _attention(case: Case) -> None:
    dtype, dim, capability = DTYPES[case.dtype], case.head_dim, ARCHS[case.arch].capability
    mask = MASKS[case.mask]
    q, k = meta(2, 32, 4096, dim, dtype=dtype), meta(2, 8, 4096, dim, dtype=dtype)
    packed = _packed(case)
    if packed is not None:
        q, k = (by_heads(meta(8192, heads, dim, dtype=dtype)) for heads in (32, 8))
        if packed.page_table is not None:
            k = _cache("same-paged", dim, dtype).k
    v_dim, scores = case.v_dim or dim, SCORES[case.scores]
    dropout = Dropout(case.dropout_p, meta(3 if case.first_head else 2, dtype=torch.int64))
    options = AttentionOptions(mask, dim**-0.5, scores, dropout)
    v, out = (meta(*x.shape[:3], v_dim, dtype=dtype) for x in (k, q))
    lse, widest = meta(*q.shape[:-1]), max(dim, v_dim)
    ranges = None if packed else empty_ranges(scores.attn_mask, q, k)
    short = is_short_window(mask, key_capacity(k, packed))
    if case.op.endswith("forward"):
        borders = has_borders(mask, k.shape[2])
        config = case.tile or forward_config(
            widest, dtype, capability, borders, scores, dropout, short
        )
        launch_forward(q, k, v, options, out, lse, config, packed, ranges)
        return
    config = backward_config(widest, dtype, capability, scores, dropout, short)
    if case.tile:
        config = BackwardConfig(case.tile, case.tile)
    trained = [x if x is not None and x.is_floating_point() else None for x in scores[1:]]
    score_grads = Scores(0.0, *(None if x is None else torch.empty_like(x) for x in trained))
    launch_backward(
        out.clone(), lse.clone(), q, k, v, out, lse, options,
        torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), score_grads, config, packed, ranges=ranges,
    )  # fmt: skip


_CALLS = {
    "forward": _attention,
    "backward": _attention,
    "varlen_forward": _attention,
    "varlen_backward": _attention,
    "decode": _decode,
    "append": _append,
    "merge": _merge,
}
OPS = tuple(_CALLS)
