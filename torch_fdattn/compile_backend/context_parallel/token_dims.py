"""Which dims of a graph's tensors run over the rank's tokens, operation by operation.

Dims are followed from the inputs, so that a hidden size which happens to equal the number of tokens is no such dim. A
rule is needed only for what moves dims; all else keeps those of its inputs, aligned as broadcasting aligns them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import op_name, statically_true, value

NO_DIMS: frozenset[int] = frozenset()
#: Where functions are named as torch names them.
_TORCH = ("torch", "_operator", "builtins", "math", "aten", "prims")
_SPELLINGS = {"moveaxis": "movedim", "reshape_as": "reshape", "view_as": "reshape", "t": "mT", "T": "mT", "mH": "mT", "H": "mT"}  # fmt: skip
_RESHAPES = {"reshape", "view", "flatten", "unflatten", "ravel"}
MATMULS = {"matmul", "bmm", "mm", "mv", "addmm", "addbmm", "baddbmm", "imatmul"}
REDUCTIONS = {
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "linalg_matrix_norm", "linalg_norm", "logsumexp",
    "max", "mean", "median", "min", "mode", "nanmean", "nanmedian", "nanquantile", "nansum", "norm", "prod", "quantile",
    "special_logsumexp", "std", "std_mean", "sum", "var", "var_mean", "vector_norm",
}  # fmt: skip
#: Where a reduction's dim stands, if not behind the tensor.
_DIM_AT = {
    "linalg_matrix_norm": 2, "linalg_norm": 2, "nanquantile": 2, "norm": 2, "quantile": 2, "vector_norm": 2,
}  # fmt: skip
#: Of a dim that is not given, where that is not all of them.
_REDUCED = {"linalg_matrix_norm": (-2, -1), "mode": -1}
#: Of the first input alone; what is given besides has another meaning.
_OF_FIRST = {
    "argsort", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "cumsum", "fill_", "index_select", "layer_norm", "linear", "narrow",
    "one_hot", "repeat_interleave", "rms_norm", "split", "tensor_split", "chunk", "topk", "unfold", "view_as_complex", "view_as_real",
    "pad", "to",
}  # fmt: skip
#: Tensors that hold nothing of their input.
_FRESH = {
    "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like", "zeros_like",
}  # fmt: skip
_SCATTERS = {
    "index_add", "index_copy", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce", "setitem",
}  # fmt: skip


class TokenCount(NamedTuple):
    """Numbers that count this rank's tokens, which the graph makes itself."""

    node: Node
    start: int  #: of the first token


class TokenInfo(NamedTuple):
    """What is known of a tensor, or of each of a tuple."""

    dims: frozenset[int] = NO_DIMS  #: that run over tokens
    made: TokenCount | None = None  #: its numbers over tokens follow from no input
    pooled: Node | None = None  #: the reduction over tokens that it depends on
    largest: int | None = (
        None  #: which number, the largest of positions, is never exceeded on any rank
    )


def operation(node: Node) -> str:
    """The name of torch's operation, without the underscore of writes in place; "" of what is none of torch's."""
    if node.op == "call_method":
        name = node.target
    elif node.op == "call_function":
        module = getattr(node.target, "__module__", None) or "torch"
        if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            module = str(node.target).partition(".")[0]
        named = module.partition(".")[0] in _TORCH
        packet = getattr(node.target, "overloadpacket", node.target)
        name = op_name(node) or (getattr(packet, "__name__", "") if named else "")
    else:
        return ""
    name = op_name(node) or name
    if not name.startswith("_"):
        name = name.rstrip("_")
    return _SPELLINGS.get(name, name)


def tensor_of(node: object) -> Tensor | None:
    """What a node yields, or the first of several."""
    fake = value(node) if isinstance(node, Node) else None
    if isinstance(fake, (tuple, list)):
        fake = next((x for x in fake if isinstance(x, Tensor)), None)
    return fake if isinstance(fake, Tensor) else None


def argument(node: Node, position: int, *names: str, default: Any = None) -> Any:
    """A call's argument by position, counted with the tensor, or by one of its names."""
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[x] for x in names if x in node.kwargs), default)


def numbers(given: object, rank: int) -> frozenset[int]:
    """Dims that a call names, counted from the front; all where it names none."""
    if given is None:
        return frozenset(range(rank))
    found = given if isinstance(given, (tuple, list)) else [given]
    return frozenset(x % rank for x in found if isinstance(x, int) and rank)


def reduced(node: Node, name: str, rank: int) -> tuple[frozenset[int], bool]:
    """The dims that a reduction takes away, and whether they stay with size 1."""
    position = _DIM_AT.get(name, 1)
    dim = argument(node, position, "dim", "axis", default=_REDUCED.get(name))
    keeps = bool(argument(node, position + 1, "keepdim", "keepdims", default=False))
    return numbers(dim if not isinstance(dim, Node) else None, rank), keeps


def is_elementwise(node: Node, name: str) -> bool:
    """Whether `max` or `min` is of two tensors, entry by entry, and no reduction."""
    return name in ("max", "min") and tensor_of(argument(node, 1, "other")) is not None


def first_input(node: Node) -> Node | None:
    given = [*node.args[:1], *(node.kwargs.get(x) for x in ("input", "self"))]
    return next((x for x in given if isinstance(x, Node)), None)


def dims_of(node: Node, name: str, infos: dict[Node, TokenInfo], length: object) -> frozenset[int]:
    """The dims of what a node yields that run over tokens."""
    out, x = tensor_of(node), first_input(node)
    if out is None or name in _FRESH:
        return NO_DIMS
    dims = infos[x].dims if x is not None else NO_DIMS
    shape = [] if tensor_of(x) is None else list(tensor_of(x).shape)
    moved = _moved(node, name, dims, shape, out)
    if moved is None:
        moved = _combined(node, name, dims, shape, infos, out, length)
    return frozenset(dim for dim in moved if 0 <= dim < out.dim())


def _moved(
    node: Node, name: str, dims: frozenset[int], shape: list, out: Tensor
) -> frozenset[int] | None:
    """Of operations that move dims of one tensor; None of others."""
    rank = len(shape)
    if name == "getitem":
        return _indexed(node, dims, rank)
    if name in _RESHAPES:
        return reshaped(dims, shape, list(out.shape))
    if name in ("transpose", "mT"):
        last = (rank - 2, rank - 1)
        first, second = last if name == "mT" else (
            argument(node, 1, "dim0", "axis0") % rank, argument(node, 2, "dim1", "axis1") % rank
        )  # fmt: skip
        swap = {first: second, second: first}
        return frozenset(swap.get(x, x) for x in dims)
    if name in ("permute", "movedim"):
        order = _order(node, name, rank)
        return frozenset(i for i, x in enumerate(order) if x in dims)
    if name == "unsqueeze":
        at = argument(node, 1, "dim") % (rank + 1)
        return frozenset(x + (x >= at) for x in dims)
    if name == "squeeze":
        given = argument(node, 1, "dim")
        gone = {x for x in numbers(given, rank) if statically_true(shape[x] == 1)}
        return _without(dims, gone)
    if name in ("select", "unbind"):
        return _without(dims, numbers(argument(node, 1, "dim", default=0), rank))
    if name in ("repeat", "tile", "expand", "broadcast_to"):
        return frozenset(x + out.dim() - rank for x in dims)
    if name in REDUCTIONS and not is_elementwise(node, name):
        gone, keeps = reduced(node, name, rank)
        return dims - gone if keeps else _without(dims, gone)
    return dims if name in _OF_FIRST else None


def _combined(
    node: Node, name: str, dims: frozenset[int], shape: list, infos: dict[Node, TokenInfo], out: Tensor, length: object
) -> frozenset[int]:  # fmt: skip
    """Of operations over several tensors."""
    if name == "embedding":
        index = argument(node, 0, "input")
        return infos[index].dims if isinstance(index, Node) else NO_DIMS
    if name in _SCATTERS:
        return dims or frozenset(i for i, x in enumerate(out.shape) if statically_true(x == length))
    if name == "gather":
        index = argument(node, 2, "index")
        return infos[index].dims if isinstance(index, Node) else NO_DIMS
    if name in MATMULS:
        left, right = factors(node, name)
        rows = from_right(left, infos) - {-1}
        if tensor_of(right).dim() == 1:  # the last dim goes
            return frozenset(x + 1 + out.dim() for x in rows)
        return frozenset(x + out.dim() for x in rows | (from_right(right, infos) - {-2}))
    if name == "einsum":
        return _einsum(node, infos, out.dim())
    if name in ("stack", "cat"):
        parts = [x for x in joined(node) if isinstance(x, Node)]
        found = frozenset().union(*(infos[x].dims for x in parts))
        if name == "cat":
            return found
        at = argument(node, 1, "dim", default=0) % out.dim()
        return frozenset(x + (x >= at) for x in found)
    found: set[int] = set()
    for x in node.all_input_nodes:
        given = tensor_of(x)
        if given is not None and infos[x].dims:
            found |= _aligned(infos[x].dims, list(given.shape), list(out.shape), length)
    return frozenset(found)


def factors(node: Node, name: str) -> tuple[object, object]:
    """What a matrix product multiplies."""
    first = 1 if name in ("addmm", "addbmm", "baddbmm") else 0
    names = ("mat1", "batch1") if first else ("input", "a")
    return argument(node, first, *names), argument(
        node, first + 1, "mat2", "batch2", "other", "tensor2", "vec", "b"
    )


def joined(node: Node) -> Sequence[object]:
    """What is concatenated, or stacked."""
    return argument(node, 0, "tensors", default=())


def from_right(node: object, infos: dict[Node, TokenInfo]) -> set[int]:
    """A tensor's dims over tokens, counted from its end: -1 is the last."""
    given = tensor_of(node)
    return set() if given is None else {x - given.dim() for x in infos[node].dims}


def _aligned(dims: frozenset[int], shape: list, out: list, length: object) -> set[int]:
    """Dims of an input in what an operation without a rule yields."""
    extra = len(out) - len(shape)
    pairs = list(zip(shape, out[extra:], strict=True)) if extra >= 0 else []
    if pairs and all(statically_true(x == y) or statically_true(x == 1) for x, y in pairs):
        return {x + extra for x in dims}
    kept = {x for x in dims if x < len(out) and statically_true(shape[x] == out[x])}
    if kept:
        return kept
    return {i for i, x in enumerate(out) if statically_true(x == length)}


def _without(dims: frozenset[int], gone: Any) -> frozenset[int]:
    return frozenset(x - sum(y < x for y in gone) for x in dims if x not in gone)


def _order(node: Node, name: str, rank: int) -> list[int]:
    given = node.args[1:] or (node.kwargs.get("dims"),)
    if name == "permute":
        order = given[0] if isinstance(given[0], (tuple, list)) else given
        return [x % rank for x in order]
    source, target = (
        [x % rank for x in (y if isinstance(y, (tuple, list)) else [y])]
        for y in (argument(node, 1, "source"), argument(node, 2, "destination"))
    )
    rest = iter(x for x in range(rank) if x not in source)
    return [source[target.index(i)] if i in target else next(rest) for i in range(rank)]


def index_entries(node: Node, rank: int) -> list[tuple[object, int | None]]:
    """(entry, the dim that it indexes, None of a new one) of x[…]; an ellipsis is the slices that it stands for."""
    index = node.args[1] if isinstance(node.args[1], (tuple, list)) else (node.args[1],)
    taken = sum(x is not None and x is not Ellipsis for x in index)
    whole: list[object] = []
    for x in index if Ellipsis in [y for y in index if not isinstance(y, Node)] else (*index, Ellipsis):  # fmt: skip
        whole += [slice(None)] * (rank - taken) if x is Ellipsis else [x]
    found, dim = [], 0
    for x in whole:
        found.append((x, None if x is None else dim))
        dim += x is not None
    return found


def _indexed(node: Node, dims: frozenset[int], rank: int) -> frozenset[int]:
    if isinstance(value(node.args[0]), (tuple, list)):
        return dims
    entries = index_entries(node, rank)
    places: list[int | None] = []
    for x, dim in entries:
        if x is None or isinstance(x, slice):
            places.append(dim)
        elif isinstance(x, Node) and tensor_of(x) is not None:
            return NO_DIMS  # any tokens, in any order
    return frozenset(i for i, dim in enumerate(places) if dim in dims)


def reshaped(dims: frozenset[int], shape: list, out: list) -> frozenset[int]:
    """Dims that hold what these held: those between the same products of sizes."""
    found: set[int] = set()
    for sources, targets in _groups(shape, out):
        held = [x for x in sources if x in dims]
        if not held:
            continue
        if len(sources) == 1 or len(targets) == 1 or len(held) == len(sources):
            found.update(x for x in targets if len(targets) == 1 or not statically_true(out[x] == 1))  # fmt: skip
        else:  # sizes are regrouped: all of them may hold tokens
            found.update(targets)
    return frozenset(found)


def _groups(shape: list, out: list) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest runs of dims of both shapes with equal products."""
    i = j = 0
    while i < len(shape) or j < len(out):
        sources, targets = [i] if i < len(shape) else [], [j] if j < len(out) else []
        a, b = shape[i] if sources else 1, out[j] if targets else 1
        i, j = i + len(sources), j + len(targets)
        while not statically_true(a == b):
            if i < len(shape) and (_divides(a, b) or j >= len(out)):
                sources, a, i = [*sources, i], a * shape[i], i + 1
            elif j < len(out):
                targets, b, j = [*targets, j], b * out[j], j + 1
            else:
                break
        yield sources, targets


def _divides(a: Any, b: Any) -> bool:
    """Whether a product a may grow to b; of open sizes, too."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b or (b == 0 and a != 0)
    return statically_true(b % a == 0)


def _einsum(node: Node, infos: dict[Node, TokenInfo], rank: int) -> frozenset[int]:
    labels, out = einsum_labels(node)
    found = {
        label
        for x, own in labels
        for label in (own[dim] for dim in infos[x].dims if dim < len(own))
    }
    return frozenset(i for i, label in enumerate(out[:rank]) if label in found)


def einsum_labels(node: Node) -> tuple[list[tuple[Node, list[str]]], list[str]]:
    """A label for each dim of each operand, and of the result; an ellipsis's are numbers from its end."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    left, _, right = equation.replace(" ", "").partition("->")
    found = [
        (x, _spread(text, tensor_of(x).dim()))
        for x, text in zip(operands, left.split(","), strict=True)
    ]
    if "->" not in equation:
        letters = left.replace(",", "").replace(".", "")
        right = "".join(x for x in sorted(set(letters)) if letters.count(x) == 1)
    return found, _spread(right, tensor_of(node).dim())


def _spread(text: str, rank: int) -> list[str]:
    before, dots, behind = text.partition("...")
    count = rank - len(before) - len(behind) if dots else 0
    return [*before, *(str(i) for i in reversed(range(count))), *behind]
