"""The op `fdattn::attention`: the raw forward, and the differentiable composite over it.

    attention_forward(q, k, v, mask…, scores…)       -> (out, lse)
    attention(q, k, v, …)                            -> (out, lse), autograd and autocast
    dropout_seed(like)                               -> seed and offset, drawn

`derivative_op.py` has the raw ops of its derivatives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_fdattn.launch import prepared
from torch_fdattn.launch.prepared import PreparedCall
from torch_fdattn.launch.tile_counter import tile_counter
from torch_fdattn.ops import library
from torch_fdattn.ops.attention import dispatch, tuning
from torch_fdattn.ops.attention.autograd import attend
from torch_fdattn.ops.attention.cpu import attention_on_cpu
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.attention.inputs import check_inputs, copy_state, empty_state
from torch_fdattn.ops.determinism import seed_generator
from torch_fdattn.ops.launch import contiguous_mask
from torch_fdattn.ops.options import (
    COMPOSITE_SCHEMA,
    LAYOUT_SCHEMA,
    MASK_SCHEMA,
    SCORES_SCHEMA,
    AttentionOptions,
    default_scale,
    options_to_mask,
)
from torch_fdattn.ops.row_ranges import empty_ranges
from torch_fdattn.ops.scores import Scores

if TYPE_CHECKING:
    from torch_fdattn.launch.launches import Launch


def key_of(name: str, q: Tensor, *others) -> tuple | None:
    """The key of a call with these tensors and options; None: it is not to be remembered."""
    # What else decides a launch: tiles that are not the table's, and torch's setting of tf32.
    if not q.is_cuda or tuning.state.active or q.dtype == torch.float32:
        return None
    return (
        name,
        *prepared.metadata(q),
        *[prepared.metadata(x)[0] if isinstance(x, Tensor) else x for x in others],
    )


def _forward(q, k, v, *tail):
    key = key_of("attention_forward", q, k, v, *tail)
    return attend_eagerly(key, q, k, v, AttentionOptions.from_raw(tail))


def raw_forward(q: Tensor, k: Tensor, v: Tensor, *tail) -> tuple[Tensor, Tensor]:
    """The raw op, and the same without the dispatcher, which is half of its host time, where nobody would see it."""
    if library.can_bypass_dispatcher(q, k, v, *[x for x in tail if isinstance(x, Tensor)]):
        return _forward(q, k, v, *tail)
    return torch.ops.fdattn.attention_forward(q, k, v, *tail)


def attend_eagerly(key: tuple | None, q, k, v, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """The raw forward; key: of `key_of`, with all that decides the call."""
    call = prepared.checked(key)
    if call is None:
        check_inputs(q, k, v, options)
        kernel = dispatch.choose("forward", q, k, v, options)
        if kernel != "cpu":
            call = prepared.prepare(key, label=f"attention_forward/{kernel}")
    out, lse = empty_state(q, v, options.dtype)
    mask, scale, scores, dropout, _ = options
    if call is None:
        library.launches["attention_forward/cpu"] += 1
        copy_state(out, lse, attention_on_cpu(q, k, v, mask, scale, scores, None, dropout))
        return out, lse
    mask, scratch = contiguous_mask(mask), _scratch(call, q, k, scores.attn_mask)
    tensors = q, k, v, out, lse, *mask[:3], *scores[1:], dropout.seed, *scratch
    if call.by_driver(tensors):
        library.launches[call.label] += 1
    else:
        call.run(tensors, _launches(call, q, k, v, options._replace(mask=mask), out, lse, *scratch))
    return out, lse


def _scratch(
    call: PreparedCall, q: Tensor, k: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What the kernels need beside the call's tensors: ranges of a mask, a counter of tiles."""
    counter = tile_counter(q.device) if call.label.endswith("/hopper") else None
    return empty_ranges(attn_mask, q, k), counter


def _launches(
    call: PreparedCall, q, k, v, options: AttentionOptions, out, lse, ranges: Tensor | None,
    counter: Tensor | None,
) -> Iterable[Launch]:  # fmt: skip
    # Addresses are no part of a call's key: where they are not as the descriptors need them, this call alone is portable.
    if counter is not None:
        from torch_fdattn.ops.attention.hopper.launch import forward_launch, is_aligned

        if is_aligned(q, k, v):
            library.launches[call.label] += 1
            return (forward_launch(q, k, v, options, out, lse, counter),)
    from torch_fdattn.ops.attention.forward import forward_launches

    return forward_launches(q, k, v, options, out, lse, ranges=ranges)


def attend_prepared(
    call: PreparedCall | None, q, k, v, tensors: tuple
) -> tuple[Tensor, Tensor] | None:
    """`attend_eagerly` by the driver, where a call was prepared; None: nothing was done.

    tensors: those of mask and scores, the explicit mask the last.
    """
    # The kernels take copies of strided lengths, which are not these.
    if call is None or not all(x is None or x.is_contiguous() for x in tensors[:3]):
        return None
    state, scratch = empty_state(q, v), _scratch(call, q, k, tensors[-1])
    if not call.by_driver((q, k, v, *state, *tensors, None, *scratch)):
        return None
    library.launches[call.label] += 1
    return state


def _forward_fake(q, k, v, *tail):
    options = AttentionOptions.from_raw(tail)
    check_inputs(q, k, v, options)
    return empty_state(q, v, options.dtype)


library.define_raw(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {MASK_SCHEMA}, ScalarType? out_dtype, "
    f"{SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)


def _attention(
    q, k, v, kv_lens=None, q_start=None, kv_start=None, *, causal=False, window_left=-1,
    window_right=-1, kv_block=0, kv_stride=0, scale=None, softcap=0.0, alibi_slopes=None, sinks=None,
    attn_mask=None, dropout_p=0.0, dropout_seed=None,
):  # fmt: skip
    mask = options_to_mask(
        kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    )
    scores = Scores(softcap, alibi_slopes, sinks, attn_mask)
    dropout = seeded_dropout(q, dropout_p, dropout_seed)
    options = AttentionOptions(mask, default_scale(q, scale), scores, dropout)
    return attend(torch.ops.fdattn.attention_forward, q, k, v, options)


def _dropout_seed(like: Tensor) -> Tensor:
    generator = seed_generator(like.device)
    limits = -(2**63), 2**63 - 1
    return torch.randint(*limits, (2,), device=like.device, dtype=torch.int64, generator=generator)


def seeded_dropout(q: Tensor, p: float, seed: Tensor | None) -> Dropout:
    """A composite's dropout, with a seed that is drawn where it needs one and is given none."""
    if p and seed is None:
        # torch's own op knows vmap's randomness: one seed for all, one for each, or refused.
        seed = _dropout_seed(q) if library.in_vmap() else torch.ops.fdattn.dropout_seed(q.detach())
    return Dropout(p, seed)


# An op of its own: what it draws from is known only when it runs, not when a graph is traced.
library.define_raw(
    "dropout_seed(Tensor like) -> Tensor",
    _dropout_seed,
    lambda like: like.new_empty(2, dtype=torch.int64),
    seeded=True,
)


library.define_composite(
    f"attention(Tensor q, Tensor k, Tensor v, {COMPOSITE_SCHEMA.format(causal='bool causal=False')}, "
    f"{SCORES_SCHEMA}, {LAYOUT_SCHEMA}) -> (Tensor out, Tensor lse)",
    _attention,
    autocast_args=3,
    in_layout=("q", "k", "v"),
)
