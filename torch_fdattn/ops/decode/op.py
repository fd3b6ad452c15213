"""The ops `fdattn::decode` and `fdattn::paged_decode`: a few query tokens against a preallocated cache.

    decode_forward(q, k_cache, v_cache, mask…, …)                    -> (out, lse)
    paged_decode_forward(q, k_cache, v_cache, page_table, mask…, …)  -> (out, lse)
    decode_out, paged_decode_out(…, out, lse, workspace)             -> ()   into given tensors
    decode(q, k_cache, v_cache, kv_lens, …)                          -> (out, lse), autograd and autocast
    paged_decode(q, k_cache, v_cache, page_table, kv_lens, …)        -> (out, lse), autocast

decode's derivatives are attention's, from the saved lse.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_fdattn.launch import prepared
from torch_fdattn.launch.prepared import PreparedCall
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.autograd import attend
from torch_fdattn.ops.attention.configs import dot_precision
from torch_fdattn.ops.attention.inputs import empty_state
from torch_fdattn.ops.decode.cpu import DecodeOnCpu
from torch_fdattn.ops.decode.inputs import (
    QUANTISED,
    DecodeCall,
    GlobalLengths,
    check_out,
    check_workspace,
    checked_call,
    plain_numbers,
)
from torch_fdattn.ops.options import (
    COMPOSITE_SCHEMA,
    DECODE_SCHEMA,
    LAYOUT_SCHEMA,
    MASK_SCHEMA,
    PAGED_DECODE_SCHEMA,
    AttentionOptions,
    DecodeOptions,
    default_scale,
    options_to_mask,
)
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

if TYPE_CHECKING:
    from torch_fdattn.ops.decode.launch import DecodeLaunchPlan

_INPUTS = "Tensor q, Tensor k_cache, Tensor v_cache"
_PAGED_INPUTS = f"{_INPUTS}, Tensor page_table"
Written = tuple[Tensor, Tensor, Tensor | None]  # (out, lse, workspace)
_OUT = "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace=None"


class PreparedDecode:
    """A decode that has passed its checks: its launches, for tensors of the metadata that it was made of."""

    @classmethod
    def of(cls, call: DecodeCall, out: Tensor, lse: Tensor) -> PreparedDecode | None:
        """None: nothing runs, or more launches than one call of the kernels."""
        if not out.numel():
            return None
        from torch_fdattn.ops.decode.launch import (
            DecodeLaunchPlan,
            fits_one_launch,
            odd_addresses,
        )

        if not fits_one_launch(call.q, call.cache):
            return None
        odd = odd_addresses(call.cache.k, call.cache.v)
        return cls(DecodeLaunchPlan(call, out, odd_addresses=odd), call.q, out, lse)

    def __init__(self, plan: DecodeLaunchPlan, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.plan = plan
        #: (shape, strides, dtype) of out, where these are not q's.
        self.out = out.shape, out.stride(), out.dtype
        if self.out == (q.shape, q.stride(), q.dtype):
            self.out = None
        self.lse_shape = tuple(lse.shape)
        self.floats, self._strided_lengths = plan.floats, plan.strided_lengths
        #: Whether caches of other addresses than the first ones must be even.
        self.reads_pairs = plan.reads_pairs
        self._calls = PreparedCall(), PreparedCall()  # without the merge, and with it

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, others: tuple[Tensor | None, ...], written: Written | None = None,
        leave_parts: bool = False,
    ):  # fmt: skip
        """(out, lse), and with leave_parts what is left to be merged.

        others: `DecodeCall.tensors`; written: as in `decode_eagerly`; leave_parts: does not merge where all work tiles are cut
        alike.
        """
        library.launches["decode_forward/triton"] += 1
        if written is not None:
            out, lse, workspace = written
        else:
            if self.out is None:
                out = torch.empty_like(q)
            else:
                shape, strides, dtype = self.out
                out = torch.empty_strided(shape, strides, dtype=dtype, device=q.device)
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=q.device)
            workspace = None
        parts = None
        if self.floats:
            parts = workspace
            if parts is None:
                parts = torch.empty(self.floats, dtype=torch.float32, device=q.device)
        if self._strided_lengths:
            lengths = (x if x is None else x.contiguous() for x in others[:3])
            others = *lengths, *others[3:]
        merge = not leave_parts or self.plan.even_cut is None
        call, tensors = self._calls[merge], (q, k, v, out, lse, parts, *others)
        if not call.by_driver(tensors):
            call.run(tensors, self.plan.launches(*tensors, merge=merge))
        if leave_parts:
            return out, lse, None if merge else self.plan.unmerged(parts, others[:3])
        return out, lse


def decode_eagerly(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, options: DecodeOptions,
    written: Written | None = None, global_lens: GlobalLengths | None = None, leave_parts: bool = False,
):  # fmt: skip
    """The raw ops' kernel: (out, lse) of a call whose key has passed its checks, or that passes them now.

    written: (out, lse, workspace or None) of the caller's, instead of new ones; global_lens: where the cache is a shard
    and the kernels run; leave_parts: returns (out, lse, what is left to be merged).
    """
    mask, scale, scores, k_scale, v_scale, batch_invariant, dtype = options
    kv_lens, q_start, kv_start = mask[:3]
    softcap, alibi_slopes, sinks, attn_mask = scores
    plain = (
        q_start is None and kv_start is None and page_table is None and k_scale is None
        and v_scale is None and alibi_slopes is None and attn_mask is None and sinks is None
    )  # fmt: skip
    others = (
        kv_lens, q_start, kv_start, page_table, k_scale, v_scale, alibi_slopes, attn_mask, sinks
    )  # fmt: skip
    try:
        key = (
            "decode", q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape,
            v.stride(), v.dtype, v.device, mask[3:], scale, dtype, softcap, batch_invariant,
            None if kv_lens is None else (kv_lens.shape, kv_lens.stride(), kv_lens.dtype, kv_lens.device),
            None if plain else tuple(map(_metadata, others[1:])),
            # torch's own tf32 setting decides how float32 is multiplied.
            dot_precision(q.dtype) if q.dtype == torch.float32 else None,
            None if written is None else tuple(map(_metadata, written)), global_lens,
            # `odd_addresses`, written out: a repeated call runs through no more files than these.
            k.dtype.itemsize == 1 and (k.data_ptr() | v.data_ptr()) & 1,
        )  # fmt: skip
        known = prepared.checked(key)
    except (AttributeError, RuntimeError):  # no tensor, or a nested one: the checks say which
        known = key = None
    if known is None:
        call = checked_call(q, k, v, page_table, plain_numbers(q, options), global_lens)
        return _first_call(key, call, written, leave_parts)
    return known.run(q, k, v, others, written, leave_parts)


def _first_call(key: tuple | None, call: DecodeCall, written: Written | None, leave_parts: bool):
    q, cache, options, _ = call
    if written is None:
        (out, lse), workspace = empty_state(q, cache.v, options.dtype), None
    else:
        out, lse, workspace = written
        check_out(call, out, lse, workspace)
        if workspace is not None:
            needed = workspace_size(q, cache.k, cache.v, cache.page_table, options.batch_invariant)
            check_workspace(workspace, needed, q.device)
    made = prepare(call, out, lse)
    if made is None:
        from torch_fdattn.ops.decode.launch import launch_decode

        launch_decode(call, out, lse, workspace)
        return (out, lse, None) if leave_parts else (out, lse)
    results = made.run(q, cache.k, cache.v, call.tensors, (out, lse, workspace), leave_parts)
    if key is not None:
        prepared.remember(key, made)
    return results


def prepare(call: DecodeCall, out: Tensor, lse: Tensor) -> PreparedDecode | DecodeOnCpu | None:
    """What runs a checked call and all that have its metadata; None: more or fewer launches than one of the kernels."""
    if library.use_triton(call.q):
        return PreparedDecode.of(call, out, lse)
    return DecodeOnCpu(call)


def _metadata(tensor: Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def workspace_size(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, batch_invariant: bool
) -> int:
    """Elements of a workspace for such a call; none on a CPU."""
    if not library.use_triton(q) or not q.numel():
        return 0
    from torch_fdattn.ops.decode.inputs import Cache
    from torch_fdattn.ops.decode.launch import workspace_elements

    return workspace_elements(q, Cache(k, v, page_table), batch_invariant)


def _split(paged: bool, tail: tuple) -> tuple[Tensor | None, tuple]:
    """(page table, the rest) of a raw op's arguments behind the cache."""
    return (tail[0], tail[1:]) if paged else (None, tail)


def _raw(paged: bool):
    """The kernel and the fake of a raw op that returns (out, lse)."""

    def forward(q, k, v, *tail):
        page_table, tail = _split(paged, tail)
        return decode_eagerly(q, k, v, page_table, DecodeOptions.from_raw(tail))

    def fake(q, k, v, *tail):
        page_table, tail = _split(paged, tail)
        options = DecodeOptions.from_raw(tail)
        checked_call(q, k, v, page_table, options)
        return empty_state(q, v, options.dtype)

    return forward, fake


def _raw_out(paged: bool):
    """The kernel and the fake of a raw op that writes into given tensors."""

    def forward(q, k, v, *tail, out, lse, workspace=None):
        page_table, tail = _split(paged, tail)
        options = DecodeOptions.from_raw(tail, has_dtype=False)
        decode_eagerly(q, k, v, page_table, options, (out, lse, workspace))

    def fake(q, k, v, *tail, out, lse, workspace=None):
        page_table, tail = _split(paged, tail)
        call = checked_call(q, k, v, page_table, DecodeOptions.from_raw(tail, has_dtype=False))
        # How large a workspace must be is not asked of symbolic shapes, but when the call runs.
        check_out(call, out, lse, workspace)

    return forward, fake


for _name, _inputs, _options in (
    ("decode", _INPUTS, DECODE_SCHEMA),
    ("paged_decode", _PAGED_INPUTS, PAGED_DECODE_SCHEMA),
):
    _paged = _name == "paged_decode"
    library.define_raw(
        f"{_name}_forward({_inputs}, {MASK_SCHEMA}, ScalarType? out_dtype=None, {_options}) -> (Tensor, Tensor)",
        *_raw(_paged),
    )
    library.define_raw(
        f"{_name}_out({_inputs}, {MASK_SCHEMA}, {_options}, *, {_OUT}) -> ()",
        *_raw_out(_paged),
    )


def _call_options(
    tensors: tuple, given: tuple, scale: float | None, scores: Scores, quantised: tuple, batch_invariant: bool
) -> tuple[bool, DecodeOptions]:  # fmt: skip
    """(whether the raw ops' kernel is called without the dispatcher, its options or a raw op's) of a composite's arguments:
    q, the cache and a page table; what `options_to_mask` takes; (k_scale, v_scale)."""
    if library.can_call_kernel(*tensors, *given[:3], *quantised, *scores[1:]):
        *positions, causal, left, right, kv_block, kv_stride = given
        mask = Mask(*positions, left, 0 if causal else right, kv_block, kv_stride)
        return True, DecodeOptions(mask, scale, scores, *quantised, batch_invariant)
    mask, scale = options_to_mask(*given), default_scale(tensors[0], scale)
    return False, DecodeOptions(mask, scale, scores, *quantised, batch_invariant)


def decode(
    q, k_cache, v_cache, kv_lens=None, q_start=None, kv_start=None, *, causal=True, window_left=-1,
    window_right=-1, kv_block=0, kv_stride=0, scale=None, k_scale=None, v_scale=None, softcap=0.0,
    alibi_slopes=None, sinks=None, batch_invariant=False, attn_mask=None,
):  # fmt: skip
    """The composite op."""
    given = kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    scores, quantised = Scores(softcap, alibi_slopes, sinks, attn_mask), (k_scale, v_scale)
    eager, options = _call_options((q, k_cache, v_cache), given, scale, scores, quantised, batch_invariant)  # fmt: skip
    if eager:
        return decode_eagerly(q, k_cache, v_cache, None, options)
    tensors = q, k_cache, v_cache, k_scale, v_scale, *scores[1:]
    raw = torch.ops.fdattn.decode_forward
    if without := _has_no_derivatives(k_cache, k_scale, v_scale):
        library.load_rules_for(q)
        return library.run_without_derivatives(
            "decode", f"with {without}", raw, q, k_cache, v_cache, *options.to_raw()
        )
    differentiated = torch.is_grad_enabled() and any(map(library.requires_grad, tensors))
    if differentiated or library.in_forward_mode(*tensors):
        forward = functools.partial(_forward_of_attention, batch_invariant)
        of_attention = AttentionOptions(options.mask, options.scale, scores)
        return attend(forward, q, k_cache, v_cache, of_attention)
    library.load_rules_for(q)
    return raw(q, k_cache, v_cache, *options.to_raw())


def _forward_of_attention(batch_invariant: bool, q, k, v, *tail):
    """decode_forward of an unquantised cache by the arguments of attention_forward."""
    mask, scale, scores, _, dtype = AttentionOptions.from_raw(tail)
    options = DecodeOptions(mask, scale, scores, None, None, batch_invariant, dtype)
    return torch.ops.fdattn.decode_forward(q, k, v, *options.to_raw())


def paged_decode(
    q, k_cache, v_cache, page_table, kv_lens=None, q_start=None, kv_start=None, *, causal=True,
    window_left=-1, window_right=-1, kv_block=0, kv_stride=0, scale=None, k_scale=None, v_scale=None,
    softcap=0.0, alibi_slopes=None, sinks=None, batch_invariant=False,
):  # fmt: skip
    """The composite op."""
    given = kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    scores, quantised = Scores(softcap, alibi_slopes, sinks), (k_scale, v_scale)
    eager, options = _call_options(
        (q, k_cache, v_cache, page_table), given, scale, scores, quantised, batch_invariant
    )
    if eager:
        return decode_eagerly(q, k_cache, v_cache, page_table, options)
    library.load_rules_for(q)
    return library.run_without_derivatives(
        "paged_decode", "over pages", torch.ops.fdattn.paged_decode_forward,
        q, k_cache, v_cache, page_table, *options.to_raw(paged=True),
    )  # fmt: skip


def _has_no_derivatives(k: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> str:
    """What a cache has whose decode is not differentiable; nothing of others."""
    named = dict(k_scale=k_scale, v_scale=v_scale)
    found = [name for name, tensor in named.items() if tensor is not None]
    return ", ".join(found + ["a quantised cache"] * (k.dtype in QUANTISED))


for _name, _inputs, _options, _function in (
    ("decode", _INPUTS, DECODE_SCHEMA, decode),
    ("paged_decode", _PAGED_INPUTS, PAGED_DECODE_SCHEMA, paged_decode),
):
    library.define_composite(
        f"{_name}({_inputs}, {COMPOSITE_SCHEMA.format(causal='bool causal=True')}, {_options}, {LAYOUT_SCHEMA}) "
        "-> (Tensor out, Tensor lse)",
        _function,
        autocast_args=3,
        in_layout=("q", "k_cache", "v_cache"),
    )
