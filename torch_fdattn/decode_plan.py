"""Decode calls that a caller prepares once and holds, for loops that call nothing but them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_fdattn import checks, functional
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.op import default_scale
from torch_fdattn.ops.decode import op as decode_op


class DecodePlan:
    """A `decode` or `paged_decode` whose checks and choices are made; `plan_decode` and `plan_paged_decode` return it.

    Called with tensors like those that it was planned with: of the same shapes, strides, dtypes and devices. Any thread
    and any stream may call it, and a stream may be capturing. Under torch.compile a call is traced as the op; it is
    made as the op, too, where a gradient, a mode, a transform or a tensor's subclass asks for the dispatcher. Autocast
    changes nothing of it, and a profiler sees its kernels, but no op.
    """

    def __init__(self, inputs: dict[str, Tensor | None], options: dict[str, Any]) -> None:
        """inputs: of each call, by name; options: of all calls, tensors too."""
        self._paged = "page_table" in inputs
        self._options = options
        call = _checked_call(inputs, options)
        self._expected = {name: _metadata(x) for name, x in inputs.items()}
        self._held = [x for x in options.values() if isinstance(x, Tensor)]
        plain = library.runs_directly(inputs["q"], *self._held)
        self._direct = decode_op.DirectDecode.of(call) if plain else None

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lens: Tensor | None = None, *,
        page_table: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """
        Args:
            q, k_cache, v_cache, kv_lens, page_table: as planned, with any values.
            out: (out, lse) to write into, of the shapes, strides and dtypes of what a call without it returns.
            workspace: `decode_workspace`'s.

        Returns:
            (out, lse), as `decode` does.

        Raises:
            ValueError: a tensor is not as planned; the name, what was planned and what came.
        """
        if torch.compiler.is_compiling():
            return self._by_op(q, k_cache, v_cache, kv_lens, page_table, out, workspace)
        expected = self._expected
        if _metadata(q) != expected["q"]:
            self._refuse("q", q)
        if _metadata(k_cache) != expected["k_cache"]:
            self._refuse("k_cache", k_cache)
        if _metadata(v_cache) != expected["v_cache"]:
            self._refuse("v_cache", v_cache)
        if _metadata(kv_lens) != expected["kv_lens"]:
            self._refuse("kv_lens", kv_lens)
        if _metadata(page_table) != expected.get("page_table"):
            self._refuse("page_table", page_table)
        direct, written = self._direct, () if out is None else out
        if (
            direct is None
            or checks.CHECK_VALUES
            or (out is not None and (type(out) is not tuple or len(out) != 2))
            or not _is_direct(q, k_cache, v_cache, *written, *self._held)
            or not direct.is_current()
        ):
            return self._by_op(q, k_cache, v_cache, kv_lens, page_table, out, workspace)
        return direct(q, k_cache, v_cache, kv_lens, page_table, out, workspace)

    def _by_op(self, q, k_cache, v_cache, kv_lens, page_table, out, workspace):
        given = dict(out=out, workspace=workspace, **self._options)
        if self._paged:
            return functional.paged_decode(q, k_cache, v_cache, page_table, kv_lens, **given)
        return functional.decode(q, k_cache, v_cache, kv_lens, **given)

    def _refuse(self, name: str, tensor: object) -> None:
        planned = _described(self._expected.get(name))
        raise ValueError(
            f"{name} must be as planned, {planned}, got {_described(_metadata(tensor))}: "
            "plan such calls by themselves"
        )


def _is_direct(*tensors: Tensor) -> bool:
    """Whether nobody but the kernels has to see these."""
    if library.is_watched():
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        if (type(x) is not Tensor and type(x) is not Parameter) or (grad and x.requires_grad) or x.is_neg():  # fmt: skip
            return False
    return True


def _checked_call(inputs: dict[str, Any], options: dict[str, Any]) -> decode_op.Call:
    """Raises as `decode` does."""
    q, k, v, kv_lens = (inputs[name] for name in ("q", "k_cache", "v_cache", "kv_lens"))
    given = {"page_table": None, "attn_mask": None} | inputs | options
    names = "k_scale", "v_scale", "alibi_slopes", "sinks", "attn_mask"
    softcap, scale = given["softcap"], given["scale"]
    bounds = kv_lens, given["q_start"], given["kv_start"]
    needed = [(name, x) for name, x in inputs.items() if name != "kv_lens"]
    functional.expect_types(needed, bounds, scale, softcap, **{name: given[name] for name in names})
    checks.expect_int64(kv_block=given["kv_block"], kv_stride=given["kv_stride"])
    checks.expect_bool(causal=given["causal"])
    left, right = functional.window_bounds(given["window"])
    positions = left, 0 if given["causal"] else right, given["kv_block"], given["kv_stride"]
    return decode_op.Call(
        q, k, v, given["page_table"], *bounds, *positions, default_scale(q, scale), given["k_scale"], given["v_scale"],
        float(softcap), given["alibi_slopes"], given["sinks"], bool(given["batch_invariant"]), given["attn_mask"],
    )  # fmt: skip


def _metadata(x: object) -> tuple | None:
    if x is None:
        return None
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x),)


def _described(metadata: tuple | None) -> str:
    if metadata is None:
        return "None"
    if len(metadata) == 1:
        return metadata[0].__name__
    shape, strides, dtype, device = metadata
    return f"{dtype} of shape {tuple(shape)} and strides {strides} on {device}"


def plan_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None, kv_block: int = 0, kv_stride: int = 0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, softcap: float = 0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, batch_invariant: bool = False,
    attn_mask: Tensor | None = None,
) -> DecodePlan:  # fmt: skip
    """A `decode` to be called again and again: checked now, and each call no more than its launches.

    Args:
        q, k_cache, v_cache, kv_lens: like those of the calls; their values are not read.
        The others: `decode`'s, of all calls. Tensors among them are held, and their values are read at each call.

    Returns:
        a `DecodePlan`: ``plan(q, k_cache, v_cache, kv_lens, out=…, workspace=…)``.

    Raises:
        ValueError, TypeError: as `decode`.

    Examples:
        >>> import torch, torch_fdattn
        >>> q, cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 256, 64)
        >>> lens = torch.tensor([100, 256], dtype=torch.int32)
        >>> plan = torch_fdattn.plan_decode(q, cache, cache, lens)
        >>> out, lse = plan(q, cache, cache, lens)
        >>> out.shape
        torch.Size([2, 8, 1, 64])

    Source: plan and run of FlashInfer, arXiv:2501.01005.
    """
    inputs = dict(q=q, k_cache=k_cache, v_cache=v_cache, kv_lens=kv_lens)
    options = dict(
        causal=causal, window=window, scale=checks.number("scale", scale), q_start=q_start, kv_start=kv_start,
        kv_block=kv_block, kv_stride=kv_stride, k_scale=k_scale, v_scale=v_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, batch_invariant=batch_invariant, attn_mask=attn_mask,
    )  # fmt: skip
    return DecodePlan(inputs, options)


def plan_paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None, kv_block: int = 0, kv_stride: int = 0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, softcap: float = 0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, batch_invariant: bool = False,
) -> DecodePlan:  # fmt: skip
    """`plan_decode` over pages: ``plan(q, k_cache, v_cache, kv_lens, page_table=…, out=…, workspace=…)``.

    Arguments and errors are `paged_decode`'s; q, the caches, the table and the lengths are like those of the calls.

    Examples:
        >>> import torch, torch_fdattn
        >>> q, pages = torch.randn(1, 4, 1, 64), torch.randn(8, 2, 16, 64)
        >>> table = torch.tensor([[3, 5]], dtype=torch.int32)
        >>> lens = torch.tensor([20], dtype=torch.int32)
        >>> plan = torch_fdattn.plan_paged_decode(q, pages, pages, table, lens)
        >>> out, lse = plan(q, pages, pages, lens, page_table=table)
        >>> lse.shape
        torch.Size([1, 4, 1])

    Source: plan and run of FlashInfer, arXiv:2501.01005; PagedAttention, arXiv:2309.06180.
    """
    inputs = dict(q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table, kv_lens=kv_lens)
    options = dict(
        causal=causal, window=window, scale=checks.number("scale", scale), q_start=q_start, kv_start=kv_start,
        kv_block=kv_block, kv_stride=kv_stride, k_scale=k_scale, v_scale=v_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, batch_invariant=batch_invariant,
    )  # fmt: skip
    return DecodePlan(inputs, options)
