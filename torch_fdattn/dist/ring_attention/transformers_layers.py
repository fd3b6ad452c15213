"""Inside `context_parallel`: what a layer of transformers' models must be told, by whatever name it attends.

A rank sees its own tokens alone. What is refused is refused on every rank, or the others would wait.
"""

from __future__ import annotations

import sys
import types
import weakref
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch_fdattn.dist.ring_attention.context_parallel import RingMode

OURS = 'use attn_implementation="fdattn" (torch_fdattn.dropins.transformers.register())'
POSITIONS = (
    "give the model position_ids, this rank's part of all positions: "
    "(position_ids,) = shard_batch(group, shards, torch.arange(total)[None])"
)
#: Layers that look at no other token but by attention.
_LAYERS = {"full_attention", "sliding_attention"}
#: Rotary embeddings whose frequencies follow from the longest position that a rank has seen.
_BY_LENGTH = ("dynamic", "longrope")
_SDPA = "transformers.integrations.sdpa_attention"
_SDPA_PLACE = 'attn_implementation="sdpa" inside context_parallel'


def check_sdpa(
    shards: RingMode, query: Tensor, mask: Tensor | None, caller: types.FrameType
) -> None:
    """A call of SDPA by transformers' own "sdpa", if the caller is that: SDPA is told neither positions nor windows.

    Only the caller's arguments have them.
    """
    if _SDPA not in sys.modules or caller.f_globals.get("__name__") != _SDPA:
        return
    told = caller.f_locals.get("kwargs", {})
    check_model(getattr(caller.f_locals.get("module"), "config", None), shards.total, _SDPA_PLACE)
    check_positions(
        shards, told.get("position_ids"), query, _SDPA_PLACE, mask, f"{OURS}, and {POSITIONS}"
    )
    # transformers makes no mask for a window where this rank's keys are fewer.
    window = told.get("sliding_window")
    if window is not None and window < shards.total:
        shards.refuse(
            query,
            f"{_SDPA_PLACE} loses a sliding window that is longer than a rank's part, got {window} of "
            f"{shards.total} tokens: {OURS}",
        )


def check_model(config: object, total: int, place: str) -> None:
    """Whether all layers are such that hand their tokens to attention alone, and no embedding looks at a length."""
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds:
        raise NotImplementedError(
            f"{place}: layers of {', '.join(sorted(kinds))} would see this rank's tokens alone; only "
            f"{' and '.join(sorted(_LAYERS))} go over the ranks"
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    for one in (ropes, *(x for x in ropes.values() if isinstance(x, dict))):
        longest = one.get("original_max_position_embeddings") or getattr(
            config, "max_position_embeddings", 0
        )
        if one.get("rope_type") in _BY_LENGTH and total > longest:
            raise NotImplementedError(
                f"{place}: rotary embeddings of rope_type {one['rope_type']!r} follow from the longest position "
                f"of a rank beyond {longest} tokens, got {total}; use a rope_type that does not"
            )


_checked: weakref.WeakKeyDictionary[RingMode, tuple[weakref.ref, int]] = weakref.WeakKeyDictionary()


def check_positions(
    shards: RingMode, position_ids: Tensor | None, query: Tensor, place: str, mask: Tensor | None = None,
    remedy: str = POSITIONS,
) -> None:  # fmt: skip
    """Whether the layer's position_ids are the shard's, once for each tensor: layers are given the same one.

    The tensor's identity is the same question on all ranks, which run the same program: so they ask each other alike.

    mask: what transformers made of the positions; a rank whose own are no single run has one, which says so.
    """
    if position_ids is None:
        raise NotImplementedError(
            f"{place} needs position_ids, and its layers are told none: {remedy}. Where they were given, this "
            "model does not hand them to its layers, and nothing shows which positions its tokens have: call "
            "torch_fdattn.dist.ring_attention in a model of your own"
        )
    last = _checked.get(shards)
    version = None if position_ids.is_inference() else position_ids._version
    if None not in (version, last) and last[0]() is position_ids and last[1] == version:
        return
    own = shards.positions.to(position_ids.device)
    said = difference(position_ids, own)
    if said is None and mask is not None:
        said = "there is padding, or positions that are no single run, which transformers takes for packed sequences"
    shards.raise_on_all_ranks(query.device, ValueError, said, f"{place}: {remedy}")
    _checked[shards] = weakref.ref(position_ids), version


def difference(position_ids: Tensor, own: Tensor) -> str | None:
    """What is said of positions that are not the shard's own; waits for the device."""
    if position_ids.shape[-1:] == own.shape and bool((position_ids == own).all()):
        return None
    return f"position_ids are {_shown(position_ids)} where the shard has {_shown(own)}"


def _shown(positions: Tensor) -> str:
    numbers = positions.reshape(-1, positions.shape[-1])[0].tolist()
    return str(numbers) if len(numbers) <= 16 else f"[{', '.join(map(str, numbers[:16]))}, …]"
