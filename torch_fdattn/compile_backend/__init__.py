"""`torch.compile(model, backend="fdattn")`: attention becomes ours wherever it is provably the same function.

    fdattn    the backend, which torch finds by the entry point `torch_dynamo_backends`: of an installation, or
              after `import torch_fdattn` (`torch_fdattn.checkout`). `backend=torch_fdattn.compile_backend.fdattn`
              works anywhere
    explain   what the backend does to a function's attention, site by site

`rewrite.py` is the pass, a stage after the other: match/ → masks/ → choose.py → emit/ → report.py. `tensor_parallel/`
is a second pass, over matmuls next to collectives. Importing this loads nothing of torch.compile: that happens at the first compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from torch_fdattn.compile_backend.options import Options
    from torch_fdattn.compile_backend.report import Report


def fdattn(
    gm: GraphModule, inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:  # fmt: skip
    """Rewrites a Dynamo graph's attention, then compiles it with Inductor.

    Args:
        mode, options: as `torch.compile(backend="inductor")` takes them. Of our own, in options:
            ``dryrun`` (report alone, rewrite nothing), ``require_all`` (raise `UnsupportedAttention` where any
            attention is left as it was), ``no_fully_masked_rows`` (your promise that masks leave every query a
            key: saves a float mask that is data what keeps such rows as they were), ``lower`` ("inductor", "aot_eager" or "eager"), and
            ``context_parallel``: a process group, its name, a DeviceMesh of one dimension, or a dict of such a
            "group" (or None, the default group), "shards" ("contiguous", which is the default, "zigzag" or a `dist.SequenceShards`),
            "strategy" ("ring", "all_gather", "ulysses" or "star"), "cu_seqlens" (a list: where packed documents begin in
            the full sequence, and where the last one ends) and "cache" ("contiguous", or the block of a round-robin map).

    With ``context_parallel`` the graph is given this rank's tokens of sequences that are split over the group, and
    its SDPA, attention written out and `torch_fdattn.attention` over them become `dist.ring_attention`, gradients
    included. So does a mask that the graph makes of an input's positions, as transformers' models do of position_ids: at
    each call these are compared with the shard's, of the sequence or, with "cu_seqlens", counted in each document. A site that is none of these over as many queries as keys, or has
    another mask or SDPA's dropout, raises `UnsupportedAttention` (with ``dryrun`` it is reported alone): left as it was
    it would attend to this rank's tokens only. With "cache", K and V of `torch_fdattn.decode` and `paged_decode` are
    this rank's shards, q is the same on all ranks, kv_lens and q_start are those of full sequences, and the call becomes
    `dist.decode`; so does attention of up to 16 queries over more keys, without a mask or gradients, which then sees
    all slots of all ranks. For the same reason compile with ``fullgraph=True``: what Dynamo leaves to Python no
    backend sees; nor does it know attention in kernels of other libraries. Each length is compiled for itself.

    Where torch.distributed is initialised, functional all-gather -> matmul, matmul -> reduce-scatter and matmul ->
    all-reduce, forward and backward, in DTensor models too, become one op each which overlaps the two:
    ``tensor_parallel`` is "auto" (where that was measured to be faster on this GPU), "off", or "collective",
    "copy_engine", "fused" or "low_latency", the strategy for all of them (see `torch_fdattn.dist.all_gather_matmul`).
    They are counted and logged when they are compiled, not when a compiled graph comes out of Inductor's cache.

    Raises:
        TypeError, ValueError: an option of ours, naming it, what was expected and what came.
        RuntimeError: ``context_parallel`` or a strategy as ``tensor_parallel`` without an initialised torch.distributed.

    Examples:
        >>> def layer(q, k, v):
        ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> compiled = torch.compile(layer, backend="fdattn", options={"require_all": True, "lower": "eager"})
        >>> q, k, v = torch.randn(3, 1, 4, 32, 16)
        >>> torch.allclose(compiled(q, k, v), layer(q, k, v), atol=1e-5)
        True
    """
    from torch_fdattn.compile_backend.options import split

    own, others = split(options, mode, inputs)
    if own.context_parallel is None or own.dryrun:
        return _compiled(gm, inputs, own, mode, others)
    from torch_fdattn.compile_backend.context_parallel import agreement, checkpoints

    group_name = own.context_parallel.group_name
    with agreement.refusing_on_all_ranks(group_name, inputs):
        checkpoints.refuse_empty_shards(gm, own.context_parallel)
        compiled = _compiled(gm, inputs, own, mode, others)
    return agreement.comparing(compiled, gm, inputs, group_name)


def _compiled(
    gm: GraphModule, inputs: list[Any], own: Options, mode: str | None, others: dict[str, Any]
) -> Callable[..., Any]:
    from torch_fdattn.compile_backend.lowering import lower
    from torch_fdattn.compile_backend.record import record
    from torch_fdattn.compile_backend.rewrite import rewrite
    from torch_fdattn.compile_backend.torch_sdpa import applies

    report = rewrite(
        gm, dryrun=own.dryrun, context=own.context_parallel,
        no_fully_masked_rows=own.no_fully_masked_rows, sdpa_on_cpu=applies(own.lower),
    )  # fmt: skip
    record(report)
    if own.require_all:
        report.check('options["require_all"] is set, and')
    if own.context_parallel and not own.dryrun:
        report.check('with options["context_parallel"] this would see one rank\'s tokens alone:')
        if not report.sites:
            from torch_fdattn.compile_backend.record import warn_of_no_attention

            warn_of_no_attention(gm)
    compiled = lower(gm, inputs, own, mode, others)
    if report.positions and not own.dryrun:
        from torch_fdattn.compile_backend.context_parallel.positions import checking

        return checking(compiled, gm, report, own.context_parallel)
    return compiled


def explain(
    fn: Callable[..., Any],
    *args: object,
    context_parallel: object = None,
    tensor_parallel: str = "auto",
) -> Callable[..., Report]:
    """``explain(fn)(*args)`` runs fn once, rewritten, and returns a `Report` of its attention.

    It prints as a table: where each attention stands in the source, its form, and the op that took its
    place or why none did. As with `torch._dynamo.explain`, what was compiled before is forgotten, and fn
    really runs, and its backward too where torch.distributed is initialised; context_parallel and tensor_parallel are the options of those names. What Dynamo does not capture (it falls back to
    Python) is not seen.

    Examples:
        >>> def layer(q, k, v):
        ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> report = torch_fdattn.explain(layer)(*torch.randn(3, 1, 4, 32, 16))
        >>> [site.op for site in report], report.left
        (['attention'], [])
    """
    from torch_fdattn.compile_backend.explaining import explain_call

    if args:
        raise TypeError(
            f"explain must be given the function alone, got {len(args)} more: explain(fn)(*args) calls it"
        )
    return partial(explain_call, fn, context_parallel, tensor_parallel)


__all__ = ["explain", "fdattn"]
