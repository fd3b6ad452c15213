"""The pass over a Dynamo graph, one stage after the other: match, recover the mask, choose, emit, report.

Every attention that is provably the same function as an op of ours is replaced; every other is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from torch_fdattn.compile_backend import torch_sdpa
from torch_fdattn.compile_backend.choose import choose
from torch_fdattn.compile_backend.context_parallel import fdattn_calls, token_mixing
from torch_fdattn.compile_backend.context_parallel.local_masks import over_all_tokens
from torch_fdattn.compile_backend.context_parallel.options import ContextParallel
from torch_fdattn.compile_backend.context_parallel.ring import over_ranks
from torch_fdattn.compile_backend.emit.attention import emit
from torch_fdattn.compile_backend.graph.data_flow import DataFlow
from torch_fdattn.compile_backend.graph.functional import Functionalized
from torch_fdattn.compile_backend.graph.functorch import transformed_nodes
from torch_fdattn.compile_backend.graph.nodes import op_name
from torch_fdattn.compile_backend.masks.recovery import MaskRecovery
from torch_fdattn.compile_backend.match import opaque, sdpa, unfused_attention
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.unmatched import OTHER_SOFTMAXES, Unmatched
from torch_fdattn.compile_backend.report import KEPT, Report, Site, Unsupported, stack_trace
from torch_fdattn.ops.library import NAMESPACE

#: What a call in a form that nobody thought of raises.
_UNEXPECTED = (AttributeError, IndexError, TypeError, ValueError)


def rewrite(
    gm: GraphModule, *, dryrun: bool = False, context: ContextParallel | None = None,
    no_fully_masked_rows: bool = False, sdpa_on_cpu: bool = False,
) -> Report:  # fmt: skip
    """Replaces attention in a graph and in all graphs it calls (activation checkpointing, for example).

    dryrun: only says what would be replaced.
    context: over whose ranks the tokens are split; then sites that are left see local tokens alone.
    no_fully_masked_rows: the caller's promise that masks leave every query a key.
    sdpa_on_cpu: SDPA of CPU tensors stays torch's own but where ours is much faster (`torch_sdpa.py`).
    """
    report = Report()
    graphs = {name: x for name, x in gm.named_modules() if isinstance(x, GraphModule)}
    functional = [Functionalized(module) for module in graphs.values()]
    try:
        flow = DataFlow(gm)
        unmatched = Unmatched(flow)
        for name, module in graphs.items():
            report.fdattn_calls.update(_fdattn_calls(module, context))
            masks = MaskRecovery(no_fully_masked_rows)
            one = _GraphPass(module, name, unmatched, masks, context, dryrun, sdpa_on_cpu, flow)
            report.sites += one.run()
            report.positions |= one.positions
            report.document_positions |= one.document_positions
    finally:
        for each in functional:
            each.restore()
    if report.rewritten and not dryrun:
        for module in graphs.values():
            module.graph.lint()
            module.recompile()
    if context is not None and not dryrun:
        report.local = token_mixing.sites(gm, context)
    return report


def _fdattn_calls(gm: GraphModule, context: ContextParallel | None) -> Iterator[str]:
    """The names of our ops that a graph calls before anything is rewritten; those that become sites are none."""
    for node in gm.graph.nodes:
        if isinstance(node.target, (OpOverload, OpOverloadPacket)):
            namespace, name = str(node.target).split(".")[:2]
            if namespace == NAMESPACE and (context is None or not fdattn_calls.matches(node)):
                yield name


class _GraphPass:
    """The pass over one graph; `name` is that of its module."""

    def __init__(
        self, gm: GraphModule, name: str, unmatched: Unmatched, masks: MaskRecovery,
        context: ContextParallel | None, dryrun: bool, sdpa_on_cpu: bool, flow: DataFlow,
    ) -> None:  # fmt: skip
        self.gm, self.name, self.unmatched, self.masks = gm, name, unmatched, masks
        self.context, self.dryrun, self.sdpa_on_cpu = context, dryrun, sdpa_on_cpu
        self.flow = flow
        #: inputs that must hold the positions of this rank's tokens
        self.positions: set[str] = set()
        #: those that must begin with 0 in each document
        self.document_positions: set[str] = set()
        self.transformed = transformed_nodes(gm)
        self.forms = {
            sdpa.FORM: sdpa,
            **dict.fromkeys(unfused_attention.SOFTMAX, unfused_attention),
            **dict.fromkeys(OTHER_SOFTMAXES, unmatched),
        }

    def run(self) -> list[Site]:
        return [site for node in list(self.gm.graph.nodes) if (site := self._site(node))]

    def _site(self, node: Node) -> Site | None:
        """What became of the attention that a node is; None where it is none."""
        if self.context is not None and fdattn_calls.matches(node):
            return self._reported(fdattn_calls, node, fdattn_calls.stack_trace(node))
        form = opaque if opaque.is_opaque(node) else self.forms.get(op_name(node))
        if form is None or (form is unfused_attention and self._is_router(node)):
            return None
        site = self._reported(form, node, stack_trace(node))
        if site is None and form is unfused_attention:
            site = self._reported(self.unmatched, node, stack_trace(node))
        return site

    def _is_router(self, node: Node) -> bool:
        try:
            return self.unmatched.is_router(node)
        except (*_UNEXPECTED, Unsupported):
            return False

    def _reported(self, form: Any, node: Node, trace: str) -> Site | None:
        about = dict(form=form.FORM, node=node.name, stack_trace=trace, module=self.name)
        try:
            op, notes = self._replaced(form, node)
        except Unsupported as error:
            # Of a transformed node, tensors seem to be what they are not.
            reason = Unsupported("functorch") if node in self.transformed else error
            return Site(op=None, reason=reason.code, detail=reason.detail, **about)
        return Site(op=op, notes=tuple(notes), **about) if op else None

    def _replaced(self, form: Any, node: Node) -> tuple[str | None, list[str]]:
        """(the op that takes the place of what a node is, notes); raises `Unsupported`."""
        if form is fdattn_calls:
            self._check_untransformed(node)
            return fdattn_calls.replace(node, self.context, dryrun=self.dryrun), []
        attention = self._matched(form, node)
        if attention is None:
            return None, []
        self._check_untransformed(node)
        try:
            return self._chosen(attention), attention.notes
        except _UNEXPECTED as error:
            raise _unexpected(error) from error

    def _chosen(self, attention: MatchedAttention) -> str:
        """The op that computes an attention now."""
        positions = None
        if self.context is not None and attention.masked:
            positions = over_all_tokens(attention, self.flow)
        call = choose(attention)
        counted = bool(call.structure.chunk or call.structure.prefix)
        if self.context is not None:
            call = over_ranks(attention, call, self.context)
        elif self.sdpa_on_cpu and torch_sdpa.stays(attention, call):
            return KEPT
        if not self.dryrun:
            emit(attention, call, self.masks)
        if positions is not None:
            self.positions.add(positions.name)
            if counted:
                self.document_positions.add(positions.name)
        return call.op

    def _check_untransformed(self, node: Node) -> None:
        if node in self.transformed:
            raise Unsupported("functorch")

    def _matched(self, form: Any, node: Node) -> MatchedAttention | None:
        """Nothing is changed yet: a call in a form that nobody thought of is left, not a failed compilation."""
        try:
            return form.match(node, self.masks)
        except _UNEXPECTED as error:
            raise _unexpected(error) from error


def _unexpected(error: Exception) -> Unsupported:
    return Unsupported("unexpected", f"a call in a form that is not known ({error})")
