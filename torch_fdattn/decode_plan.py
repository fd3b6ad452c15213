"""Decode calls that a caller prepares once and holds, for loops that call nothing but them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_fdattn import checks
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.configs import dot_precision
from torch_fdattn.ops.attention.inputs import empty_state
from torch_fdattn.ops.decode.cpu import DecodeOnCpu
from torch_fdattn.ops.decode.entry import call_op, check_types, out_to_bhsd, pair_of_tensors
from torch_fdattn.ops.decode.inputs import check_workspace, checked_call, plain_numbers
from torch_fdattn.ops.decode.op import PreparedDecode, prepare
from torch_fdattn.ops.layout import Layout, from_bhsd, to_bhsd
from torch_fdattn.ops.options import DecodeOptions, options_to_mask, window_bounds
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores


class DecodePlan:
    """A `decode` or `paged_decode` whose checks and choices are made; `plan_decode` and `plan_paged_decode` return it.

    Called with tensors like those that it was planned with: of the same shapes, strides, dtypes and devices. Any thread
    and any stream may call it, and a stream may be capturing. Under torch.compile a call is checked and traced as the op;
    it is made as the op, too, where a gradient, a mode, a transform or a tensor's subclass asks for the dispatcher. Autocast
    changes nothing of it, and a profiler sees its kernels, but no op.
    """

    def __init__(
        self, inputs: tuple[Tensor, ...], options: DecodeOptions, layout: Layout = "bhsd"
    ) -> None:
        """inputs: q, k_cache, v_cache, and page_table over pages; options: those of all calls, and kv_lens of one."""
        self._layout = layout
        if layout != "bhsd":
            q, k, v = inputs[:3]
            inputs = *to_bhsd(layout, q=q, k_cache=k, v_cache=v), *inputs[3:]
        check_types(inputs, options)
        q, k, v, page_table = *inputs, *(None,) * (4 - len(inputs))
        call = checked_call(q, k, v, page_table, plain_numbers(q, options))
        self._paged, kv_lens = len(inputs) == 4, options.mask.kv_lens
        named = dict(q=q, k_cache=k, v_cache=v, page_table=page_table, kv_lens=kv_lens)
        scores, scales = options.scores, (options.k_scale, options.v_scale)
        held = dict(
            q_start=options.mask.q_start, kv_start=options.mask.kv_start, k_scale=scales[0], v_scale=scales[1],
            alibi_slopes=scores.alibi_slopes, sinks=scores.sinks, attn_mask=scores.attn_mask,
        )  # fmt: skip
        self._held = {name: x for name, x in held.items() if x is not None}
        self._expected = {name: _metadata(x) for name, x in (named | self._held).items()}
        self._options = options._replace(mask=options.mask._replace(kv_lens=None))
        # As the kernel takes them, around the page table and behind kv_lens.
        self._starts, self._others = options.mask[1:3], call.tensors[4:]
        # The kernel takes the scales expanded to the cache: views of where they lie now.
        views = zip(scales, self._others, strict=False)
        self._scales = [(x, view) for x, view in views if x is not None]
        # torch's own setting decides how float32 is multiplied.
        self._precision = dot_precision(q.dtype) if q.dtype == torch.float32 else None
        self._prepared: PreparedDecode | DecodeOnCpu | None = None
        out, lse = empty_state(q, v)
        self._written = dict(out=_metadata(out), lse=_metadata(lse))
        if library.can_call_kernel(q, *self._held.values()):
            self._prepared = prepare(call, out, lse)

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
        if self._layout == "bhsd":
            return self._call(q, k_cache, v_cache, kv_lens, page_table, out, workspace)
        views = to_bhsd(self._layout, q=q, k_cache=k_cache, v_cache=v_cache)
        of_out = out_to_bhsd(self._layout, out)
        state = self._call(*views, kv_lens, page_table, of_out, workspace)
        return from_bhsd(state) if out is None else tuple(out)

    def _call(self, q, k_cache, v_cache, kv_lens, page_table, out, workspace):
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
        for name, tensor in self._held.items():  # a module's may be replaced: parameter.data = …
            if _metadata(tensor) != expected[name]:
                self._refuse(name, tensor)
        written = () if out is None else out
        if out is not None:
            self._check_out(out)
        prepared = self._prepared
        if (
            torch.compiler.is_compiling()
            or prepared is None
            or checks.CHECK_VALUES
            or not _need_no_dispatch(q, k_cache, v_cache, *written, *self._held.values())
            or not self._is_current()
            or (prepared.reads_pairs and (k_cache.data_ptr() | v_cache.data_ptr()) & 1)
        ):
            return self._by_op(q, k_cache, v_cache, kv_lens, page_table, out, workspace)
        if workspace is not None:
            check_workspace(workspace, prepared.floats, q.device)
        if out is not None:
            torch.autograd.graph.increment_version([*out])
        elif workspace is not None:
            out = empty_state(q, v_cache)
        others = kv_lens, *self._starts, page_table, *self._others
        return prepared.run(q, k_cache, v_cache, others, None if out is None else (*out, workspace))

    def _is_current(self) -> bool:
        """Whether torch's setting of tf32 is the one that it was planned under, and scales lie where they lay."""
        for x, view in self._scales:
            if x.data_ptr() != view.data_ptr():
                return False
        return self._precision is None or dot_precision(torch.float32) == self._precision

    def _by_op(self, q, *others):
        """As the prepared launches would, under autocast too: in the dtypes that were planned."""
        if q.is_meta or not torch.is_autocast_enabled(q.device.type):  # meta knows no autocast
            return self._call_op(q, *others)
        with torch.autocast(q.device.type, enabled=False):
            return self._call_op(q, *others)

    def _call_op(self, q, k_cache, v_cache, kv_lens, page_table, out, workspace):
        options = self._options
        mask = Mask(kv_lens, *options.mask[1:])
        options = DecodeOptions(mask, *options[1:])
        inputs = (q, k_cache, v_cache, page_table) if self._paged else (q, k_cache, v_cache)
        return call_op(inputs, options, out, workspace)

    def _check_out(self, written: tuple[Tensor, Tensor]) -> None:
        for name, tensor in zip(("out", "lse"), pair_of_tensors(written), strict=True):
            planned = self._written[name]
            if _metadata(tensor) != planned:
                shape, strides, dtype, _ = planned
                raise ValueError(
                    f"{name} must be as planned, {dtype} of shape {tuple(shape)} and strides {strides}, "
                    f"got {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                )

    def _refuse(self, name: str, tensor: object) -> None:
        planned = _described(self._expected.get(name))
        raise ValueError(
            f"{name} must be as planned, {planned}, got {_described(_metadata(tensor))}: "
            "plan such calls by themselves"
        )


def _need_no_dispatch(*tensors: Tensor) -> bool:
    """Whether nobody but the kernels has to see these."""
    if library.is_watched():
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        if (type(x) is not Tensor and type(x) is not Parameter) or (grad and x.requires_grad) or x.is_neg():  # fmt: skip
            return False
    return True


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
    attn_mask: Tensor | None = None, layout: Layout = "bhsd",
) -> DecodePlan:  # fmt: skip
    """A `decode` to be called again and again: checked now, and each call no more than its launches.

    Args:
        q, k_cache, v_cache, kv_lens: like those of the calls; their values are not read.
        The others: `decode`'s, of all calls. Tensors among them are held, and their values are read at each call; of scale,
            which may be a 0-dim tensor, the value is read now.

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
    checks.expect_bool(causal=causal, batch_invariant=batch_invariant)
    bounds = kv_lens, q_start, kv_start
    mask = options_to_mask(*bounds, causal, *window_bounds(window), kv_block, kv_stride)
    scores, scale = Scores(softcap, alibi_slopes, sinks, attn_mask), checks.number("scale", scale)
    options = DecodeOptions(mask, scale, scores, k_scale, v_scale, batch_invariant)
    return DecodePlan((q, k_cache, v_cache), options, layout)


def plan_paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None, kv_block: int = 0, kv_stride: int = 0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, softcap: float = 0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, batch_invariant: bool = False,
    layout: Layout = "bhsd",
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
    checks.expect_bool(causal=causal, batch_invariant=batch_invariant)
    bounds = kv_lens, q_start, kv_start
    mask = options_to_mask(*bounds, causal, *window_bounds(window), kv_block, kv_stride)
    scores, scale = Scores(softcap, alibi_slopes, sinks), checks.number("scale", scale)
    options = DecodeOptions(mask, scale, scores, k_scale, v_scale, batch_invariant)
    return DecodePlan((q, k_cache, v_cache, page_table), options, layout)
