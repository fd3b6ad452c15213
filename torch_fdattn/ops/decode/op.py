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

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.launch import prepared
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.autograd import attend
from torch_fdattn.ops.attention.configs import dot_precision
from torch_fdattn.ops.attention.op import (
    MASK_SCHEMA,
    OPTIONS_SCHEMA,
    copy_state,
    default_scale,
    empty_state,
    options_to_mask,
)
from torch_fdattn.ops.decode.inputs import QUANTISED, check_decode, expanded_scale
from torch_fdattn.ops.decode.reference import decode_reference, paged_decode_reference
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

_INPUTS = "Tensor q, Tensor k_cache, Tensor v_cache"
_PAGED_INPUTS = f"{_INPUTS}, Tensor page_table"
#: What decode takes besides the mask, in the order of `Extras`.
_EXTRAS = (
    "Tensor? k_scale=None, Tensor? v_scale=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, bool batch_invariant=False"
)
#: The same of a contiguous cache.
_ALL_EXTRAS = f"{_EXTRAS}, Tensor? attn_mask=None"
_OUT = "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace=None"
_MASKS = len(Mask._fields)


class Call:
    """A raw call's arguments by name, checked. (`attention.op.Call` is the tail of attention's.)"""

    def __init__(
        self, q, k, v, page_table, kv_lens, q_start, kv_start, window_left, window_right, kv_block,
        kv_stride, scale, k_scale, v_scale, softcap, alibi_slopes, sinks, batch_invariant, attn_mask=None,
        whole=None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.page_table = q, k, v, page_table
        bounds = kv_lens, q_start, kv_start
        self.mask = Mask(*bounds, window_left, window_right, kv_block, kv_stride).clamped
        self.scale, self.options = scale, Scores(softcap, alibi_slopes, sinks, attn_mask)
        self.batch_invariant, self.whole = batch_invariant, whole
        check_decode(q, k, v, page_table, self.mask, scale, self.options, whole)
        self.k_scale = expanded_scale("k_scale", k_scale, k, q)
        self.v_scale = expanded_scale("v_scale", v_scale, v, q)

    def run(
        self, out: Tensor, lse: Tensor, workspace: Tensor | None = None, leave_parts: bool = False
    ):
        """Writes the result; returns the launch's plan, where there was one, and what it left unmerged."""
        if library.use_triton(self.q):
            from torch_fdattn.ops.decode.launch import Cache, launch_decode

            cache = Cache(self.k, self.v, self.page_table, self.k_scale, self.v_scale)
            return launch_decode(
                self.q, cache, self.mask, self.scale, out, lse, self.options, self.batch_invariant,
                workspace, whole=self.whole, leave_parts=leave_parts,
            )  # fmt: skip
        rest = (self.mask, self.scale, self.k_scale, self.v_scale, self.options)
        library.launches["decode_forward/reference"] += 1
        if self.page_table is None:
            found = decode_reference(self.q, self.k, self.v, *rest)
        else:
            found = paged_decode_reference(self.q, self.k, self.v, self.page_table, *rest)
        copy_state(out, lse, found)
        return None, None


def decode_eagerly(
    q, k, v, page_table, kv_lens, q_start, kv_start, window_left, window_right, kv_block, kv_stride,
    scale, out_dtype, k_scale, v_scale, softcap, alibi_slopes, sinks, batch_invariant, attn_mask=None,
    given=None, whole=None, leave_parts=False,
):  # fmt: skip
    """The raw ops' kernel: (out, lse) of a call whose metadata is known, or checked first; scale may be None.

    given: (out, lse, workspace or None) of the caller, instead of new ones; whole: `WholeLengths` where the
    cache is a shard and the kernels run; leave_parts: returns (out, lse, what `Plan.launch` left unmerged).
    """
    others = (q_start, kv_start, page_table, k_scale, v_scale, alibi_slopes, attn_mask, sinks)
    plain = (
        q_start is None and kv_start is None and page_table is None and k_scale is None
        and v_scale is None and alibi_slopes is None and attn_mask is None and sinks is None
    )  # fmt: skip
    try:
        key = (
            "decode", q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape,
            v.stride(), v.dtype, v.device, window_left, window_right, kv_block, kv_stride, scale, out_dtype,
            softcap, batch_invariant, _metadata(kv_lens), None if plain else tuple(map(_metadata, others)),
            # torch's own tf32 setting decides how float32 is multiplied.
            dot_precision(q.dtype) if q.dtype == torch.float32 else None,
            None if given is None else tuple(map(_metadata, given)), whole,
        )  # fmt: skip
        plan = prepared.checked(key)
    except AttributeError:  # something that is no tensor: the checks say what
        plan = key = None
    if plan is None:
        numbers = (
            checks.plain_int("window", window_left), checks.plain_int("window", window_right),
            checks.plain_int("kv_block", kv_block), checks.plain_int("kv_stride", kv_stride),
            checks.plain_float("scale", default_scale(q, scale)),
        )  # fmt: skip
        call = Call(
            q, k, v, page_table, kv_lens, q_start, kv_start, *numbers, k_scale, v_scale,
            checks.plain_float("softcap", softcap), alibi_slopes, sinks, bool(batch_invariant), attn_mask, whole,
        )  # fmt: skip
        if given is None:
            out, lse = empty_state(q, v, out_dtype)
            plan, unmerged = call.run(out, lse, None, leave_parts)
        else:
            out, lse, workspace = given
            _check_out(call, out, lse, workspace)
            if workspace is not None:
                _check_workspace_size(call, workspace)
            plan, unmerged = call.run(out, lse, workspace, leave_parts)
        if plan is not None and key is not None:
            plan.out = None
            if (out.shape, out.stride(), out.dtype) != (q.shape, q.stride(), q.dtype):
                plan.out = out.shape, out.stride(), out.dtype
            plan.lse_shape = tuple(lse.shape)
            prepared.remember(key, plan)  # last: from here on other threads use it
        return (out, lse, unmerged) if leave_parts else (out, lse)
    if given is not None:
        out, lse, workspace = given
    else:
        if plan.out is None:
            out = torch.empty_like(q)
        else:
            shape, strides, dtype = plan.out
            out = torch.empty_strided(shape, strides, dtype=dtype, device=q.device)
        lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
        workspace = None
    unmerged = plan.launch(
        q, k, v, out, lse, kv_lens, q_start, kv_start, page_table, k_scale, v_scale, alibi_slopes, attn_mask, sinks,
        workspace, leave_parts,
    )  # fmt: skip
    return (out, lse, unmerged) if leave_parts else (out, lse)


class DirectDecode:
    """A decode's launches, for tensors of the metadata that it was made with; nothing is checked again."""

    @staticmethod
    def of(call: Call) -> DirectDecode | None:
        """None: the reference runs, or nothing, or more launches than one call of the kernels."""
        if not library.use_triton(call.q) or not call.q.numel():
            return None
        from torch_fdattn.ops.decode.launch import Cache, launches_once

        cache = Cache(call.k, call.v, call.page_table, call.k_scale, call.v_scale)
        return DirectDecode(call, cache) if launches_once(call.q, cache) else None

    def __init__(self, call: Call, cache) -> None:
        from torch_fdattn.ops.decode.launch import Plan

        q, mask, options = call.q, call.mask, call.options
        out, lse = empty_state(q, call.v)
        self._plan = Plan(q, cache, mask, call.scale, out, options, call.batch_invariant)
        self._out = out.shape, out.stride(), out.dtype, out.device
        self._lse = lse.shape, lse.stride(), lse.dtype, lse.device
        self._precision = dot_precision(q.dtype) if q.dtype == torch.float32 else None
        self._starts = mask.q_start, mask.kv_start
        self._scales = call.k_scale, call.v_scale
        self._scores = options.alibi_slopes, options.attn_mask, options.sinks

    def is_current(self) -> bool:
        """Whether torch's setting of tf32 is the one that it was made under."""
        return self._precision is None or dot_precision(torch.float32) == self._precision

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor | None, page_table: Tensor | None,
        out: tuple[Tensor, Tensor] | None, workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if workspace is not None:
            self._check_workspace(workspace)
        if out is None:
            shape, strides, dtype, device = self._out
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            lse = torch.empty(self._lse[0], dtype=torch.float32, device=device)
        else:
            out, lse = out
            for name, tensor, expected in (("out", out, self._out), ("lse", lse, self._lse)):
                if _metadata(tensor) != expected:
                    raise ValueError(
                        f"{name} must be as planned, {expected[2]} of shape {tuple(expected[0])} and strides "
                        f"{expected[1]}, got {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                    )
            torch.autograd.graph.increment_version([out, lse])
        self._plan.launch(
            q,
            k,
            v,
            out,
            lse,
            kv_lens,
            *self._starts,
            page_table,
            *self._scales,
            *self._scores,
            workspace,
        )
        return out, lse

    def _check_workspace(self, workspace: Tensor) -> None:
        checks.expect_device("workspace", workspace, self._out[3], "q")
        if workspace.dtype != torch.int32 or workspace.dim() != 1 or not workspace.is_contiguous():
            _refuse_workspace(workspace)
        if workspace.numel() < self._plan.floats:
            raise ValueError(
                f"workspace must have at least {self._plan.floats} elements, got {workspace.numel()}"
            )


def _metadata(tensor: Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_NO_EXTRAS = (None, None, 0.0, None, None, False, None)


def _arguments(paged: bool, rest: tuple, has_dtype: bool) -> tuple:
    """(page_table, mask and scale, out_dtype, extras) of a raw op's positional arguments."""
    page_table, rest = (rest[0], rest[1:]) if paged else (None, rest)
    mask_and_scale, rest = rest[: _MASKS + 1], rest[_MASKS + 1 :]
    out_dtype = None
    if has_dtype:
        out_dtype, rest = (rest[0] if rest else None), rest[1:]
    return page_table, mask_and_scale, out_dtype, (*rest, *_NO_EXTRAS[len(rest) :])


def _raw(paged: bool):
    """The kernel and the fake of a raw op that returns (out, lse)."""

    def forward(q, k, v, *rest):
        page_table, mask_and_scale, out_dtype, extras = _arguments(paged, rest, True)
        return decode_eagerly(q, k, v, page_table, *mask_and_scale, out_dtype, *extras)

    def fake(q, k, v, *rest):
        page_table, mask_and_scale, out_dtype, extras = _arguments(paged, rest, True)
        Call(q, k, v, page_table, *mask_and_scale, *extras)
        return empty_state(q, v, out_dtype)

    return forward, fake


def _raw_out(paged: bool):
    """The kernel and the fake of a raw op that writes into given tensors."""

    def forward(q, k, v, *rest, out, lse, workspace=None):
        page_table, mask_and_scale, _, extras = _arguments(paged, rest, False)
        given = out, lse, workspace
        decode_eagerly(q, k, v, page_table, *mask_and_scale, None, *extras, given)

    def fake(q, k, v, *rest, out, lse, workspace=None):
        page_table, mask_and_scale, _, extras = _arguments(paged, rest, False)
        # How large a workspace must be is not asked of symbolic shapes, but when the call runs.
        _check_out(Call(q, k, v, page_table, *mask_and_scale, *extras), out, lse, workspace)

    return forward, fake


def _check_out(call: Call, out: Tensor, lse: Tensor, workspace: Tensor | None) -> None:
    q, lse_dtype = call.q, torch.float64 if call.q.dtype == torch.float64 else torch.float32
    checks.expect_shape("out", out, (*q.shape[:3], call.v.shape[3]), "q and v_cache")
    checks.expect_float("out", out)
    checks.expect_writable("out", out)
    checks.expect_shape("lse", lse, q.shape[:3], "q")
    checks.expect_dtype("lse", lse, lse_dtype, "every lse of such inputs")
    for name, tensor in (("out", out), ("lse", lse), ("workspace", workspace)):
        if tensor is not None:
            checks.expect_device(name, tensor, q.device, "q")
    if not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {lse.stride()}")
    if workspace is None:
        return
    if workspace.dtype != torch.int32 or workspace.dim() != 1 or not workspace.is_contiguous():
        _refuse_workspace(workspace)


def _refuse_workspace(workspace: Tensor) -> None:
    raise TypeError(
        "workspace must be a contiguous int32 tensor of one dimension, as decode_workspace makes it, "
        f"got {workspace.dtype} of shape {tuple(workspace.shape)}"
    )


def _check_workspace_size(call: Call, workspace: Tensor) -> None:
    needed = workspace_size(call.q, call.k, call.v, call.page_table, call.batch_invariant)
    if workspace.numel() < needed:
        raise ValueError(f"workspace must have at least {needed} elements, got {workspace.numel()}")


def check_inputs_alone(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, batch_invariant: bool
) -> None:
    """What a call asks of these, whatever else it will be given."""
    no_mask = (None, None, None, -1, -1, 0, 0)
    Call(q, k, v, page_table, *no_mask, 1.0, None, None, 0.0, None, None, batch_invariant)


def workspace_size(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, batch_invariant: bool
) -> int:
    """Elements of a workspace for such a call; none where the reference runs."""
    if not library.use_triton(q) or not q.numel():
        return 0
    from torch_fdattn.ops.decode.launch import Cache, workspace_elements

    return workspace_elements(q, Cache(k, v, page_table), batch_invariant)


for _name, _inputs, _extras in (
    ("decode", _INPUTS, _ALL_EXTRAS),
    ("paged_decode", _PAGED_INPUTS, _EXTRAS),
):
    _paged = _name == "paged_decode"
    library.define_raw(
        f"{_name}_forward({_inputs}, {MASK_SCHEMA}, ScalarType? out_dtype=None, {_extras}) -> (Tensor, Tensor)",
        *_raw(_paged),
    )
    library.define_raw(
        f"{_name}_out({_inputs}, {MASK_SCHEMA}, {_extras}, *, {_OUT}) -> ()",
        *_raw_out(_paged),
    )


def decode(
    q, k_cache, v_cache, kv_lens=None, q_start=None, kv_start=None, *, causal=True, window_left=-1,
    window_right=-1, kv_block=0, kv_stride=0, scale=None, k_scale=None, v_scale=None, softcap=0.0,
    alibi_slopes=None, sinks=None, batch_invariant=False, attn_mask=None,
):  # fmt: skip
    """The composite op."""
    if causal:
        window_right = 0
    extras = (k_scale, v_scale, softcap, alibi_slopes, sinks, batch_invariant, attn_mask)
    others = (kv_lens, q_start, kv_start, *extras)
    if library.runs_directly(q, k_cache, v_cache) and _is_plain(others):
        return decode_eagerly(
            q, k_cache, v_cache, None, kv_lens, q_start, kv_start, window_left, window_right, kv_block,
            kv_stride, scale, None, *extras,
        )  # fmt: skip
    mask = options_to_mask(
        kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    )
    scale = default_scale(q, scale)
    tensors = q, k_cache, v_cache, *extras
    differentiated = torch.is_grad_enabled() and any(library.requires_grad(x) for x in tensors)
    raw, arguments = torch.ops.fdattn.decode_forward, (q, k_cache, v_cache, *mask, scale, None)
    if without := _has_no_derivatives(k_cache, k_scale, v_scale):
        library.meet(q)
        return library.run_without_derivatives(
            "decode", f"with {without}", raw, *arguments, *extras
        )
    if differentiated or library.in_forward_mode(*tensors):
        scores = Scores(softcap, alibi_slopes, sinks, attn_mask)
        forward = functools.partial(_forward_of_scores, batch_invariant)
        return attend(forward, q, k_cache, v_cache, mask, scale, scores)
    library.meet(q)
    return raw(*arguments, *extras)


def _forward_of_scores(batch_invariant: bool, q, k, v, *rest):
    """decode_forward of an unquantised cache by the arguments of attention_forward."""
    options, scores = rest[: _MASKS + 2], rest[_MASKS + 2 :]
    return torch.ops.fdattn.decode_forward(
        q, k, v, *options, None, None, *scores[:3], batch_invariant, scores[3]
    )


def paged_decode(
    q, k_cache, v_cache, page_table, kv_lens=None, q_start=None, kv_start=None, *, causal=True,
    window_left=-1, window_right=-1, kv_block=0, kv_stride=0, scale=None, k_scale=None, v_scale=None,
    softcap=0.0, alibi_slopes=None, sinks=None, batch_invariant=False,
):  # fmt: skip
    """The composite op."""
    if causal:
        window_right = 0
    extras = (k_scale, v_scale, softcap, alibi_slopes, sinks, batch_invariant)
    others = (kv_lens, q_start, kv_start, *extras)
    if library.runs_directly(q, k_cache, v_cache, page_table) and _is_plain(others):
        return decode_eagerly(
            q, k_cache, v_cache, page_table, kv_lens, q_start, kv_start, window_left, window_right, kv_block,
            kv_stride, scale, None, *extras,
        )  # fmt: skip
    mask = options_to_mask(
        kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    )
    library.meet(q)
    return library.run_without_derivatives(
        "paged_decode", "over pages", torch.ops.fdattn.paged_decode_forward,
        q, k_cache, v_cache, page_table, *mask, default_scale(q, scale), None, *extras,
    )  # fmt: skip


def _is_plain(others: tuple) -> bool:
    """Whether these arguments besides q and the cache want no gradient and lie in memory as they are."""
    wanted = torch.is_grad_enabled() and any(library.requires_grad(x) for x in others)
    return not wanted and library.lie_in_memory(*others)


def _has_no_derivatives(k: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> str:
    """What a cache has whose decode is not differentiable; nothing of others."""
    named = dict(k_scale=k_scale, v_scale=v_scale)
    found = [name for name, tensor in named.items() if tensor is not None]
    return ", ".join(found + ["a quantised cache"] * (k.dtype in QUANTISED))


for _name, _inputs, _extras, _function in (
    ("decode", _INPUTS, _ALL_EXTRAS, decode),
    ("paged_decode", _PAGED_INPUTS, _EXTRAS, paged_decode),
):
    library.define_composite(
        f"{_name}({_inputs}, {OPTIONS_SCHEMA.format(causal='bool causal=True')}, {_extras}) "
        "-> (Tensor out, Tensor lse)",
        _function,
        autocast_args=3,
    )
