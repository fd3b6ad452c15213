"""Masks by layer type that are made of position_ids, for models that make theirs of indices of the tokens they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: transformers' functions that make the mask of a layer type.
_MADE_BY = {
    "full_attention": "create_causal_mask",
    "sliding_attention": "create_sliding_window_causal_mask",
    "chunked_attention": "create_chunked_causal_mask",
}


def masks_of_positions(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor
) -> dict[str, Tensor | None]:
    """A model's masks, made of position_ids, as the attention_mask of its call.

    gpt-oss gives its masks no position_ids: they compare indices of the tokens that it is given. Over one rank's tokens these
    are no positions, so that `options={"context_parallel": …}` of `torch.compile` refuses them. Masks of positions it takes;
    call this inside of the function that is compiled.

    Args:
        model: one of transformers', whose configuration has layer_types and which takes a mask for each of them.
        input_ids: int64 (B, S), this rank's tokens.
        position_ids: int64 (1, S) or (B, S), their positions among the tokens of all ranks.

    Returns:
        For each of the model's layer types its causal mask, in its attn_implementation's form: boolean or of numbers,
        (B, 1, S, S). None where transformers makes none.

    Raises:
        NotImplementedError: transformers is older than 5.23, or the model has layers of other types.

    Source: transformers' `masking_utils.py`.

    Examples:
        >>> from transformers import GptOssConfig, GptOssForCausalLM
        >>> model = GptOssForCausalLM(GptOssConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16, num_attention_heads=2,
        ...     num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, attn_implementation="eager",
        ... ))
        >>> tokens, positions = torch.arange(8)[None], torch.arange(8)[None]
        >>> masks = torch_fdattn.dropins.transformers.masks_of_positions(model, tokens, positions)
        >>> sorted(masks)
        ['full_attention', 'sliding_attention']
        >>> model(tokens, position_ids=positions, attention_mask=masks, use_cache=False).logits.shape
        torch.Size([1, 8, 64])
    """
    from transformers import masking_utils

    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        raise NotImplementedError(
            "masks_of_positions needs transformers >= 5.23, whose masks compare positions"
        )
    kinds = sorted(set(getattr(model.config, "layer_types", None) or ("none in layer_types",)))
    others = [kind for kind in kinds if kind not in _MADE_BY]
    if others:
        raise NotImplementedError(
            f"model must have layers of {', '.join(_MADE_BY)} in its configuration's layer_types, got {', '.join(others)}"
        )
    # Of it transformers takes shape, dtype and device.
    like = torch.empty((*input_ids.shape, 0), dtype=model.dtype, device=input_ids.device)
    return {
        kind: getattr(masking_utils, _MADE_BY[kind])(model.config, like, None, None, position_ids)
        for kind in kinds
    }
