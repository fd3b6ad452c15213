"""Inside `dist.context_parallel`: what a model of transformers may be given there, and what it computed from lengths.

A rank sees its own tokens alone, so that nothing may follow from their number. What is refused is refused on every
rank, or the others would wait.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_fdattn.dropins.mask_functions import without_packing

if TYPE_CHECKING:
    from torch_fdattn.dist.ring_attention.context_parallel import RingMode

_PLACE = 'attn_implementation="fdattn" inside context_parallel'
_REMEDY = (
    "give the model position_ids, this rank's part of all positions: "
    "(position_ids,) = shard_batch(group, shards, torch.arange(total)[None])"
)
#: Layers that look at no other token but by attention.
_LAYERS = {"full_attention", "sliding_attention"}
#: Rotary embeddings whose frequencies follow from the longest position that a rank has seen.
_BY_LENGTH = ("dynamic", "longrope")


def context() -> RingMode | None:
    """The `dist.context_parallel` that is under way, if one is."""
    if not torch._C._len_torch_function_stack():
        return None
    module = sys.modules.get("torch_fdattn.dist.ring_attention.context_parallel")
    return None if module is None else module.active()


def check_mask(
    shards: RingMode, sizes: tuple[int, int, Any, int], mask_function: Callable, attention_mask: Tensor | None,
    config: object, hf: types.ModuleType,
) -> Callable:  # fmt: skip
    """The mask function of all ranks' tokens, from the one that transformers made for this rank's."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f'{_PLACE} is eager: for compiled models torch.compile(model, backend="fdattn", '
            'options={"context_parallel": …}) in its place'
        )
    _check_model(config, shards.total)
    q_length, kv_length, q_offset, kv_offset = sizes
    if isinstance(q_offset, Tensor) or q_offset or kv_offset or q_length != kv_length:
        raise NotImplementedError(
            f"{_PLACE} has no cache (past_key_values must be empty, use_cache=False), got {q_length} queries and "
            f"{kv_length} keys"
        )
    if attention_mask is not None:  # which ranks have the padding, no rank knows
        said = None if bool(attention_mask.all()) else "attention_mask has padding"
        shards.raise_on_all_ranks(
            attention_mask.device, NotImplementedError, said,
            f"{_PLACE} takes no padding: cut it off, or pack the sequences of equal length",
        )  # fmt: skip
    if mask_function is hf.bidirectional_mask_function:
        return mask_function
    # To transformers, positions that are not one run are several sequences: but they are this rank's of one.
    own = shards.positions
    return without_packing(mask_function, own, hf) or mask_function


def _check_model(config: object, total: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds:
        raise NotImplementedError(
            f"{_PLACE}: layers of {', '.join(sorted(kinds))} would see this rank's tokens alone; only "
            f"{' and '.join(sorted(_LAYERS))} go over the ranks"
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    for one in (ropes, *(x for x in ropes.values() if isinstance(x, dict))):
        longest = one.get("original_max_position_embeddings") or getattr(
            config, "max_position_embeddings", 0
        )
        if one.get("rope_type") in _BY_LENGTH and total > longest:
            raise NotImplementedError(
                f"{_PLACE}: rotary embeddings of rope_type {one['rope_type']!r} follow from the longest position "
                f"of a rank beyond {longest} tokens, got {total}; use a rope_type that does not"
            )


_checked: weakref.WeakKeyDictionary[RingMode, tuple[weakref.ref, int]] = weakref.WeakKeyDictionary()


def check_positions(shards: RingMode, position_ids: Tensor | None, query: Tensor) -> None:
    """Whether the layer's position_ids are the shard's, once for each tensor: layers are given the same one.

    The tensor's identity is the same question on all ranks, which run the same program: so they ask each other alike.
    """
    if position_ids is None:
        raise NotImplementedError(
            f"{_PLACE} needs position_ids, and its layers are told none: {_REMEDY}. Where they were given, this "
            "model does not hand them to its layers, and nothing shows which positions its tokens have: call "
            "torch_fdattn.dist.ring_attention in a model of your own"
        )
    last = _checked.get(shards)
    if last is not None and last[0]() is position_ids and last[1] == position_ids._version:
        return
    own = shards.positions.to(position_ids.device)
    right = position_ids.shape[-1:] == own.shape and bool((position_ids == own).all())
    said = (
        None
        if right
        else f"position_ids are {_shown(position_ids)} where the shard has {_shown(own)}"
    )
    shards.raise_on_all_ranks(query.device, ValueError, said, f"{_PLACE}: {_REMEDY}")
    _checked[shards] = weakref.ref(position_ids), position_ids._version


def _shown(positions: Tensor) -> str:
    numbers = positions.reshape(-1, positions.shape[-1])[0].tolist()
    return str(numbers) if len(numbers) <= 16 else f"[{', '.join(map(str, numbers[:16]))}, …]"
