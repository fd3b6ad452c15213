"""transformers' continuous batching (`generate_batch`) by our kernels, within `continuous_batching(model)`.

transformers packs the tokens of all requests into one row, and keeps keys and values in pages. What it asks of an
attention has changed:

    5.5 to 5.18     a name with "paged|" before it; the attention updates the cache, by read_index and write_index
    5.19 to 5.23    a name with "flash" in it, whose functions it loads; the attention updates the cache, by kwargs
    5.24            the same names; the cache is updated before the attention is called

Either name leads to `paged_attention`. Where transformers decodes over tables of pages (5.19 on, CUDA) it first loads
the functions of a flash attention from a package or a hub; while the context lasts it finds ours where it keeps those
that it has loaded, which are private names. They are never called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_fdattn.dropins.layer_arguments import refuse_unknown
from torch_fdattn.dropins.model_kinds import ModelKind, kind_of
from torch_fdattn.functional import paged_append_kv, paged_decode, varlen_attention

PREFIXED = "paged|fdattn"
#: transformers looks for "flash" and, before it hands out tables of pages, for a 2 or 3 behind it.
FLASH = "fdattn_flash2"
#: Where transformers keeps the implementation that it has loaded.
_LOADED = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn")


def is_prefixed() -> bool:
    """Whether this transformers asks for names with "paged|" before them (5.5 to 5.18)."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    return _takes(PagedAttentionCache, "read_index")


@functools.cache
def _takes(cache: type, name: str) -> bool:
    return name in inspect.signature(cache.update).parameters


def forgets_keys() -> bool:
    """Whether this transformers hands out a window's oldest keys in place of its newest (before 5.16)."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 16)


def _refuse_windows() -> None:
    if forgets_keys():
        raise NotImplementedError(
            "continuous_batching of layers with a sliding window needs transformers >= 5.16: before, its cache hands "
            "out the oldest keys of a window in place of the newest, whatever the attention"
        )


def _has_windows(config: object) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is not None
    return "sliding_attention" in kinds


def register() -> None:
    """Makes the names known to transformers. No masks go with them: continuous batching makes none for flash."""
    from transformers import AttentionInterface

    AttentionInterface.register(PREFIXED if is_prefixed() else FLASH, paged_attention)


@contextlib.contextmanager
def continuous_batching(model: torch.nn.Module) -> Iterator[None]:
    """Within it `model.generate_batch`, and managers that are made and run within it, attend by our kernels.

    model: a decoder of transformers 5.5 or later that transformers' flash attention supports: full or sliding layers,
        softcap, attention sinks. The attention that it had is set when the context ends. `generate`, or a plain
        forward, inside raises ValueError: it has no pages.

    Raises:
        NotImplementedError: the model attends by itself, or needs masks of its own, or has sliding windows in
            transformers before 5.16; transformers has been rebuilt since 5.24. What a layer refuses later, in the thread of
            generate_batch, transformers logs: it returns no results then.
        ValueError: parts of the model have different attentions.

    Source: transformers, generation/continuous_batching.

    Examples:
        >>> from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
        >>> torch_fdattn.dropins.transformers.register()
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        ...     attn_implementation="fdattn",
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
        >>> pages = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # or most of the memory is taken
        >>> with torch_fdattn.dropins.transformers.continuous_batching(model):
        ...     done = model.generate_batch([[1, 2, 3], [4, 5]], settings, pages)
        >>> [len(request.generated_tokens) for request in done.values()]
        [3, 3]
    """
    before = _attention_of(model)
    if kind_of(type(model.config)) is not ModelKind.HANDS_ON:
        raise NotImplementedError(
            f"continuous_batching: {type(model).__name__} needs masks of its own (transformers' flash attention does "
            'not support it), which continuous batching does not make: use attn_implementation="sdpa"'
        )
    if _has_windows(model.config.get_text_config(decoder=True)):
        _refuse_windows()
    register()
    name = PREFIXED if is_prefixed() else FLASH
    with contextlib.nullcontext() if name == PREFIXED else _loaded():
        # Not by set_attn_implementation, which has models with flash kernels of their own (gpt-oss) take those.
        model.config._attn_implementation = name
        try:
            yield
        finally:
            model.config._attn_implementation = before


def _attention_of(model: torch.nn.Module) -> str:
    configs = [x.config for x in model.modules() if hasattr(x, "set_attn_implementation")]
    names = sorted({config._attn_implementation for config in configs})
    if len(names) != 1:
        raise ValueError(
            f"model must have one attention for continuous_batching, got {', '.join(names) or type(model).__name__}"
        )
    return names[0]


@contextlib.contextmanager
def _loaded() -> Iterator[None]:
    """Our name is the flash implementation that transformers has loaded."""
    import transformers
    from transformers import modeling_flash_attention_utils as flash

    if missing := [name for name in _LOADED if not hasattr(flash, name)]:
        raise NotImplementedError(
            f"continuous_batching: transformers {transformers.__version__} has no {missing[0]}; 5.5 to 5.24 have been "
            'tested. Use attn_implementation="sdpa"'
        )
    before = {name: getattr(flash, name) for name in _LOADED}
    vars(flash).update({**dict.fromkeys(_LOADED, _uncalled), _LOADED[0]: FLASH})
    try:
        yield
    finally:
        vars(flash).update(before)


def _uncalled(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(f"transformers called a function of flash attention in place of {FLASH!r}")


def paged_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, sliding_window: int | None = None,
    cache: object = None, cu_seq_lens_q: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer over all requests: (1, T, H, D), and None for the weights.

    query (1, H, T, D): the new tokens of all requests, one after the other as cu_seq_lens_q says. key, value
    (1, H_kv, T, D): the new ones where `cache` is given or pages are (block_table), else all that cu_seq_lens_k counts.
    """
    refuse_unknown(kwargs)
    if cu_seq_lens_q is None or kwargs.get("cu_seq_lens_k") is None:
        raise ValueError(
            "cu_seq_lens_q must be given, as generate_batch does, got None: within continuous_batching a model runs "
            'generate_batch alone; use attn_implementation="fdattn" for generate and for training'
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("continuous_batching is causal, got a layer with is_causal=False")
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("continuous_batching takes no position_bias")
    if dropout:
        raise NotImplementedError(f"continuous_batching drops no weights, got dropout {dropout}")
    if cache is not None:
        key, value, sliding_window = _update(cache, module, key, value, sliding_window, kwargs)
    window = (sliding_window - 1, 0) if sliding_window else None
    options = {"window": window, "scale": scaling, "softcap": softcap or 0, "sinks": s_aux}
    cu_seq_lens_q, cu_seq_lens_k = (
        x.to(torch.int32) for x in (cu_seq_lens_q, kwargs["cu_seq_lens_k"])
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if kwargs.get("block_table") is not None:
        pages = kwargs["k_cache"], kwargs["v_cache"], kwargs["block_table"]
        return _decode(q, k, v, cu_seq_lens_k.diff(), *pages, options), None
    out, _ = varlen_attention(q, k, v, cu_seq_lens_q, cu_seq_lens_k, causal=True, **options)
    return out[None].contiguous(), None


def _update(
    cache, module, key, value, sliding_window: int | None, kwargs: dict
) -> tuple[Tensor, Tensor, int | None]:
    """Keys and values to attend to, as key and value are, and the window; kwargs are then those of this layer."""
    states = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
    if not _takes(type(cache), "read_index"):
        if isinstance(
            kwargs["cu_seq_lens_k"], dict
        ):  # else a layer that has updated it hands it on
            key, value = cache.update(**states, kwargs=kwargs)
        return key, value, sliding_window
    if kwargs.get("block_table") is not None:
        raise NotImplementedError(
            "continuous_batching reads no block_table in transformers before 5.19: leave max_blocks_per_request at 0"
        )
    # 1 for full attention. Not all layers say theirs, and this is what the cache keeps keys by.
    sliding_window = cache.sliding_windows[module.layer_idx]
    sliding_window = None if sliding_window == 1 else sliding_window
    if sliding_window:
        _refuse_windows()
    places = {name: kwargs[name] for name in ("read_index", "write_index")}
    key, value = (x.transpose(0, 1)[None] for x in cache.update(**states, **places))
    if isinstance(kwargs["cu_seq_lens_k"], dict):
        kind = "sliding_attention" if sliding_window else "full_attention"
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][kind]
    return key, value, sliding_window


def _decode(
    q, k, v, lens: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, options: dict
) -> Tensor:
    """One new token a request, which is stored and then attended to where it lies; lens count it.

    q (B, H, D), k and v (B, H_kv, D); k_cache and v_cache (P, page, H_kv, D). Rows of padding have no keys.
    """
    lens, table = lens[: len(q)], block_table[: len(q)]
    q, k, v = (x[:, None] for x in (q, k, v))
    with torch.no_grad():
        paged_append_kv(
            k_cache, v_cache, table, k, v, lens - 1, layout="bshd"
        )  # at -1 nothing is stored
    out, _ = paged_decode(q, k_cache, v_cache, table, lens, layout="bshd", **options)
    return out.transpose(0, 1).contiguous()
