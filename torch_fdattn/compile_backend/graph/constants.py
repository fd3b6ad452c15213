"""Tensors that a graph makes from nothing: `torch.tril(torch.ones(64, 64))` and what is computed from it.

They are the same at every call, so they may be looked at when the graph is compiled. A mask that is an input,
a buffer included, may change and is never looked at; neither is one whose size is symbolic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from torch_fdattn.compile_backend.graph.mutations import written_between
from torch_fdattn.compile_backend.graph.nodes import op_name, value

#: Operations without randomness, side effects or anything from outside; none of them writes in place.
_PURE = {
    "abs", "add", "arange", "bfloat16", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor",
    "bool", "broadcast_to", "cat", "clone", "contiguous", "cumsum", "detach", "diff", "div",
    "double", "eq", "expand", "expand_as", "eye", "flatten", "float", "full", "full_like", "ge",
    "getitem", "gt", "half", "int", "le", "logical_and", "logical_not", "logical_or", "long",
    "lt", "masked_fill", "mT", "mul", "ne", "neg", "new_full", "new_ones", "new_zeros", "ones",
    "ones_like", "permute", "pow", "repeat", "reshape", "rsqrt", "sqrt", "squeeze", "sub", "T",
    "tensor", "to", "transpose", "tril", "triu", "type", "type_as", "unflatten", "unsqueeze",
    "view", "where", "zeros", "zeros_like",
}  # fmt: skip
#: A causal mask of 8192 × 8192 in float32 is 256 MiB, and takes a tenth of a second to look at.
MAX_ELEMENTS = 2**26


class NotConstant(Exception):
    pass


def constant(node: Node) -> tuple[Tensor, list[Node]] | None:
    """(the tensor on the CPU, the nodes that make it), or None where it is not known before the call.

    Whether something writes into one of these nodes before it is used is for the caller to ask.
    """
    results: dict[Node, object] = {}
    try:
        with (
            _disable_current_modes(), torch.device("cpu"), torch.no_grad(),
            torch.autocast("cpu", enabled=False),
        ):  # fmt: skip
            result = _evaluate(node, results)
    except (NotConstant, RuntimeError, TypeError, IndexError):
        return None
    if not isinstance(result, Tensor):
        return None
    order = {each: i for i, each in enumerate(node.graph.nodes)}
    return result, sorted(results, key=order.__getitem__)


def number(factor: object) -> float | None:
    """A number that the graph holds: as it is, or as a tensor of one element made from it."""
    if isinstance(factor, (int, float)) and not isinstance(factor, bool):
        return float(factor)
    if isinstance(factor, Node) and isinstance(value(factor), Tensor) and value(factor).dim() == 0:
        found = constant(factor)
        if found is None or found[0].dtype == torch.bool or found[0].is_complex():
            return None
        last = next(iter(reversed(factor.graph.nodes)))
        if written_between(found[1][0], last, found[1]) is None:
            return float(found[0])
    return None


def _evaluate(node: Node, results: dict[Node, object]) -> object:
    if node in results:
        return results[node]
    if op_name(node) not in _PURE or not isinstance(value(node), Tensor):
        raise NotConstant
    size = 1
    for length in value(node).shape:
        if not isinstance(length, int):
            raise NotConstant
        size *= length
    if size > MAX_ELEMENTS:
        raise NotConstant
    args, kwargs = (
        map_aggregate(map_arg(given, lambda x: _evaluate(x, results)), _on_the_cpu)
        for given in (node.args, node.kwargs)
    )  # fmt: skip
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    if node.op == "call_method":
        result = getattr(args[0], node.target)(*args[1:], **kwargs)
    else:
        result = node.target(*args, **kwargs)
    results[node] = result
    return result


def _on_the_cpu(argument: object) -> object:
    if isinstance(argument, torch.device) or (
        isinstance(argument, str) and argument.startswith(("cuda", "cpu"))
    ):
        return torch.device("cpu")
    return argument
