"""What else than attention would see this rank's tokens alone, refused by name.

The rest of a model must work token by token, or ranks compute silently other numbers than one process does. Which dims run
over tokens is followed through the graph (`token_dims.py`); an operation over them that gives a token something of
others, or counts tokens from where the rank begins, is reported with its source line. Only what reaches the graph's results
counts: masks that attention no longer reads do not.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from torch_fdattn.compile_backend.context_parallel.mixing_operations import (
    mixes,
    shifts_labels,
)
from torch_fdattn.compile_backend.context_parallel.options import ContextParallel
from torch_fdattn.compile_backend.context_parallel.token_dims import (
    NO_DIMS,
    REDUCTIONS,
    TokenCount,
    TokenInfo,
    argument,
    dims_of,
    first_input,
    index_entries,
    is_elementwise,
    operation,
    reduced,
    tensor_of,
)
from torch_fdattn.compile_backend.graph.data_flow import DataFlow
from torch_fdattn.compile_backend.graph.mutations import writes
from torch_fdattn.compile_backend.graph.nodes import described, statically_true, value
from torch_fdattn.compile_backend.graph.parameters import is_parameter
from torch_fdattn.compile_backend.report import Site, stack_trace
from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards

REASON = "token-mixing"
_RING = torch.ops.fdattn.ring_attention.default
#: Reductions that pick a number, also of what has no features.
_EXTREMES = {
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "max", "min",
}  # fmt: skip
#: Where numbers that count tokens meet the tokens' features: learned positions are added, rotary angles multiplied.
_MEETINGS = {
    "add", "addcmul", "cat", "div", "iadd", "imul", "isub", "itruediv", "mul", "sub", "truediv",
}  # fmt: skip
#: Where a comparison of such numbers says which tokens' features are kept.
_CHOICES = {"masked_fill", "where"}
#: Where rows are added up.
_SUMS = {"index_add", "index_reduce", "scatter_add", "scatter_reduce"}
#: Whose sum along a dim counts.
_FILLED = {"full", "full_like", "new_full", "new_ones", "ones", "ones_like"}
#: A call in a form that nobody thought of: nothing is known of what it yields.
_UNEXPECTED = (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError)


def sites(gm: GraphModule, context: ContextParallel) -> list[Site]:
    """What a graph whose attention goes over ranks does besides with its tokens that one rank cannot do alone."""
    call = next((x for x in _nodes(gm) if x.target is _RING), None)
    if call is None:
        return []
    shards = SequenceShards.from_flat(call.args[4])
    walk = _TokenWalk(DataFlow(gm), context, shards, tensor_of(call.args[0]).shape[2])
    walk.visit(gm.graph)
    reached = set(walk.flow.all_sources(gm.graph.output_node()))
    found = {cause: detail for at, cause, detail in walk.found if at in reached}
    return [
        Site(
            form=described(cause), node=cause.name, op=None, reason=REASON, detail=detail,
            stack_trace=stack_trace(cause),
        )
        for cause, detail in found.items()
    ]  # fmt: skip


def _nodes(gm: GraphModule) -> Iterator[Node]:
    for module in gm.modules():
        yield from module.graph.nodes if isinstance(module, GraphModule) else ()


class _TokenWalk:
    """Over the nodes of a graph, in the order in which they run, and of the graphs that it calls."""

    def __init__(
        self, flow: DataFlow, context: ContextParallel, shards: SequenceShards, length: object
    ) -> None:
        self.flow, self.length, self.total = flow, length, shards.total
        self.infos: dict[Node, TokenInfo] = {}
        #: of a call of a graph, what is known of each of its results
        self.results: dict[Node, list[TokenInfo]] = {}
        #: (the node that must reach the results, its cause, what is said)
        self.found: list[tuple[Node, Node, str]] = []
        self.starts = _first_positions(shards, context)

    def visit(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "output":
                continue
            self.infos[node] = TokenInfo()
            try:
                self.infos[node] = self._info(node)
            except _UNEXPECTED:
                continue

    def _info(self, node: Node) -> TokenInfo:
        if node.op == "placeholder":
            given = [self.infos[x] for x in self.flow.sources(node) if x in self.infos]
            if self.flow.caller(node) is not None:
                return given[0] if len(given) == 1 else TokenInfo()
            return TokenInfo(self._dims_of_input(node))
        if node.op not in ("call_function", "call_method"):
            return TokenInfo()
        graphs = self.flow.called(node)
        name = operation(node)
        mixed = mixes(node, name, self.infos, bool(graphs))
        if mixed:
            self._refuse(node, node, f"{mixed}, of which a rank has its own alone: {_REMEDY}")
        elif shifts_labels(node, name, self.infos):
            self._refuse(node, node, _LABELS)
        if graphs:
            return self._called(node, graphs)
        if node.target is _RING:
            return TokenInfo(frozenset([2]))
        if node.target is operator.getitem and node.args[0] in self.results:
            return self.results[node.args[0]][node.args[1]]
        dims = dims_of(node, name, self.infos, self.length)
        info = self._pooled(node, name, self._counted(node, name, dims))
        if writes(node) and node.args and isinstance(node.args[0], Node):
            self.infos[node.args[0]] = info
        return info

    def _called(self, node: Node, graphs: list[Graph]) -> TokenInfo:
        for graph in graphs:
            self.visit(graph)
        # Branches of torch.cond have results of the same kinds.
        given = graphs[0].output_node().args[0]
        given = given if isinstance(given, (tuple, list)) else [given]
        self.results[node] = [self.infos.get(x, TokenInfo()) if isinstance(x, Node) else TokenInfo() for x in given]  # fmt: skip
        return self.results[node][0] if len(given) == 1 else TokenInfo()

    def _refuse(self, at: Node, cause: Node, detail: str) -> None:
        self.found.append((at, cause, detail))

    def _dims_of_input(self, node: Node) -> frozenset[int]:
        """The one dim of an input of the user's that is as long as the rank's tokens are many.

        Of several the last but one, or the last of integers: features stand behind tokens.
        """
        x = tensor_of(node)
        if x is None or _is_of_module(node):
            return NO_DIMS
        found = [i for i, size in enumerate(x.shape) if statically_true(size == self.length)]
        is_data = x.is_floating_point() or x.is_complex()
        if is_data and x.dim() <= 2:  # the last dim would be of features, or of a weight
            found = [i for i in found if i < x.dim() - 1]
        expected = x.dim() - (2 if is_data else 1)
        return frozenset([expected] if expected in found else found[:1])

    def _counted(self, node: Node, name: str, dims: frozenset[int]) -> TokenInfo:
        """With what is known of numbers over the rank's tokens that the graph makes by itself."""
        made = self._made(node, name)
        if made is not None:
            return made
        given = [x for x in node.all_input_nodes if self.infos[x].dims]
        counts = [x for x in given if self.infos[x].made is not None]
        if not counts or not dims:
            return TokenInfo(dims)
        count = self.infos[counts[0]].made
        others = [x for x in given if self.infos[x].made is None]
        if not others:
            moved = _moved_start(node, name, count, counts[0])
            return TokenInfo(dims, moved)
        meets = name in _CHOICES or (name in _MEETINGS and any(_is_data(x) or _is_mask(x) for x in counts))  # fmt: skip
        meets = meets and any(_is_data(x) for x in others)
        if meets and not self._may_begin(count.start):
            self._refuse(
                node, count.node,
                "positions that are counted from this rank's first token, which are not those of the sequence: give the "
                "model position_ids (or what it calls them), this rank's part of all positions",
            )  # fmt: skip
        return TokenInfo(dims)

    def _made(self, node: Node, name: str) -> TokenInfo | None:
        """An arange or linspace over as many as there are tokens, a module's table of at least as many cut to them, or a count of
        tokens."""
        out = tensor_of(node)
        if out is None or statically_true(self.length == 1):
            return None
        if name == "arange" and out.dim() == 1 and statically_true(out.shape[0] == self.length):
            numbers = [x for x in node.args if not isinstance(x, Node)]
            start = numbers[0] if len(numbers) > 1 else node.kwargs.get("start", 0)
            return (
                TokenInfo(frozenset([0]), TokenCount(node, start))
                if isinstance(start, int)
                else None
            )
        if name == "linspace" and statically_true(out.shape[0] == self.length):
            # Its step follows from the rank's number of tokens, wherever it begins.
            return TokenInfo(frozenset([0]), TokenCount(node, float("-inf")))
        if name == "cumsum" and operation(node.args[0]) in _FILLED:
            along = argument(node, 1, "dim") % out.dim()
            is_count = statically_true(out.shape[along] == self.length)
            return TokenInfo(frozenset([along]), TokenCount(node, 1)) if is_count else None
        if name == "cumsum" and not _is_data(node):
            dims = self.infos[node.args[0]].dims
            along = argument(node, 1, "dim")
            return TokenInfo(dims, TokenCount(node, 0)) if along % out.dim() in dims else None
        if name == "getitem" and _is_of_module(node.args[0]) and not _is_constant(node.args[0]):
            table = tensor_of(node.args[0])
            entries = index_entries(node, table.dim())
            kept = [(x, dim) for x, dim in entries if x is None or isinstance(x, slice)]
            for i, (x, dim) in enumerate(kept):
                if dim is None or x == slice(None) or statically_true(table.shape[dim] == self.length):  # fmt: skip
                    continue
                if statically_true(out.shape[i] == self.length) and isinstance(x.start or 0, int):
                    return TokenInfo(frozenset([i]), TokenCount(node, x.start or 0))
        return None

    def _may_begin(self, start: int) -> bool:
        """Whether the rank's first token may have this position, or a smaller one (tables begin with a few other rows)."""
        return any(first is not None and start >= first for first in self.starts)

    def _pooled(self, node: Node, name: str, info: TokenInfo) -> TokenInfo:
        """With what is known of reductions over tokens, which matter where they come back to tokens."""
        x = first_input(node)
        if self._gathers(node, name):
            return info._replace(pooled=node)
        reduces = x is not None and name in REDUCTIONS and not is_elementwise(node, name)
        if reduces and self.infos[x].dims and self.infos[x].made is None:  # fmt: skip
            gone, _ = reduced(node, name, tensor_of(x).dim())
            over = gone & self.infos[x].dims
            # Integers are sums of masks and experts' numbers of tokens, which say where rows go and not what is in them.
            if over and (_is_data(x) or name in _EXTREMES):
                is_position = name in ("max", "amax") and not _is_data(x)
                return info._replace(pooled=node, largest=self.total - 1 if is_position else None)
        given = [y for y in node.all_input_nodes if self.infos[y].pooled is not None]
        if not given:
            return info
        cause, largest = self.infos[given[0]].pooled, self.infos[given[0]].largest
        if info.dims:
            self._refuse(
                node, cause,
                f"a reduction over tokens that comes back to each of them, and of which a rank has its own alone: {_REMEDY} "
                "(a rotary embedding that follows from the longest position, rope_type 'longrope' or 'dynamic': one that does not)",
            )  # fmt: skip
        number = next((y for y in node.args if isinstance(y, int)), None)
        if largest is not None and number is not None and len(node.args) == 2:
            if name == "add":
                return info._replace(pooled=cause, largest=largest + number)
            if name == "gt" and node.args[0] is given[0] and largest <= number:
                return info  # false on all ranks
        return info._replace(pooled=cause)

    def _gathers(self, node: Node, name: str) -> bool:
        """Whether rows of tokens are added up in fewer rows than there are tokens; experts' rows go back to as many."""
        if name not in _SUMS:
            return False
        dim, source = argument(node, 1, "dim"), argument(node, 3, "source", "src")
        if not isinstance(source, Node) or not _is_data(source):
            return False
        out = tensor_of(node)
        along = dim % out.dim()
        return along in self.infos[source].dims and not statically_true(out.shape[along] % self.length == 0)  # fmt: skip


_REMEDY = (
    "take a model that works token by token but for attention, or its eager form on one process"
)

_LABELS = (
    "labels that are shifted within this rank's part, whose last one is another rank's: shift labels before they are sharded, "
    "and compute the loss of the logits or give what is shifted as shift_labels beside labels"
)


def _first_positions(
    shards: SequenceShards, context: ContextParallel
) -> tuple[int | None, int | None]:
    """Where this rank's tokens begin, in the sequence and in its document; None where they are no single run."""
    rank, starts = context.rank, []
    kinds = [shards.positions(rank)]
    if context.documents:
        kinds.append(shards.positions(rank, cu_seqlens=context.documents))
    for x in kinds:
        is_run = x.numel() == 0 or bool((x.diff() == 1).all())
        starts.append((int(x[0]) if x.numel() else 0) if is_run else None)
    return tuple(starts)


def _moved_start(node: Node, name: str, count: TokenCount, counted: Node) -> TokenCount | None:
    """What is left of a count behind an operation with numbers or the module's tensors alone."""
    if name not in ("add", "iadd", "sub", "isub"):
        return count
    others = [x for x in (*node.args, *node.kwargs.values()) if x is not counted]
    if any(isinstance(x, Node) and not _is_of_module(x) for x in others):
        return None  # where the caller says that tokens begin
    sign = 1 if name in ("add", "iadd") else -1
    return count._replace(start=count.start + sign * sum(x for x in others if isinstance(x, int)))


def _is_data(node: Node) -> bool:
    x = tensor_of(node)
    return x is not None and (x.is_floating_point() or x.is_complex())


def _is_mask(node: Node) -> bool:
    x = tensor_of(node)
    return x is not None and x.dtype == torch.bool


def _is_of_module(node: object) -> bool:
    """Whether an input is a parameter or buffer of a module's."""
    if not isinstance(node, Node) or node.op == "get_attr":
        return isinstance(node, Node)
    if node.op != "placeholder":
        return False
    source = getattr(node.meta.get("grapharg"), "source", None)
    return is_parameter(node) or "NN_MODULE" in getattr(
        getattr(source, "guard_source", None), "name", ""
    )


def _is_constant(node: Node) -> bool:
    """Whether a buffer holds one integer throughout, as the kinds of tokens that a model is not told."""
    x = getattr(node.meta.get("grapharg"), "example", None)
    if x is None or value(node).is_floating_point() or type(x) is not torch.Tensor:
        return False
    return bool((x == x.flatten()[0]).all()) if x.numel() else True
