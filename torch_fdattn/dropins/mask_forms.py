"""What layers of transformers are given as their attention_mask where a few numbers say all that a mask would.

A layer is never left to know by its own `is_causal` what a mask that was made means: whoever makes it says so, by
a tensor's dtype and shape, which pass unseen through models, checkpoints and compiled graphs:

    uint8 (B, window + 2, 1, S)   causal, the last queries at the last keys; 1 where a key is no padding.
                                  S = 0: no padding. window = 0: none.
    int32 (B, window + 2, 1, 2)   causal, over a static cache: where the last query stands, and how many keys there
                                  are up to it
    int8  (B, 1, 1, 0)            nothing is hidden
    bool, floating point          a mask

What the last queries may see follows from their number, so that a model that attends for its last tokens alone may
cut its mask's rows (Gemma 4's layers that share keys). None was made by nobody here: the layer's is_causal counts, as
under sdpa. All are expanded, and take no memory but padding's one row a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal(batch: int, window: int, keys: Tensor | None, device: torch.device | str) -> Tensor:
    """keys (B, S): True at keys that are no padding; None where none is. window 0: none."""
    if keys is None:
        return torch.empty((batch, window + 2, 1, 0), dtype=torch.uint8, device=device)
    return keys.view(torch.uint8)[:, None, None].expand(batch, window + 2, 1, -1)


def over_a_static_cache(batch: int, window: int, length: Tensor) -> Tensor:
    """length (): keys before and among the queries; its device's value is not read."""
    state = torch.stack((length - 1, length)).to(torch.int32)
    # Kernels read starts and lengths as vectors, one behind the other: (2, B) in memory.
    state = state[:, None].expand(2, batch).contiguous().mT
    return state[:, None, None].expand(batch, window + 2, 1, 2)


def nothing_hidden(batch: int, device: torch.device | str) -> Tensor:
    return torch.empty((batch, 1, 1, 0), dtype=torch.int8, device=device)


def arguments_of(mask: Tensor | None, query: Tensor, is_causal: bool) -> dict[str, Any]:
    """A mask of these forms, or one that a model or its user made, in the arguments of our ops."""
    if mask is None:
        return {"causal": is_causal}
    if mask.dim() != 4:
        raise ValueError(
            'attention_mask must have 4 dimensions in a layer with attn_implementation="fdattn", got shape '
            f"{tuple(mask.shape)}: does this model make its masks by itself?"
        )
    if mask.dtype == torch.bool or mask.is_floating_point():
        return {"causal": False, "attn_mask": mask}
    _, heads, queries, _ = query.shape
    _, width, rows, columns = mask.shape
    # A user's mask of each head, of one query, has such a shape too, but lies in memory.
    by_heads = width == heads and columns > 0 and mask.stride(1) != 0
    if rows == 1 and not by_heads:
        window = (width - 3, 0) if width > 2 else None
        if mask.dtype == torch.int8 and width == 1 and not columns:
            return {"causal": False}
        if mask.dtype == torch.uint8 and width >= 2:
            keys = mask[:, :1].view(torch.bool) if columns else None
            return {"causal": True, "window": window, "attn_mask": keys}
        if mask.dtype == torch.int32 and width >= 2 and columns == 2:
            last, lengths = mask[:, 0, 0].unbind(1)
            first = last if queries == 1 else last - (queries - 1)
            return {"causal": True, "window": window, "q_start": first, "kv_lens": lengths}
    raise ValueError(
        "attention_mask must be boolean or floating point, or what fdattn_mask makes, got "
        f"{mask.dtype} of shape {tuple(mask.shape)}: a model that changes its masks needs another "
        "attn_implementation"
    )


def with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """An additive mask of both."""
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else mask + bias
