"""The pass over a Dynamo graph: every attention that is provably ours is replaced, every other is reported."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._functorch import predispatch as vmap
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from torch_fdattn.compile_backend.choose import Attention, check_gradients, choose
from torch_fdattn.compile_backend.context_parallel import attention as context_parallel
from torch_fdattn.compile_backend.context_parallel.attention import ContextParallel, FdattnCall
from torch_fdattn.compile_backend.emit.attention import emit
from torch_fdattn.compile_backend.graph.data_flow import DataFlow
from torch_fdattn.compile_backend.graph.nodes import op_name
from torch_fdattn.compile_backend.masks.recovery import Masks
from torch_fdattn.compile_backend.match import opaque, sdpa, unfused_attention
from torch_fdattn.compile_backend.match.unmatched import OTHER_SOFTMAXES, Unmatched
from torch_fdattn.compile_backend.report import Report, Site, Unsupported, stack_trace

_FORMS = {sdpa.FORM: sdpa, **dict.fromkeys(unfused_attention.SOFTMAX, unfused_attention)}

#: What a call in a form that nobody thought of raises.
_UNEXPECTED = (AttributeError, IndexError, TypeError, ValueError)


def rewrite(
    gm: GraphModule, *, dryrun: bool = False, context: ContextParallel | None = None,
    no_fully_masked_rows: bool = False,
) -> Report:  # fmt: skip
    """Replaces attention in a graph and in all graphs it calls (activation checkpointing, for example).

    dryrun: only says what would be replaced.
    context: over whose ranks the tokens are split; then sites that are left see local tokens alone.
    no_fully_masked_rows: the caller's promise that masks leave every query a key.
    """
    report, unmatched = Report(), Unmatched(DataFlow(gm))
    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            report.own.update(_fdattn_calls(module, context))
            report.sites += _rewrite_one(
                module, name, unmatched, dryrun, context, Masks(no_fully_masked_rows)
            )
    return report


def _fdattn_calls(gm: GraphModule, context: ContextParallel | None) -> Iterator[str]:
    """The names of our ops that a graph calls before anything is rewritten; those that become sites are none."""
    for node in gm.graph.nodes:
        if isinstance(node.target, (OpOverload, OpOverloadPacket)):
            namespace, name = str(node.target).split(".")[:2]
            if namespace == "fdattn" and (context is None or not FdattnCall.matches(node)):
                yield name


def _rewrite_one(
    gm: GraphModule, module: str, unmatched: Unmatched, dryrun: bool,
    context: ContextParallel | None, masks: Masks,
) -> list[Site]:  # fmt: skip
    sites: list[Site] = []
    forms = {**_FORMS, **dict.fromkeys(OTHER_SOFTMAXES, unmatched)}
    transformed = _transformed(gm)
    for node in list(gm.graph.nodes):
        form = opaque if opaque.is_opaque(node) else forms.get(op_name(node))
        if context is not None and FdattnCall.matches(node):
            form = FdattnCall
        if form is unfused_attention and _is_routers(node, unmatched):
            continue
        if form is not None:
            found = _site(form, node, masks, module, node in transformed, dryrun, context)
            if not found and form is unfused_attention:
                found = _site(unmatched, node, masks, module, node in transformed, dryrun, context)
            sites += found
    if any(site.op for site in sites) and not dryrun:
        gm.graph.lint()
        gm.recompile()
    return sites


def _site(
    form, node: Node, masks: Masks, module: str, transformed: bool, dryrun: bool,
    context: ContextParallel | None,
) -> list[Site]:  # fmt: skip
    about = dict(form=form.FORM, node=node.name, stack_trace=stack_trace(node), module=module)
    try:
        if form is FdattnCall:
            about["stack_trace"] = FdattnCall.stack_trace(node)
            if transformed:
                raise Unsupported("functorch")
            op = context_parallel.replace_fdattn_call(node, context, dryrun=dryrun)
            return [Site(op=op, **about)]
        found = _matched(form, node, masks)
        if found is None:
            return []
        if transformed:
            raise Unsupported("functorch")
        plan = choose(found)
        check_gradients(found)
        if context is not None:
            plan = context_parallel.over_ranks(found, plan, context)
        if not dryrun:
            emit(found, plan, masks)
    except Unsupported as unsupported:
        if transformed:
            unsupported = Unsupported("functorch")  # whatever its tensors seem to be
        return [Site(op=None, reason=unsupported.code, detail=unsupported.detail, **about)]
    return [Site(op=plan.op, notes=tuple(found.notes), **about)]


def _matched(form, node: Node, masks: Masks) -> Attention | None:
    """Nothing is changed yet: a call in a form that nobody thought of is left, not a failed compilation."""
    try:
        return form.match(node, masks)
    except _UNEXPECTED as error:
        raise Unsupported("unexpected", f"a call in a form that is not known ({error})") from error


def _is_routers(node: Node, unmatched: Unmatched) -> bool:
    try:
        return unmatched.is_routers(node)
    except (*_UNEXPECTED, Unsupported):
        return False


_VMAP = {vmap._vmap_increment_nesting: 1, vmap._vmap_decrement_nesting: -1}
_AROUND_VMAP = {vmap._add_batch_dim, vmap._remove_batch_dim, vmap.lazy_load_decompositions}


def _transformed(gm: GraphModule) -> set[Node]:
    """Nodes whose tensors are not what their metadata says: those inside of a vmap, or all, for grad and jvp."""
    inside, depth = set(), 0
    for node in gm.graph.nodes:
        depth += _VMAP.get(node.target, 0)
        if depth:
            inside.add(node)
        elif _is_functorch(node):
            return set(gm.graph.nodes)
    return inside


def _is_functorch(node: Node) -> bool:
    """grad, jvp and the like."""
    if node.op != "call_function" or node.target in _VMAP or node.target in _AROUND_VMAP:
        return False
    module = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    return (
        module.startswith(("torch._functorch", "torch._C._functorch"))
        or name.endswith("_increment_nesting")
        or node.target is torch.autograd.forward_ad.enter_dual_level
        or name == "_enter_dual_level"
    )
