"""transformers' `attn_implementation="fdattn"`, after `torch_fdattn.dropins.transformers.register()`.

transformers asks for two functions: `fdattn_mask`, once a forward, makes what the layers are then given as
their attention_mask, and `fdattn_attention` attends. A mask that is known to be causal, with or without a
sliding window, or to hide nothing, is not made: what is given in its place says so (`mask_forms.py`). All other masks
(packed sequences, chunks, images, whatever a user composes) are boolean, (B, 1, queries, S), as sdpa is given them,
and stay explicit operands. Inside `dist.context_parallel` the sequence is all ranks': `sharded_sequences.py`.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fdattn.dropins import mask_forms, sharded_sequences
from torch_fdattn.dropins.continuous_batching import continuous_batching as continuous_batching
from torch_fdattn.dropins.continuous_batching import register as register_paged
from torch_fdattn.dropins.layer_arguments import refuse_unknown
from torch_fdattn.dropins.mask_functions import padding as padding_of
from torch_fdattn.dropins.mask_functions import window_of
from torch_fdattn.dropins.model_kinds import ModelKind, kind_of
from torch_fdattn.dropins.position_masks import masks_of_positions as masks_of_positions
from torch_fdattn.extras import install_command
from torch_fdattn.functional import attention, decode, varlen_attention
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS

NAME = "fdattn"
_hf: types.ModuleType | None = None  # transformers.masking_utils, from register() on


def register() -> None:
    """Makes `attn_implementation="fdattn"` known to transformers; any number of times.

    Raises:
        ImportError: transformers is not installed, or is older than 5.5.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> torch_fdattn.dropins.transformers.register()
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        ...     num_attention_heads=2, attn_implementation="fdattn",
        ... )
        >>> LlamaForCausalLM(config)(torch.randint(64, (2, 10))).logits.shape
        torch.Size([2, 10, 64])
    """
    global _hf
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(
            'attn_implementation="fdattn" needs transformers >= 5.5: '
            f"{install_command('transformers')} ({error})"
        ) from error
    # Before, masks were described by cache positions: another signature under the same name.
    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(
            'attn_implementation="fdattn" needs transformers >= 5.5, got transformers '
            f"{transformers.__version__}"
        )
    _hf = masking_utils
    # Without the second, layers would get no mask, and padding would be attended to.
    AttentionInterface.register(NAME, fdattn_attention)
    AttentionMaskInterface.register(NAME, fdattn_mask)
    register_paged()


def fdattn_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable | None = None, attention_mask: Tensor | None = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, device: torch.device | str = "cpu", **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """What layers are given as their attention_mask: see the module's docstring.

    The arguments are transformers'; attention_mask is the padding, (B, tokens so far) and True at tokens.
    """
    hf = _hf
    kind = kind_of(type(kwargs.get("config")))
    if mask_function is None:
        mask_function = hf.causal_mask_function
    shards = sharded_sequences.context()
    if shards is not None:
        sizes = (q_length, kv_length, q_offset, kv_offset)
        mask_function = sharded_sequences.check_mask(
            shards, sizes, mask_function, attention_mask, kwargs.get("config"), hf
        )
        attention_mask = None
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    explicit = (hf, kind, *sizes, mask_function, attention_mask, local_size, device, kwargs)
    full = mask_function is hf.bidirectional_mask_function
    skips = allow_is_bidirectional_skip if full else allow_is_causal_skip
    if shards is not None:  # transformers forbids it where it sees several sequences
        skips = True
    if kind is not ModelKind.HANDS_ON:
        return _explicit(*explicit)
    if torch.compiler.is_compiling():
        # Dynamo does not follow `equal_functions`; no mask is made only where it is so by lengths alone.
        ends = isinstance(q_offset, int) and q_length == kv_length
        mask = hf.sdpa_mask(
            *sizes, mask_function, attention_mask, local_size, device=device,
            allow_is_causal_skip=skips and not full and ends, allow_is_bidirectional_skip=skips and full, **kwargs,
        )  # fmt: skip
        if mask is not None:
            return mask
        if full:
            return mask_forms.nothing_hidden(batch_size, device)
        return mask_forms.causal(batch_size, 0, None, device)
    window = 0 if full else window_of(mask_function, local_size, hf)
    # A step over a static cache is never "skipped", lest a compiled step change its form; here it has one.
    step = q_length == 1 and isinstance(q_offset, Tensor) and not full
    if window is None or not (skips or step):  # not ours to describe
        return _explicit(*explicit)
    end = kv_offset + kv_length if full else q_offset + q_length
    padding = padding_of(attention_mask, kv_length, kv_offset, end, hf)
    if full:
        if padding is None:
            return mask_forms.nothing_hidden(batch_size, device)
        return padding[:, None, None].expand(batch_size, 1, q_length, kv_length)
    if isinstance(q_offset, int) and end == kv_offset + kv_length:
        # A window of all keys hides nothing: but of a part of a sequence, the others' keys are not counted here.
        window = window if window < kv_length or shards is not None else 0
        return mask_forms.causal(batch_size, window, padding, device)
    if padding is None:
        length = torch.as_tensor(q_offset, device=device).reshape(()) + (q_length - kv_offset)
        return mask_forms.over_a_static_cache(batch_size, window, length)
    return _explicit(*explicit)


def _explicit(hf, kind: ModelKind, *arguments) -> Tensor:
    """transformers' own boolean mask, or eager's where a model knows no other."""
    *arguments, device, kwargs = arguments
    make = hf.eager_mask if kind is ModelKind.EAGER else hf.sdpa_mask
    names = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask",
             "local_size")  # fmt: skip
    return make(
        **dict(zip(names, arguments, strict=True)), device=device, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **kwargs,
    )  # fmt: skip


def fdattn_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
    sliding_window: int | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, cache: object = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer: (B, queries, H, D), and None for the weights, which are never made.

    query (B, H, queries, D), key and value (B, H_kv, keys, D) as the model made them: grouped heads are not
    repeated. s_aux: gpt-oss's sinks. position_bias: added to the scores (T5). cu_seq_lens_q, cu_seq_lens_k: the
    batch is one row of packed sequences; as transformers' flash attention does, the mask is then ignored, and
    sliding_window, which otherwise is the mask's, counts.
    """
    if cache is not None:
        raise NotImplementedError(
            'attn_implementation="fdattn" attends to no paged cache: continuous batching runs within '
            "torch_fdattn.dropins.transformers.continuous_batching(model)"
        )
    refuse_unknown(kwargs)
    if kwargs.get("output_attentions"):
        warnings.warn(
            'attn_implementation="fdattn" makes no attention weights and returns None for them: use '
            'attn_implementation="eager" where output_attentions=True is needed',
            stacklevel=2,
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = {"scale": scaling, "softcap": softcap or 0, "sinks": s_aux}
    shards = sharded_sequences.context()
    if cu_seq_lens_q is not None and shards is None:
        return _packed(
            query, key, value, cu_seq_lens_q, cu_seq_lens_k, attention_mask=attention_mask,
            position_bias=position_bias, dropout=dropout, causal=is_causal, window=sliding_window, **options,
        )  # fmt: skip
    if shards is not None:
        packed = cu_seq_lens_q, cu_seq_lens_k
        sharded_sequences.check_positions(shards, module, kwargs.get("position_ids"), query, packed)
    visible = mask_forms.arguments_of(attention_mask, query, is_causal)
    if position_bias is not None:
        visible["attn_mask"] = mask_forms.with_bias(visible.get("attn_mask"), position_bias)
    if shards is None and _is_decode(query, key, value, s_aux, visible.get("attn_mask"), dropout):
        out, _ = decode(query, key, value, **visible, **options)
    else:
        out, _ = attention(query, key, value, dropout_p=dropout or 0, **visible, **options)
    return out.transpose(1, 2).contiguous(), None


def _is_decode(query, key, value, sinks, mask: Tensor | None, dropout: float) -> bool:
    """A few new tokens over a cache, without gradients."""
    if dropout or not 1 <= query.shape[2] <= min(MAX_QUERY_TOKENS, key.shape[2] - 1):
        return False
    given = (x for x in (query, key, value, sinks, mask) if x is not None)
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in given))


def _packed(
    query, key, value, cu_q, cu_k, *, attention_mask, position_bias, dropout, causal, window, **options
) -> tuple[Tensor, None]:  # fmt: skip
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of one row, got {query.shape[0]} rows")
    if position_bias is not None:
        raise NotImplementedError("position_bias with cu_seq_lens_q: packed sequences take no bias")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_q, cu_k = (None if x is None else x.to(torch.int32) for x in (cu_q, cu_k))
    bounds = None if window is None else (window - 1, 0 if causal else window - 1)
    out, _ = varlen_attention(
        q, k, v, cu_q, cu_k, causal=causal, window=bounds, dropout_p=dropout or 0, **options
    )
    return out[None].contiguous(), None
