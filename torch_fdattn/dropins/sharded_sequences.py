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


def check_mask(
    shards: RingMode, sizes: tuple[int, int, Any, int], mask_function: Callable, attention_mask: Tensor | None,
    config: object, hf: types.ModuleType,
) -> Callable:  # fmt: skip
    """The mask function of all ranks' tokens, from the one that transformers made for this rank's."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f'{PLACE} is eager: for compiled models torch.compile(model, backend="fdattn", '
            'options={"context_parallel": …}) in its place'
        )
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
    # To transformers, positions that are not one run are several sequences: but they are this rank's of one.
    own = shards.positions
    return without_packing(mask_function, own, hf) or mask_function


def check_positions(shards: RingMode, position_ids: Tensor | None, query: Tensor) -> None:
    from torch_fdattn.dist.ring_attention import transformers_layers

    transformers_layers.check_positions(shards, position_ids, query, PLACE)


def refuse_packed(shards: RingMode, query: Tensor) -> None:
    """Packed sequences, on every rank."""
    shards.refuse(
        query,
        f"{PLACE} takes no cu_seq_lens_q: call torch_fdattn.varlen_attention in a model of your own, with "
        "cu_seqlens_q of all tokens",
    )
