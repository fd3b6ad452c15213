"""Inside `context_parallel`: what a layer of transformers' models must be told, by whatever name it attends.

A rank sees its own tokens alone. What is refused is refused on every rank, or the others would wait.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_fdattn.dist.consensus import digest_of, largest_on_all_ranks, raise_on_all_ranks
from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards, check_documents
from torch_fdattn.dist.ring_attention.transformers_models import (
    LABELS,
    fault_of_labels,
    model_that_embeds_no_positions,
)

if TYPE_CHECKING:
    from torch_fdattn.dist.ring_attention.context_parallel import RingMode

OURS = 'use attn_implementation="fdattn" (torch_fdattn.dropins.transformers.register())'
POSITIONS = (
    "give the model position_ids, this rank's part of all positions: "
    "(position_ids,) = shard_batch(group, shards, torch.arange(total)[None]), or with cu_seqlens, which packed documents "
    "need, positions that begin with 0 in each: shards.positions(rank, cu_seqlens=cu_seqlens)[None]"
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
    if shards.total > 1 and min(shards.lengths) < 2:
        # Of one query transformers says that it is not causal: it would be a step over a cache.
        shards.refuse(
            query,
            f"{_SDPA_PLACE} must have two tokens on every rank, or its attention is not causal, got shards of "
            f"{shards.lengths} tokens: {OURS}, or give each rank more tokens",
        )
    check_model(getattr(caller.f_locals.get("module"), "config", None), shards.total, _SDPA_PLACE)
    check_positions(
        shards,
        told.get("position_ids"),
        query,
        _SDPA_PLACE,
        mask,
        f"{OURS}, and {POSITIONS}",
        module=caller.f_locals.get("module"),
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


class AcceptedPositions(NamedTuple):
    """What a rank's tokens may be given: int64 (tokens of the rank,), on the CPU. All ranks must be given the same kind."""

    in_documents: Tensor
    #: the same tensor where there are no documents
    in_sequence: Tensor
    documents: tuple[int, ...]
    #: why the documents are none of this sequence
    fault: str | None = None

    @classmethod
    def of(cls, shards: SequenceShards, rank: int, documents: tuple[int, ...]) -> AcceptedPositions:
        in_sequence = shards.positions(rank)
        if not documents:
            return cls(in_sequence, in_sequence, documents)
        try:
            check_documents(documents, shards.total)
        except ValueError as error:
            return cls(in_sequence, in_sequence, documents, str(error))
        return cls(shards.positions(rank, cu_seqlens=documents), in_sequence, documents)


#: The layer that asked last, None where it is not known, and what it was given.
_Asked = tuple[weakref.ref | None, list[tuple[weakref.ref, int | None]]]
_checked: weakref.WeakKeyDictionary[RingMode, _Asked] = weakref.WeakKeyDictionary()


def check_positions(
    shards: RingMode, position_ids: Tensor | None, query: Tensor, place: str, mask: Tensor | None = None,
    remedy: str = POSITIONS, cu_seq_lens: tuple[Tensor, ...] = (), module: torch.nn.Module | None = None,
) -> None:  # fmt: skip
    """Whether the layer's position_ids are the shard's, once for each forward: its layers are given the same tensor.

    The tensor's identity is the same question on all ranks within a forward; of two forwards one rank may be given the same
    tensor, and another a copy. So the layer that asked asks again where it is called again: all ranks ask each other alike.

    module: the layer.
    mask: what transformers made of the positions; a rank whose own are no single run has one, which says so.
    cu_seq_lens: what the layer is told of packed documents, which must be those of `context_parallel`.
    """
    if position_ids is None:
        raise NotImplementedError(
            f"{place} needs position_ids, and its layers are told none: {remedy}. Where they were given, this "
            "model does not hand them to its layers, and nothing shows which positions its tokens have: call "
            "torch_fdattn.dist.ring_attention in a model of your own"
        )
    given = position_ids, *cu_seq_lens
    asked, last = _checked.get(shards, (None, ()))
    versions = [None if x.is_inference() else x._version for x in given]
    is_again = module is not None and asked is not None and asked() is module
    if not is_again and None not in versions and len(last) == len(given):
        pairs = zip(last, given, versions, strict=True)
        if all(ref() is x and seen == version for (ref, seen), x, version in pairs):
            return
    model_name = model_that_embeds_no_positions(sys._getframe(1))
    if model_name is not None:
        raise NotImplementedError(
            f"{place} needs a model whose forward has position_ids as a parameter, which its embedding of positions reads, "
            f"got {model_name}: its position_ids go to the layers alone, and its embedding counts this rank's own tokens. Compiled, "
            'options={"context_parallel": …} of the backend "fdattn" shows where it makes positions; take a model that '
            "embeds position_ids"
        )
    said = None
    if mask is not None:
        said = "there is padding, or positions that are no single run, which transformers takes for packed sequences"
    for x in cu_seq_lens:
        if x.tolist() != list(shards.documents):
            said = f"the layers' cu_seq_lens are {shown(x)}, and context_parallel's cu_seqlens {shown(shards.documents)}"
    of_labels = fault_of_labels(sys._getframe(1)) if len(shards.lengths) > 1 else None
    remedy = remedy if of_labels is None else LABELS
    shards.compare_positions(position_ids, query.device, of_labels or said, f"{place}: {remedy}")
    _checked[shards] = (
        None if module is None else weakref.ref(module),
        [(weakref.ref(x), v) for x, v in zip(given, versions, strict=True)],
    )


def compare_positions(
    group_name: str, device: torch.device, position_ids: Tensor, accepted: AcceptedPositions, said: str | None,
    remedy: str,
) -> None:  # fmt: skip
    """Raises ValueError on every rank unless the position_ids of all ranks are of one kind that is accepted.

    said: what else this rank has to say against them, of several things the last. Waits for the device.
    """
    fault = difference(position_ids, accepted.in_documents)
    other = fault
    if accepted.in_sequence is not accepted.in_documents:
        other = difference(position_ids, accepted.in_sequence)
    said = accepted.fault or (said if fault is None or other is None else fault)
    digest = digest_of(accepted.documents)
    flags = said is not None, fault is not None, other is not None
    is_wrong, *refused, largest, negated = largest_on_all_ranks(
        group_name, device, [*flags, digest, -digest]
    )
    if largest != -negated:
        said = f"cu_seqlens are {shown(accepted.documents)}"
    elif not (is_wrong or all(refused)):
        return
    elif not is_wrong and (fault is None) != (other is None):
        said = "position_ids begin with 0 in each document" if fault is None else "position_ids are of the whole sequence"  # fmt: skip
    raise_on_all_ranks(group_name, device, ValueError, said, remedy)


def difference(position_ids: Tensor, own: Tensor) -> str | None:
    """What is said of positions that are not the shard's own; waits for the device."""
    if position_ids.shape[-1:] == own.shape and bool((position_ids == own.to(position_ids.device)).all()):  # fmt: skip
        return None
    rows = position_ids.reshape(-1, position_ids.shape[-1])
    return f"position_ids are {shown(rows[0])} where the shard has {shown(own)}"


def shown(numbers: Tensor | Sequence[int]) -> str:
    """The first of them."""
    numbers = numbers.tolist() if isinstance(numbers, Tensor) else list(numbers)
    return str(numbers) if len(numbers) <= 16 else f"[{', '.join(map(str, numbers[:16]))}, …]"
