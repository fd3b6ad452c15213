"""Names, order and defaults of parameters, as FlashAttention 2.8 and 3 have them: calls by position mean the same."""

from __future__ import annotations

import inspect

import pytest

from torch_fdattn.dropins.flash_attn import bert_padding, interface_2, interface_3

_SCORES_2 = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False"  # fmt: skip
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_DESCALES = "q_descale=None k_descale=None v_descale=None"
_TAIL_3 = (
    "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False sinks=None"
)
_SCORES_3 = f"softmax_scale=None causal=False qv=None {_DESCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 {_TAIL_3}"  # fmt: skip
SIGNATURES = {
    interface_2.flash_attn_func: f"q k v {_SCORES_2}",
    interface_2.flash_attn_kvpacked_func: f"q kv {_SCORES_2}",
    interface_2.flash_attn_qkvpacked_func: f"qkv {_SCORES_2}",
    interface_2.flash_attn_varlen_func: f"q k v {_LENGTHS} {_SCORES_2} block_table=None",
    interface_2.flash_attn_varlen_kvpacked_func: f"q kv {_LENGTHS} {_SCORES_2}",
    interface_2.flash_attn_varlen_qkvpacked_func: f"qkv cu_seqlens max_seqlen {_SCORES_2}",
    interface_2.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False "
    "window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    interface_3.flash_attn_func: f"q k v {_SCORES_3}",
    interface_3.flash_attn_varlen_func: f"q k v {_LENGTHS} seqused_q=None seqused_k=None {_SCORES_3}",
    interface_3.flash_attn_qkvpacked_func: f"qkv softmax_scale=None causal=False {_DESCALES} window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    interface_3.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None "
    "cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
    f"{_DESCALES} softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    "rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False "
    "sinks=None",
    interface_3.flash_attn_combine: "out_partial lse_partial out=None out_dtype=None",
    bert_padding.unpad_input: "hidden_states attention_mask unused_mask=None",
    bert_padding.pad_input: "hidden_states indices batch seqlen",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__[-11:]}.{f.__name__}")
def test_signature(function) -> None:
    parameters = inspect.signature(function).parameters.values()
    shown = [
        x.name if x.default is x.empty else f"{x.name}={x.default!r}".replace(" ", "")
        for x in parameters
    ]
    assert " ".join(shown) == SIGNATURES[function]
