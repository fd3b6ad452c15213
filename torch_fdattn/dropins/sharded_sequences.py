"""Inside `dist.context_parallel`: what a model of transformers may be given there, and what it computed from lengths.

A rank sees its own tokens alone, so that nothing may follow from their number. What is refused is refused on every
rank, or the others would wait.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_fdattn.dropins.mask_functions import without_packing

if TYPE_CHECKING:
    from torch_fdattn.dist.ring_attention.context_parallel import RingMode

PLACE = 'attn_implementation="fdattn" inside context_parallel'


def context() -> RingMode | None:
    """The `dist.context_parallel` that is under way, if one is."""
    if not torch._C._len_torch_function_stack():
        return None
    module = sys.modules.get("torch_fdattn.dist.ring_attention.context_parallel")
    return None if module is None else module.active()


def _expect_eager() -> None:
    if torch.compiler.is_compiling():
        from torch_fdattn.dist.ring_attention.local_attention import refuse_compiled

        refuse_compiled(f"{PLACE} is eager")


def check_mask(
    shards: RingMode, sizes: tuple[int, int, Any, int], mask_function: Callable, attention_mask: Tensor | None,
    config: object, hf: types.ModuleType,
) -> Callable:  # fmt: skip
    """The mask function of all ranks' tokens, from the one that transformers made for this rank's."""
    _expect_eager()
    from torch_fdattn.dist.ring_attention.transformers_layers import check_model

    check_model(config, shards.total, PLACE)
    q_length, kv_length, q_offset, kv_offset = sizes
    if isinstance(q_offset, Tensor) or q_offset or kv_offset or q_length != kv_length:
        raise NotImplementedError(
            f"{PLACE} has no cache (past_key_values must be empty, use_cache=False), got {q_length} queries and "
            f"{kv_length} keys"
        )
    if attention_mask is not None:  # which ranks have the padding, no rank knows
        said = None if bool(attention_mask.all()) else "attention_mask has padding"
        shards.raise_on_all_ranks(
            attention_mask.device, NotImplementedError, said,
            f"{PLACE} takes no padding: cut it off, or pack the sequences of equal length",
        )  # fmt: skip
    if mask_function is hf.bidirectional_mask_function:
        return mask_function
    # To transformers, positions that are not one run are several sequences: but they are this rank's of one, or of the
    # documents that `context_parallel` was told.
    accepted = shards.accepted_positions
    for own in {id(x): x for x in (accepted.in_documents, accepted.in_sequence)}.values():
        inner = without_packing(mask_function, own, hf)
        if inner is not None:
            return inner
    return mask_function


def check_positions(
    shards: RingMode, module: torch.nn.Module, position_ids: Tensor | None, query: Tensor,
    cu_seq_lens: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """cu_seq_lens: of queries and keys, in which a collator says what `context_parallel` is told as cu_seqlens."""
    _expect_eager()
    from torch_fdattn.dist.ring_attention import transformers_layers

    given = tuple(x for x in cu_seq_lens if x is not None)
    if given and not shards.documents:
        shards.refuse(
            query,
            f"{PLACE} takes cu_seq_lens_q with cu_seqlens of context_parallel alone: "
            "context_parallel(group, shards=shards, cu_seqlens=cu_seqlens), of the documents of all ranks' tokens",
        )
    transformers_layers.check_positions(
        shards, position_ids, query, PLACE, cu_seq_lens=given, module=module
    )
