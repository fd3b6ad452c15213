"""What ranks compile is compared between them when a graph runs, and what one refuses to compile the others raise.

Compilations are no collectives: ranks may compile at different times, and find different graphs in their caches. Runs of
graphs whose attention goes over the ranks are. So ranks compare at each run on CPUs and, as for eager calls, at the first
run of such attention on GPUs (`check_equal_on_all_ranks`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from torch_fdattn.compile_backend.report import UnsupportedAttention
from torch_fdattn.dist.consensus import check_equal_on_all_ranks, empty_of_group, tell_refusal

#: Which dims of a tensor are the same on all ranks; of others the dtype.
_DIMS = {"q": (0, 1, 3), "k": (0, 1, 3), "v": (0, 1, 3), "k_shard": (1, 3), "v_shard": (1, 3)}
#: Arguments that are a rank's own.
_OWN = ("rank", "group_name", "inner_group", "outer_group")


@contextlib.contextmanager
def refusing_on_all_ranks(group_name: str, inputs: Sequence[Any]) -> Iterator[None]:
    """What is refused inside it, while a graph of these inputs is compiled, the other ranks raise where they run theirs."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError, UnsupportedAttention) as error:
        told = error
        if isinstance(error, UnsupportedAttention):
            told = NotImplementedError(str(error))
        with tracing(None), unset_fake_temporarily():
            tell_refusal(group_name, _like(group_name, inputs), told)
        raise


def comparing(
    compiled: Callable[..., Any], gm: GraphModule, inputs: list[Any], group_name: str
) -> Callable[..., Any]:
    """The same function of the inputs of a rewritten graph, which raises on all ranks where their attention differs."""
    calls = _Calls(gm)
    if not calls.described:
        return compiled
    trained = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    like = _like(group_name, inputs)

    def run(*given: Any) -> Any:
        values = calls.values(given)
        values["whether gradients of a compiled graph are wanted"] = (
            trained and torch.is_grad_enabled()
        )
        check_equal_on_all_ranks(group_name, like, values)
        return compiled(*given)

    return run


def _like(group_name: str, inputs: Sequence[Any]) -> Tensor:
    """On the device of the first input that is not on the CPU, or else there: a rank that refuses a graph, and knows
    of none of its attention, must come to the same collective as those that run theirs.
    """
    devices = [x.device for x in inputs if isinstance(x, Tensor)]
    if not devices:
        return empty_of_group(group_name)
    device = next((x for x in devices if x.type != "cpu"), devices[0])
    with tracing(None), unset_fake_temporarily():
        return torch.empty(0, device=device)


class _Calls:
    """The attention of a graph that goes over ranks: distinct calls, each once, and in which order they come."""

    def __init__(self, gm: GraphModule) -> None:
        ops = {getattr(torch.ops.fdattn, x).default: x for x in ("ring_attention", "dist_decode")}
        self.described: list[dict[str, object]] = []
        self.order: list[int] = []
        for graph in gm.modules():
            for node in graph.graph.nodes if isinstance(graph, GraphModule) else ():
                if node.op == "call_function" and node.target in ops:
                    self._add(node, ops[node.target])
        inputs = (x for x in gm.graph.nodes if x.op == "placeholder")
        #: where a run is given the sizes that this graph leaves open
        self._places = {
            shape.node.expr: place
            for place, node in enumerate(inputs)
            if isinstance(shape := node.meta.get("example_value"), SymInt)
        }
        self._known: dict[tuple, dict[str, object]] = {}

    def _add(self, node: Node, op: str) -> None:
        names = (x.name for x in getattr(torch.ops.fdattn, op).default._schema.arguments)
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        call: dict[str, object] = {"op": op}
        for name, x in given.items():
            if name not in _OWN:
                x = x.meta.get("example_value") if isinstance(x, Node) else x
                call[name] = self._described(name, x)
        if call not in self.described:
            self.described.append(call)
        self.order.append(self.described.index(call))

    def _described(self, name: str, x: object) -> object:
        if isinstance(x, Tensor):
            dims = (dim for dim in _DIMS.get(name, ()) if dim < x.dim())
            return (str(x.dtype), *(self._described(name, x.shape[dim]) for dim in dims))
        if isinstance(x, (list, tuple)):
            return tuple(self._described(name, each) for each in x)
        if isinstance(x, Node):
            return self._described(name, x.meta.get("example_value"))
        return x.node.expr if isinstance(x, SymInt) else x  # which to compare adds no guard

    def values(self, given: tuple) -> dict[str, object]:
        """What all ranks must have of a run with these inputs."""
        sizes = tuple(given[place] for place in self._places.values())
        found = self._known.get(sizes)
        if found is None:
            numbers = dict(zip(self._places, map(sympy.Integer, sizes), strict=True))
            found = {"a compiled graph's attention": tuple(self.order)}
            for i, call in enumerate(self.described):
                for name, x in call.items():
                    text = f"{name} of attention {i} in a compiled graph"
                    found[text] = _with_numbers(x, numbers)
            self._known[sizes] = found
        return dict(found)


def _with_numbers(x: object, numbers: dict) -> object:
    """Open sizes as numbers; None for one that no input is given for."""
    if isinstance(x, tuple):
        return tuple(_with_numbers(each, numbers) for each in x)
    if not isinstance(x, sympy.Expr):
        return x
    number = x.xreplace(numbers)
    return int(number) if number.is_number else None
