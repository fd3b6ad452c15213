"""Finds matmuls next to collectives in ATen graphs: what `emit.py` then makes one op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.compile_backend.tensor_parallel.rows import sources, value, width
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.tensor_parallel.one_sided import DTYPES

_ATEN, _C10D = torch.ops.aten, torch.ops._c10d_functional
WAIT, SIZE = _C10D.wait_tensor.default, _ATEN.sym_size.int
_MM, _ADDMM, _BMM, _ADD = _ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.add.Tensor  # fmt: skip

FORMS = {
    _C10D.all_gather_into_tensor.default: "all-gather -> matmul",
    _C10D.reduce_scatter_tensor.default: "matmul -> reduce-scatter",
    _C10D.all_reduce.default: "matmul -> all-reduce",
}


@dataclass
class Matmul:
    """x (M, K) @ weight (K, N) + bias, a node; or the product of batches of matrices, which `check` refuses."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None

    @classmethod
    def of(cls, node: object) -> Matmul | None:
        """None: it is no matmul."""
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if node.target in (_MM, _BMM):
            return cls(node, *node.args[:2], None)
        if node.target is _ADDMM:
            return cls(node, *node.args[1:3], node.args[0])
        return None

    def check(self) -> None:
        """That an op of ours can compute it."""
        if self.node.target is _BMM:
            raise Unsupported("batched")
        if any(self.node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            raise Unsupported("scaled")
        given = [x for x in (self.node, self.x, self.weight, self.bias) if x is not None]
        dtypes = {value(x).dtype for x in given}
        if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
            raise Unsupported("dtype", f"of {', '.join(sorted(map(str, dtypes)))}")


@dataclass
class Gather:
    """All-gather -> matmuls of the gathered rows."""

    collective: Node
    wait: Node
    group_name: str
    world_size: int
    matmuls: list[Matmul]
    arranged: list[Node]  #: all that is nothing but the gathered rows, arranged anew
    keep: bool = False  #: whether something else uses them

    @property
    def x(self) -> Node:
        return self.collective.args[0]


@dataclass
class Reduction:
    """Matmuls, summed -> reduce-scatter or all-reduce."""

    collective: Node
    wait: Node
    group_name: str
    world_size: int
    matmuls: list[Matmul]
    biases: list[Node]  #: (N,), added to their sum
    chain: list[Node]  #: between them and the collective, which alone uses it


def match(node: Node) -> Gather | Reduction | None:
    """What stands about a collective; None: no matmul.

    Raises:
        Unsupported: matmuls that must stay as they are.
    """
    wait, group_name = _only_wait(node), node.args[-1]
    if wait is None or not isinstance(group_name, str) or not value(node).dim():
        return None
    try:
        gathers = node.target is _C10D.all_gather_into_tensor.default
        return (_gather if gathers else _reduction)(node, wait)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise Unsupported("unexpected", f"a form that is not known ({error})") from error


def _only_wait(node: Node) -> Node | None:
    users = [user for user in node.users if user.target is not SIZE]
    return users[0] if len(users) == 1 and users[0].target is WAIT else None


def _gather(node: Node, wait: Node) -> Gather | None:
    _, world_size, group_name = node.args
    arranged = _arrangements(wait)
    matmuls, others = [], False
    for rows in arranged:
        for user in rows.users:
            matmul = Matmul.of(user)
            if matmul is not None and matmul.x is rows and not _comes_from(matmul.weight, wait):
                matmuls.append(matmul)
            elif user not in arranged:
                others = True
    if not matmuls:
        return None
    matmuls.sort(key=lambda matmul: matmul.node)
    for matmul in matmuls:
        matmul.check()
    return Gather(node, wait, group_name, world_size, matmuls, arranged, keep=others)


def _arrangements(wait: Node) -> list[Node]:
    """wait, and whatever is nothing but its rows."""
    found, waiting = {wait: None}, [wait]
    while waiting:
        for user in waiting.pop().users:
            given = sources(user)
            if user not in found and given and all(source in found for source in given):
                found[user] = None
                waiting.append(user)
    return list(found)


def _comes_from(node: Node, wait: Node) -> bool:
    """Whether it is made of anything that the gathered rows are part of."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is wait:
            return True
        if node not in seen and wait < node:
            seen.add(node)
            waiting.extend(node.all_input_nodes)
    return False


def _reduction(node: Node, wait: Node) -> Reduction | None:
    x, op, *size, group_name = node.args
    chain: dict[Node, None] = {}
    terms = sorted(_terms(x, chain))
    matmuls = [matmul for matmul in map(Matmul.of, terms) if matmul is not None]
    if not matmuls:
        return None
    if op != "sum":
        raise Unsupported("reduce-op", f"it takes the {op}, not the sum")
    inside = {node, *chain, *(matmul.node for matmul in matmuls)}
    if any(user not in inside for part in inside - {node} for user in part.users):
        raise Unsupported("product-used")
    for matmul in matmuls:
        matmul.check()
    biases = [matmul.bias for matmul in matmuls if matmul.bias is not None]
    biases += [_added(term) for term in terms if term in chain]
    columns = width(matmuls[0].node)
    if any(tuple(value(bias).shape) != (columns,) for bias in biases):
        raise Unsupported("bias")
    if any(value(bias).dtype != value(matmuls[0].node).dtype for bias in biases):
        raise Unsupported("dtype", "a bias has another than the products")
    world_size = size[0] if size else rank_and_size(group_name)[1]
    return Reduction(node, wait, group_name, world_size, matmuls, biases, list(chain))


def _terms(node: Node, chain: dict[Node, None]) -> frozenset[Node]:
    """The matmuls that node is the sum of, their rows arranged anew, and the additions of biases to them; none where
    it is anything else."""
    if Matmul.of(node) is not None:
        return frozenset((node,))
    found = nothing = frozenset()
    if node.target is _ADD and not node.kwargs and all(isinstance(x, Node) for x in node.args):
        if _added(node) is not None:
            found = _terms(node.args[0], chain)
            found = found and found | {node}
        else:
            left, right = (_terms(x, chain) for x in node.args)
            same = tuple(value(node.args[0]).shape) == tuple(value(node.args[1]).shape)
            found = left | right if left and right and same and not left & right else nothing
    elif node.target is not _ADD:
        # What joins parts of different sums, or of one with a bias and one without, is no sum of complete matmuls.
        each = {_terms(x, chain) for x in sources(node) or ()}
        found = each.pop() if len(each) == 1 else nothing
    if found:
        chain[node] = None
    return found


def _added(node: Node) -> Node | None:
    """What an addition adds to every row."""
    bias = node.args[1]
    return bias if value(bias).dim() == 1 and value(node.args[0]).dim() > 1 else None
