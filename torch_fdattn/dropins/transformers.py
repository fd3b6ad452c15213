"""transformers' `attn_implementation="fdattn"`, after `torch_fdattn.dropins.transformers.register()`.

transformers asks for two functions: `fdattn_mask`, once a forward, makes what the layers are then given as
their attention_mask, and `fdattn_attention` attends. A mask that is known to be causal, with or without a
sliding window, is not made: what is given in its place says so by its dtype and shape alone, which pass unseen
through models, checkpoints and compiled graphs, and holds only data:

    uint8 (B, 1, window + 1, S)   causal, the last queries at the last keys; 1 where a key is no padding.
                                  S = 0: no padding. window = 0: none. Rows are one, expanded.
    int32 (B, 2, window + 1, 1)   causal, from a static cache: where the first query stands, and how many keys
                                  are before and among the queries
    None                          causal or full, as the layer's is_causal says, nothing hidden

All other masks (packed sequences, chunks, images, whatever a user composes) are boolean, (B, 1, queries, S), as
sdpa is given them, and stay explicit operands.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fdattn.functional import attention, decode, varlen_attention

NAME = "fdattn"
_hf: types.ModuleType | None = None  # transformers.masking_utils, from register() on
_MOST_QUERIES = 16  # of decode
_CHECKED: set[type] = set()  # configurations whose models are known to fit


def register() -> None:
    """Makes `attn_implementation="fdattn"` known to transformers; any number of times.

    Raises:
        ImportError: transformers is not installed, or is older than 5.5.
    """
    global _hf
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(
            'attn_implementation="fdattn" needs transformers >= 5.5: pip install "torch-fdattn[transformers]" '
            f"({error})"
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
    _check_model(type(kwargs.get("config")))
    if mask_function is None:
        mask_function = hf.causal_mask_function
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if torch.compiler.is_compiling():
        # Dynamo does not follow `_same_function`; no mask is made only where it is so by lengths alone.
        return hf.sdpa_mask(
            *sizes, mask_function, attention_mask, local_size, device=device, allow_is_causal_skip=
            allow_is_causal_skip and isinstance(q_offset, int) and q_length == kv_length,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs,
        )  # fmt: skip
    full = mask_function is hf.bidirectional_mask_function
    window = 0 if full else _window(mask_function, local_size, hf)
    # A step over a static cache is never "skipped", lest a compiled step change its form; here it has one. But a
    # model may have forbidden it too, and nothing but its code tells.
    step = q_length == 1 and isinstance(q_offset, Tensor)
    step = step and not _asks_for_masks(type(kwargs.get("config")))
    if full:
        wanted = not allow_is_bidirectional_skip
    else:
        wanted = window is None or not (allow_is_causal_skip or step)
    if wanted:  # or not ours to describe
        return _explicit(hf, *sizes, mask_function, attention_mask, local_size, device, kwargs)
    end = kv_offset + kv_length if full else q_offset + q_length
    padding = _padding(attention_mask, kv_length, kv_offset, end)
    if full:
        if padding is None:
            return None
        return padding[:, None, None].expand(batch_size, 1, q_length, kv_length)
    if isinstance(q_offset, int) and end == kv_offset + kv_length:
        window = window if window < kv_length else 0
        if padding is not None:
            return padding.view(torch.uint8)[:, None, None].expand(batch_size, 1, window + 1, -1)
        if not window:
            return None
        return torch.empty(batch_size, 1, window + 1, 0, dtype=torch.uint8, device=device)
    if padding is None:
        first = torch.as_tensor(q_offset, device=device).reshape(()) - kv_offset
        state = torch.stack((first, first + q_length)).to(torch.int32)
        # Kernels read starts and lengths as vectors, one behind the other: (2, B) in memory.
        state = state[:, None].expand(2, batch_size).contiguous().mT
        return state[:, :, None, None].expand(batch_size, 2, window + 1, 1)
    return _explicit(hf, *sizes, mask_function, attention_mask, local_size, device, kwargs)


@torch.compiler.assume_constant_result  # or Dynamo would trace it
def _check_model(config_class: type) -> None:
    """Raises for models that attend by themselves: they would add to their scores what is no mask of theirs.

    transformers lets any model have any registered name. Classes that it does not list are not checked.
    """
    if config_class in _CHECKED:
        return
    import transformers

    model = transformers.MODEL_MAPPING.get(config_class, None)
    for one in model if isinstance(model, tuple) else (model,):
        if one is not None and not one._can_set_attn_implementation():
            raise NotImplementedError(
                f'attn_implementation="fdattn": {one.__name__} of transformers {transformers.__version__} does '
                "not take its attention from AttentionInterface; use its own, or "
                'torch.compile(model, backend="fdattn")'
            )
    _CHECKED.add(config_class)


@functools.cache
def _asks_for_masks(config_class: type) -> bool:
    """Whether the code of a configuration's model names the argument that forbids to leave masks out.

    Such models compute with their masks (Doge, the indexers of DeepSeek-V3.2 and its kin).
    """
    module = sys.modules.get(config_class.__module__.replace("configuration_", "modeling_"))
    if module is None or module.__name__ == config_class.__module__:
        return False
    try:
        return "allow_is_causal_skip" in inspect.getsource(module)
    except OSError:  # no source: not to be wrong is worth a mask
        return True


def _explicit(hf, *arguments) -> Tensor:
    """transformers' own boolean mask."""
    *arguments, device, kwargs = arguments
    return hf.sdpa_mask(
        *arguments, device=device, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs
    )  # fmt: skip


def _window(mask_function: Callable, local_size: int | None, hf: types.ModuleType) -> int | None:
    """Of a causal mask: its sliding window, 0 for none; None for any other mask."""
    if mask_function is hf.causal_mask_function:
        return 0
    if local_size is not None and _same_function(
        mask_function, hf.sliding_window_causal_mask_function(local_size)
    ):
        return local_size
    return None


def _same_function(a: object, b: object) -> bool:
    """Whether two closures have the same code over the same values, and so are the same function."""
    if not (isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType)):
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return all(map(_same_function, a, b))
        return type(a) is type(b) is int and a == b
    if a is b:
        return True
    cells = [x.__closure__ or () for x in (a, b)]
    return a.__code__ is b.__code__ and _same_function(
        *(tuple(cell.cell_contents for cell in of) for of in cells)
    )


def _padding(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int, end: int | Tensor
) -> Tensor | None:
    """True at keys that are tokens, (B, kv_length); None where all before position `end` are.

    It reads the values, once a forward, as transformers' own sdpa and flash attention do: without padding there
    is nothing to read for each key.
    """
    if attention_mask is None:
        return None
    given = attention_mask[:, kv_offset : kv_offset + kv_length]
    # Keys behind the mask's end count as padding, which matters where queries reach them.
    if not _hf.is_tracing(given) and bool(given.all() & (attention_mask.shape[1] >= end)):
        return None
    return torch.nn.functional.pad(given, (0, kv_length - given.shape[1]))


#: Arguments with which some models (DeepSeek-V3.2, MiniMax M3, Inkling 2) say what their mask does not.
_CHOOSE_KEYS = ("indices", "block_indices", "sinks")


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
            'attn_implementation="fdattn" has no continuous batching (a paged cache was given): use '
            'attn_implementation="sdpa" for it'
        )
    for name in _CHOOSE_KEYS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f'attn_implementation="fdattn" does not know {name} (keys that a layer chooses, or its own '
                'sinks), which would be lost: use attn_implementation="eager" for this model'
            )
    if kwargs.get("output_attentions"):
        warnings.warn(
            'attn_implementation="fdattn" makes no attention weights and returns None for them: use '
            'attn_implementation="eager" where output_attentions=True is needed',
            stacklevel=2,
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = {"scale": scaling, "softcap": softcap or 0, "sinks": s_aux}
    if cu_seq_lens_q is not None:
        return _packed(
            query, key, value, cu_seq_lens_q, cu_seq_lens_k, attention_mask=attention_mask,
            position_bias=position_bias, dropout=dropout, causal=is_causal, window=sliding_window, **options,
        )  # fmt: skip
    visible = _mask_arguments(attention_mask, query, is_causal)
    if position_bias is not None:
        visible["attn_mask"] = _with_bias(visible.get("attn_mask"), position_bias)
    if _is_decode(query, key, value, s_aux, visible.get("attn_mask"), dropout):
        out, _ = decode(query, key, value, **visible, **options)
    else:
        out, _ = attention(query, key, value, dropout_p=dropout or 0, **visible, **options)
    return out.transpose(1, 2).contiguous(), None


def _mask_arguments(mask: Tensor | None, query: Tensor, is_causal: bool) -> dict[str, Any]:
    """What `fdattn_mask` said, or a mask that a model or its user made, in our arguments."""
    if mask is None:
        return {"causal": is_causal}
    if mask.dim() != 4:
        raise ValueError(
            'attention_mask must have 4 dimensions in a layer with attn_implementation="fdattn", got shape '
            f"{tuple(mask.shape)}: does this model make its masks by itself?"
        )
    if mask.dtype == torch.bool or mask.is_floating_point():
        return {"causal": False, "attn_mask": mask}
    width = mask.shape[2] - 1
    window = (width - 1, 0) if width else None
    if mask.dtype == torch.uint8 and mask.shape[1] == 1:
        keys = mask[:, :, :1].view(torch.bool) if mask.shape[3] else None
        return {"causal": True, "window": window, "attn_mask": keys}
    if mask.dtype == torch.int32 and mask.shape[1] == 2 and mask.shape[3] == 1:
        first, lengths = mask[:, :, 0, 0].unbind(1)
        return {"causal": True, "window": window, "q_start": first, "kv_lens": lengths}
    raise ValueError(
        "attention_mask must be boolean or floating point, or what fdattn_mask makes, got "
        f"{mask.dtype} of shape {tuple(mask.shape)}: a model that changes its masks needs another attn_implementation"
    )


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else mask + bias


def _is_decode(query, key, value, sinks, mask: Tensor | None, dropout: float) -> bool:
    """A few new tokens over a cache, without gradients."""
    if dropout or not 1 <= query.shape[2] <= min(_MOST_QUERIES, key.shape[2] - 1):
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
