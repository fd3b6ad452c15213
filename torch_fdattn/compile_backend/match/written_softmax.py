"""A softmax written out: a power, and a division by its sum over a dim; or exp of what logsumexp was taken from.

Each may be written in place, and the number that is divided by may be a norm, or a product with ones.
"""

from __future__ import annotations

from torch.fx import Node

from torch_fdattn.compile_backend.graph.dims import einsum_labels
from torch_fdattn.compile_backend.graph.mutations import readers_behind, storages, writes
from torch_fdattn.compile_backend.graph.nodes import is_tensor, op_name, value

#: The operations that make weights of scores; `pow` of a number.
POWERS = ("exp", "exp2", "exp2_", "exp_", "pow")
#: On the way from a power to its sum, and from there to a division.
_BETWEEN = {
    "add", "add_", "bfloat16", "clamp", "clamp_", "clamp_min", "clamp_min_", "contiguous", "dropout",
    "expand", "expand_as", "float", "getitem", "half", "iadd", "imul", "masked_fill", "masked_fill_",
    "maximum", "mul", "mul_", "to", "type_as", "unsqueeze", "where",
}  # fmt: skip
_SUBTRACTIONS_IN_PLACE = {"isub", "sub_", "subtract_"}
_SUBTRACTIONS = {"sub", *_SUBTRACTIONS_IN_PLACE}
_DIVISIONS = {"div", "div_", "divide_", "itruediv", "true_divide_"}
_RECIPROCALS = {"reciprocal", "reciprocal_"}
_NORMS = {"norm", "vector_norm"}
_TOTALS = {"bmm", "einsum", "matmul", "mm", "mv", "normalize", "sum", *_NORMS}
_ONES = {"new_ones", "ones", "ones_like"}


def dim_of_sum(power: Node) -> int | None:
    """The dim over which the numbers of a power sum to one; None where none is known."""
    source = _exponent(power)
    if source is None:
        return None
    written = (x for x in source.users if op_name(x) in _SUBTRACTIONS_IN_PLACE)
    for difference in (source, *written):
        for x in difference.all_input_nodes if op_name(difference) in _SUBTRACTIONS else ():
            while op_name(x) in _BETWEEN and x.all_input_nodes:
                x = x.all_input_nodes[0]
            if op_name(x) == "logsumexp":
                return _dim(x)
    for total in _reached(power, _TOTALS):
        dim = _dim_of_total(total)
        if dim is None:
            continue
        if op_name(total) == "normalize":
            return dim
        for division in _reached(total, _DIVISIONS | _RECIPROCALS):
            divisor = division.args[-1]
            if op_name(division) in _RECIPROCALS or divisor in (total, *_passed(total)):
                return dim
    return None


def _exponent(power: Node) -> Node | None:
    """What a number is raised to; None where it is not a number that is raised."""
    if op_name(power) != "pow":
        return power.all_input_nodes[0]
    base, source = [*power.args, *power.kwargs.values()][:2]
    is_number = not is_tensor(base) or value(base).dim() == 0
    return source if is_number and is_tensor(source) and value(source).dim() else None


def _dim_of_total(total: Node) -> int | None:
    """The dim over which a node sums numbers that are not negative; None where it does something else."""
    name, args = op_name(total), total.args
    if name == "sum":
        return _dim(total)
    if name == "normalize" or name in _NORMS:
        order = total.kwargs.get("p", total.kwargs.get("ord", args[1] if len(args) > 1 else 2))
        default = 1 if name == "normalize" else None
        return _dim(total, 2, default) if order == 1 else None
    if name == "einsum":
        return _dim_of_einsum(total)
    of_ones = op_name(args[-1]) in _ONES and len(args) == 2
    return -1 if of_ones else None


def _dim_of_einsum(total: Node) -> int | None:
    """As of `bqk->bq`, which is a sum, or of `bqk,k->bq` with ones."""
    equation, *operands = total.args
    parsed = einsum_labels(total)
    if parsed is not None:
        given, of_ones, out = parsed[1]
        gone = {*of_ones} - {*out}
        is_sum = op_name(parsed[0][1]) in _ONES and {*given} - {*out} == gone
    else:
        given, _, out = str(equation).replace(" ", "").partition("->")
        gone, is_sum = {*given} - {*out}, "," not in given and "." not in given
    return given.index(*gone) if is_sum and len(gone) == 1 and operands else None


def _dim(node: Node, position: int = 1, default: int | None = None) -> int | None:
    given = node.args[position] if len(node.args) > position else default
    dim = node.kwargs.get("dim", given)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return dim if isinstance(dim, int) else None


def _readers(node: Node) -> list[Node]:
    """What is given a node's numbers: where it writes in place, by whatever name."""
    behind = readers_behind(node, storages([node])) if writes(node) else ()
    return [*dict.fromkeys([*node.users, *behind])]


def _passed(start: Node) -> list[Node]:
    found = [start]
    for node in found:
        found += [x for x in _readers(node) if op_name(x) in _BETWEEN and x not in found]
    return found


def _reached(start: Node, names: set[str]) -> list[Node]:
    return [x for node in _passed(start) for x in _readers(node) if op_name(x) in names]
