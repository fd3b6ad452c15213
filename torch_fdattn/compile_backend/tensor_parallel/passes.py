"""The pass over ATen graphs, as Inductor and AOTAutograd run it, and ``options["tensor_parallel"]``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._inductor import config
from torch.fx import Graph, GraphModule, Node

from torch_fdattn.compile_backend.cache_key import CacheKey
from torch_fdattn.compile_backend.report import Report, Site, Unsupported, stack_trace
from torch_fdattn.compile_backend.tensor_parallel.emit import emit_gather, emit_reduction
from torch_fdattn.compile_backend.tensor_parallel.match import FORMS, Gather, Reduction, match
from torch_fdattn.compile_backend.tensor_parallel.rows import value, width
from torch_fdattn.dist.tensor_parallel.auto import (
    ALL_REDUCE,
    GATHER,
    SCATTER,
    LinearSizes,
    may_choose,
)

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.options import Options

#: "auto": where something was measured to be faster than the collective; a strategy: everywhere, by that one.
CHOICES = ("auto", "off", "collective", "copy_engine", "fused", "low_latency")
_OPS = dict(zip(FORMS, (GATHER, SCATTER, ALL_REDUCE), strict=True))


def parse(choice: object) -> str:
    """The option's value.

    Raises:
        ValueError: it is none of `CHOICES`.
        RuntimeError: a strategy, without an initialised torch.distributed.
    """
    if choice not in CHOICES:
        raise ValueError(f'options["tensor_parallel"] must be one of {CHOICES}, got {choice!r}')
    if choice not in CHOICES[:2] and not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f'options["tensor_parallel"]={choice!r} needs an initialised torch.distributed: call init_process_group first'
        )
    return choice


def applies(choice: str) -> bool:
    """Whether graphs may hold what the pass looks for."""
    return choice != "off" and dist.is_available() and dist.is_initialized()


def rewrite_graph(graph: Graph, choice: str, *, dryrun: bool = False) -> list[Site]:
    """Replaces matmuls next to collectives, in place; the sites that were found."""
    sites = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in FORMS:
            continue
        op = _OPS[node.target]
        about = dict(form=FORMS[node.target], node=node.name, stack_trace=stack_trace(node))
        try:
            matched = match(node)
            if matched is None:
                continue
            about["stack_trace"] = stack_trace(matched.matmuls[0].node) or about["stack_trace"]
            _expect_gain(op, matched, choice)
            if not dryrun:
                (emit_gather if isinstance(matched, Gather) else emit_reduction)(matched, choice)
        except Unsupported as unsupported:
            sites.append(Site(op=None, reason=unsupported.code, detail=unsupported.detail, **about))
            continue
        sites.append(Site(op=op, notes=_notes(matched, choice), **about))
    if any(site.op for site in sites) and not dryrun:
        graph.lint()
    return sites


def _expect_gain(op: str, matched: Gather | Reduction, choice: str) -> None:
    first = matched.matmuls[0]
    given = value(first.x)
    if given.device.type not in ("cpu", "cuda"):
        raise Unsupported("device")
    if choice == "copy_engine" and op == ALL_REDUCE:
        raise Unsupported("strategy")
    if choice != "auto":
        return
    columns = [width(matmul.node) for matmul in matched.matmuls]
    features = [width(matmul.x) for matmul in matched.matmuls]
    gathers = isinstance(matched, Gather)
    numbers = (
        value(first.node).shape[0],
        sum(columns) if gathers else columns[0],
        features[0] if gathers else sum(features),
        matched.world_size,
    )
    known = all(isinstance(number, int) for number in numbers)
    if not may_choose(op, given.device, given.dtype, LinearSizes(*numbers) if known else None):
        raise Unsupported("not-faster")


def _notes(matched: Gather | Reduction, choice: str) -> tuple[str, ...]:
    modules = [_module(matmul.node) for matmul in matched.matmuls]
    return (
        *((" and ".join(modules),) if all(modules) else ()),
        *((f"{len(modules)} matmuls",) if len(modules) > 1 else ()),
        *(("keeps the gathered rows",) if isinstance(matched, Gather) and matched.keep else ()),
        *((choice,) if choice != "auto" else ()),
    )


def _module(node: Node) -> str:
    """Where in the model it stands, for example "layers.0.mlp.down_proj"; "" where the graph does not say."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return re.sub(r"^L\['\w+'\]\.?", "", path)


class MatmulPass(CacheKey):
    """For Inductor: it has an id for the caches, and runs the user's own pass of that place first."""

    PLACE = "post_grad_custom_pre_pass"

    def __init__(self, own: Options, users: object, record: Callable[[Report], None]) -> None:
        super().__init__(own, users)
        self.choice, self.dryrun, self.record = own.tensor_parallel, own.dryrun, record

    @classmethod
    def patch(
        cls, patches: dict[str, Any], own: Options, record: Callable[[Report], None]
    ) -> dict[str, Any]:
        return {cls.PLACE: cls(own, patches.get(cls.PLACE, getattr(config, cls.PLACE)), record)}

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        self.record(Report(graphs=0, matmuls=rewrite_graph(graph, self.choice, dryrun=self.dryrun)))


def compilers(
    choice: str, record: Callable[[Report], None], dryrun: bool = False
) -> dict[str, Callable]:
    """For torch's ``aot_eager``: compilers of its forward and backward graphs that run the pass, and no more."""
    from torch._dynamo.backends.debugging import boxed_nop

    def compiler(gm: GraphModule, inputs: list) -> Callable:
        record(Report(graphs=0, matmuls=rewrite_graph(gm.graph, choice, dryrun=dryrun)))
        gm.recompile()
        return boxed_nop(gm, inputs)

    return {"fw_compiler": compiler, "bw_compiler": compiler}
