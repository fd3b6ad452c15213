"""A softmax written out: exp, and a division by its sum; or exp of what logsumexp was taken from."""

from __future__ import annotations

from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import op_name

#: On the way from exp to its sum, and from there to a division.
_BETWEEN = {
    "add", "bfloat16", "clamp", "clamp_min", "contiguous", "dropout", "expand", "expand_as", "float",
    "getitem", "half", "iadd", "imul", "masked_fill", "maximum", "mul", "to", "type_as", "unsqueeze", "where",
}  # fmt: skip
_DIVISIONS = {"div", "div_", "itruediv"}


def dim_of_sum(exp: Node) -> int | None:
    """The dim over which the numbers of an exp sum to one; None where none is known."""
    (source,) = exp.all_input_nodes[:1]
    for x in source.all_input_nodes if op_name(source) == "sub" else ():
        while op_name(x) in _BETWEEN and x.all_input_nodes:
            x = x.all_input_nodes[0]
        if op_name(x) == "logsumexp":
            return _dim(x)
    for total in _reached(exp, {"sum"}):
        for division in _reached(total, _DIVISIONS | {"reciprocal"}):
            divisor = division.args[-1]
            if op_name(division) == "reciprocal" or divisor in (total, *_passed(total)):
                return _dim(total)
    return None


def _dim(node: Node) -> int | None:
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return dim if isinstance(dim, int) else None


def _passed(start: Node) -> list[Node]:
    found = [start]
    for node in found:
        found += [x for x in node.users if op_name(x) in _BETWEEN and x not in found]
    return found


def _reached(start: Node, names: set[str]) -> list[Node]:
    return [x for node in _passed(start) for x in node.users if op_name(x) in names]
