"""Where a graph's data comes from and goes to: through writes in place, and into the graphs that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from torch_fdattn.compile_backend.graph.mutations import readers_behind, storages, writes
from torch_fdattn.compile_backend.graph.nodes import is_tensor
from torch_fdattn.compile_backend.graph.parameters import is_parameter


class DataFlow:
    """Of a graph and all graphs that it calls (activation checkpointing, `torch.cond`)."""

    def __init__(self, root: GraphModule) -> None:
        self.graphs = [x.graph for x in root.modules() if isinstance(x, GraphModule)]
        self._called: dict[Node, list[Graph]] = {}  #: the graphs that a node calls
        self._callers: dict[Graph, Node] = {}
        for graph in self.graphs:
            for node in graph.nodes:
                for x in node.all_input_nodes if node.op == "call_function" else ():
                    child = _child(x)
                    if child is not None:
                        self._called.setdefault(node, []).append(child)
                        self._callers[child] = node

    def caller(self, node: Node) -> Node | None:
        """The node that calls the graph in which a node stands; None of the outermost one."""
        return self._callers.get(node.graph)

    def called(self, node: Node) -> list[Graph]:
        """The graphs that a node calls."""
        return self._called.get(node, [])

    def is_written(self, node: Node, until: Node) -> bool:
        """Whether what a node yields may be written into before another node of its graph, by a graph that is called, too."""
        watched, each = storages([node]), node
        while each is not until:
            if self._writes(each) and watched & storages([*each.all_input_nodes, each]):
                return True
            each = each.next
        return False

    def _writes(self, node: Node) -> bool:
        called = self._called.get(node)
        if called is None:
            return node in self._writers
        return any(self._writes(x) for graph in called for x in graph.nodes)

    def sources(self, node: Node) -> list[Node]:
        """What a node's data comes from: its inputs, and what wrote into it."""
        if node.op == "placeholder":
            return self._given(node)
        if node.op == "get_attr":
            return []
        if node in self._called:
            return [x for graph in self._called[node] for x in graph.output_node().all_input_nodes]
        own = storages([node]) if self._writers else set()
        return [*node.all_input_nodes, *(x for x, into in self._writers.items() if own & into)]

    def users(self, node: Node) -> list[Node]:
        """What a node's data goes into: its users, and what reads later what it was written into."""
        found: list[Node] = []
        written = self._writers.get(node, set())
        for user in [*node.users, *(readers_behind(node, written) if written else ())]:
            if user in self._called:
                inputs = (x for graph in self._called[user] for x in _placeholders(graph))
                given = ((x, self._given(x)) for x in inputs)
                found += [x for x, from_ in given if node in from_ or written & storages(from_)]
            elif user.op == "output":
                found += [self._callers[user.graph]] if user.graph in self._callers else []
            else:
                found.append(user)
        if node in self._writers:  # of some it is not known what else they write into
            found += [x for x in node.all_input_nodes if not written & storages([x])]
        return found

    def is_made_of_parameters(self, node: Node) -> bool:
        """Whether no tensor that the graph is given but parameters reaches it."""
        inputs = (x for x in self.all_sources(node) if x.op in ("placeholder", "get_attr"))
        return all(is_parameter(x) or not is_tensor(x) or x.graph in self._callers for x in inputs)

    def all_sources(self, node: Node) -> Iterator[Node]:
        """A node and all that its data comes from."""
        seen, waiting = {node}, [node]
        while waiting:
            yield (last := waiting.pop())
            for source in self.sources(last):
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)

    def _given(self, placeholder: Node) -> list[Node]:
        """What the caller gives for an input: one node, or all where it does not say which."""
        call = self._callers.get(placeholder.graph)
        if call is None:
            return []
        leaves = tree_leaves((call.args, call.kwargs))
        first = 1 + max(i for i, x in enumerate(leaves) if _child(x) is not None)
        inputs = list(_placeholders(placeholder.graph))
        given = leaves[first:][: len(inputs)]
        if len(given) < len(inputs):
            return [x for x in call.all_input_nodes if _child(x) is None]
        found = given[inputs.index(placeholder)]
        return [found] if isinstance(found, Node) else []

    @cached_property
    def _writers(self) -> dict[Node, set]:
        """Nodes that write in place, with the storages that they may write into."""
        return {
            x: storages([*x.all_input_nodes[:1], x.kwargs.get("out")])
            for graph in self.graphs
            for x in graph.nodes
            if x not in self._called and writes(x)
        }


def _child(node: object) -> Graph | None:
    """The graph that a node holds."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    found = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found.graph if isinstance(found, torch.fx.GraphModule) else None


def _placeholders(graph: Graph) -> list[Node]:
    return [x for x in graph.nodes if x.op == "placeholder"]
