"""Drawn calls that Hopper's kernels take, of which the other draws have few: head dims above 32, layouts that a descriptor has.

Everything else is drawn: masks, lengths, positions, what modifies scores, heads of a group, and lengths to some 1500. Head
dims, pages and what keys lie on follow from the seed, so that a few draws have all of them.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace

import torch

from torch_fdattn.testing.cases import AttentionCase, draw_mask
from torch_fdattn.testing.feature_cases import FeatureCase
from torch_fdattn.testing.inputs import LAYOUTS
from torch_fdattn.testing.varlen_cases import VarlenCase

#: Those that the kernel computes with, and some that copies fill up to them. 11, which has no divisor with what else
#: follows from the seed.
HEAD_DIMS = (64, 128, 96, 256, 192, 40, 72, 136, 160, 200, 248)
#: Whose rows are whole 16 bytes in float8, too.
FP8_HEAD_DIMS = (64, 128, 96, 256, 192, 48, 80, 144, 208, 240, 112)
#: Tokens of a page: parts of a block of keys, blocks, and several of them.
PAGES = (16, 32, 64, 128, 256)
#: The last dim contiguous, the other strides whole 16 bytes and not 0.
DESCRIBABLE = ("bhsd", "bshd", "slice", "packed", "every_other")
#: The same in float8, of which `packed` has rows of 8 bytes more.
FP8_DESCRIBABLE = ("bhsd", "bshd", "slice", "every_other")
_HALF = (torch.bfloat16, torch.float16)
_TILE = 128  # keys of a block, and queries of a tile


def draw_hopper(seed: int) -> FeatureCase:
    """A call of attention."""
    rng = random.Random(f"hopper {seed}")
    dtype, layouts = rng.choice(_HALF), [rng.choice(DESCRIBABLE) for _ in range(3)]
    return _attention_case(rng, seed, HEAD_DIMS[seed % 11], dtype, layouts, 1500)


def draw_hopper_fp8(seed: int) -> FeatureCase:
    """A call of attention_fp8, without positions; values in any layout, for a kernel turns them round."""
    rng = random.Random(f"hopper fp8 {seed}")
    layouts = [rng.choice(x) for x in (FP8_DESCRIBABLE, FP8_DESCRIBABLE, LAYOUTS)]
    dtype = torch.float8_e4m3fn
    case = _attention_case(rng, seed, FP8_HEAD_DIMS[seed % 11], dtype, layouts, 1000)
    return replace(case, q_start=None, kv_start=None)


def draw_hopper_varlen(seed: int) -> VarlenCase:
    """A call of varlen_attention: of packed keys by even seeds, of keys on pages by odd ones; a quarter of short sequences,
    so many that heads of a group share tiles."""
    rng = random.Random(f"hopper varlen {seed}")
    head_dim, page = HEAD_DIMS[seed // 2 % 11], PAGES[seed // 2 % 5] if seed % 2 else 0
    many = seed % 8 in (2, 3)
    batch = rng.randint(18, 30) if many else rng.choice((1, 2, 3, 3, 4, 5))
    long, short, keys = (128, 128, 300) if many else (700, 400, 900)
    q_lens = tuple(rng.choice((0, _length(rng, long), _length(rng, short))) for _ in range(batch))
    kv_sizes, rest = q_lens, (rng.choice((0, 5, 67, 131)),) * 2
    if page or rng.random() < 0.5:
        kv_sizes = tuple(rng.choice((0, _length(rng, keys), n + rng.randint(0, 500))) for n in q_lens)  # fmt: skip
        rest = rest[0], 0 if page else rng.choice((0, 7, 131))
    if not sum(q_lens) + rest[0]:
        q_lens = (*q_lens[:-1], 1)
    if not sum(kv_sizes) + rest[1]:
        kv_sizes = (*kv_sizes[:-1], _length(rng, 900))
    longest = max(q_lens), max(kv_sizes)
    mask = _mask(rng, batch, max(1, longest[0]), max(2, longest[1]), head_dim)
    if page:
        if rng.random() < 0.5:  # which leaves pages behind
            mask["window"] = rng.randint(0, 300), -1 if mask["causal"] else rng.choice((-1, 0, 100))
        # Every sequence has the table's full capacity, some without lengths, too.
        if rng.random() < 0.7:
            given = mask.get("kv_lens", kv_sizes)
            mask["kv_lens"] = tuple(
                n if n > longest[1] else min(n, size) for n, size in zip(given, kv_sizes, strict=True)
            )  # fmt: skip
        kv_sizes = (-(-longest[1] // page) * page,) * batch
    kv_heads = rng.choice((2, 3) if many else (1, 2, 3))
    group = 4 if many else rng.choice((1, 2, 3, 4, 5))
    return VarlenCase(
        seed, q_lens, kv_sizes, kv_heads * group, kv_heads, head_dim, head_dim, rng.choice(_HALF), _TILE,
        tuple(rng.choice(DESCRIBABLE) for _ in range(3)), rest, page, **mask, **_scores(rng),
    )  # fmt: skip


def _attention_case(
    rng: random.Random, seed: int, head_dim: int, dtype: torch.dtype, layouts: list[str], longest: int
) -> FeatureCase:  # fmt: skip
    batch, kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 3, 4, 5))  # fmt: skip
    q_len, kv_len = _length(rng, longest), _length(rng, longest)
    plain = AttentionCase(
        seed, batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim, dtype, _TILE, tuple(layouts),
        **_mask(rng, batch, q_len, kv_len, head_dim),
    )  # fmt: skip
    return FeatureCase(**{x.name: getattr(plain, x.name) for x in fields(plain)}, **_scores(rng))


def _length(rng: random.Random, longest: int) -> int:
    """A few, whole blocks, or any number."""
    kind = rng.random()
    if kind < 0.15:
        return rng.choice((1, 2, 63, 64, 65, 129))
    if kind < 0.3:
        return _TILE * rng.randint(1, longest // _TILE)
    return rng.randint(1, longest)


def _mask(rng: random.Random, batch: int, q_len: int, kv_len: int, head_dim: int) -> dict:
    """As `draw_mask`, of those that are not block-cyclic."""
    while True:
        found = draw_mask(rng, batch, q_len, kv_len, head_dim, _TILE)
        if not found.get("kv_block"):
            return found


def _scores(rng: random.Random) -> dict:
    return dict(
        softcap=rng.choice((1.0, 5.0, 30.0, 50.0)) if rng.random() < 0.35 else 0.0,
        alibi=rng.choice(("head", "sequence")) if rng.random() < 0.4 else "",
        sinks=rng.random() < 0.4,
    )
