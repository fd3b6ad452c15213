"""Nodes in place of an attention: our op, and what brings its inputs and output into order."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from torch_fdattn.compile_backend.attention import Attention, Plan
from torch_fdattn.compile_backend.nodes import known, op_name, tensor, value
from torch_fdattn.compile_backend.operands import B, Operand
from torch_fdattn.compile_backend.report import Left
from torch_fdattn.ops.attention.op import empty_state


def emit(found: Attention, plan: Plan) -> None:
    """Replaces the attention's result; raises `Left`, having changed nothing, where it cannot."""
    add = _Adder(found.result)
    try:
        q, k, v = (_ordered(add, x, plan.dtype) for x in (found.q, found.k, found.v))
        q_start = None
        if plan.from_first_key:
            size = found.q.size(B)
            if not isinstance(size, int):
                size = add.call("size", q, B)
            q_start = add.call(torch.zeros, size, dtype=torch.int32, device=value(q).device)
        op = getattr(torch.ops.fdattn, plan.op).default
        with add.mode:  # not by calling it, whose checks could add guards
            pair = empty_state(value(q), value(v))
        pair = add.new(
            op, (q, k, v, None, q_start), causal=plan.causal, scale=plan.scale, yields=pair
        )
        out = _as_result(add, add.call(operator.getitem, pair, 0), found.out_dims)
        out = _with_strides(add, out, found.result)
    except Left:
        add.undo()
        raise
    found.result.replace_all_uses_with(out)
    _erase([*found.makers, *found.between, found.result])


class _Adder:
    """Inserts nodes before a node, each with what it yields (the AOTAutograd cache asks for it)."""

    def __init__(self, before: Node) -> None:
        self.before = before
        self.graph = before.graph
        self.mode = tensor(before).fake_mode
        self.added: list[Node] = []

    def new(self, target: Callable | str, args: tuple, *, yields: object, **kwargs) -> Node:
        kind = "call_method" if isinstance(target, str) else "call_function"
        with self.graph.inserting_before(self.before):
            node = self.graph.create_node(kind, target, args, kwargs)
        node.meta = {key: x for key, x in self.before.meta.items() if key != "example_value"}
        node.meta["example_value"] = yields
        self.added.append(node)
        return node

    def call(self, target: Callable | str, *args, **kwargs) -> Node:
        """A function's or, by its name, a method's call; what it yields is found by calling it."""
        function = getattr(Tensor, target) if isinstance(target, str) else target
        # Autocast that is on here need not be on where the node stands, and all casts are explicit.
        device = value(self.before).device.type
        with self.mode, torch.autocast(device, enabled=False):
            yields = function(*map_arg(args, value), **map_arg(kwargs, value))
        return self.new(target, args, yields=yields, **kwargs)

    def undo(self) -> None:
        for node in reversed(self.added):
            self.graph.erase_node(node)


def _ordered(add: _Adder, operand: Operand, dtype: torch.dtype) -> Node:
    """An operand as (B, H, S, D), in the dtype that autocast gave the original."""
    node = operand.node
    order = [dim for dim in operand.dims if dim is not None]
    node = _permuted(add, node, order)
    if None in operand.dims:
        node = add.call("unsqueeze", node, operand.dims.index(None))
    return node if value(node).dtype == dtype else add.call("to", node, dtype)


def _permuted(add: _Adder, node: Node, order: list[int]) -> Node:
    moved = [i for i, dim in enumerate(order) if i != dim]
    if not moved:
        return node
    if len(moved) == 2:
        return add.call("transpose", node, *moved)
    return add.call("permute", node, *order)


def _as_result(add: _Adder, out: Node, dims: tuple[int, ...]) -> Node:
    if len(dims) == 3:
        out = add.call("squeeze", out, 1)
        dims = tuple(sorted(dims).index(dim) for dim in dims)
    return _permuted(add, out, list(dims))


#: Consumers whose results do not depend on the strides of their inputs.
_ANY_STRIDES = ("contiguous", "matmul", "bmm", "linear")
#: Consumers that pass strides on.
_PASS_STRIDES = ("transpose", "permute", "reshape", "flatten", "unsqueeze", "squeeze")


def _with_strides(add: _Adder, out: Node, result: Node) -> Node:
    """The output with the strides of what it replaces, where anything could tell: `view`, for example."""
    expected = tensor(result)
    if _same_strides(value(out), expected) or _strides_do_not_matter(result):
        return out
    if not all(isinstance(stride, int) for stride in expected.stride()):
        order = range(expected.dim())  # symbolic: only the usual order can be recognised
        if not expected.is_contiguous():
            raise Left("layout", "the result's strides are symbolic and not contiguous")
    else:
        order = sorted(range(expected.dim()), key=lambda dim: -expected.stride(dim))
    order = list(order)
    inverse = [order.index(dim) for dim in range(len(order))]
    out = _permuted(add, out, order)
    out = _permuted(add, add.call("contiguous", out), inverse)
    if not _same_strides(value(out), expected):
        raise Left("layout", f"the result's strides {tuple(expected.stride())} cannot be kept")
    return out


def _same_strides(a: Tensor, b: Tensor) -> bool:
    return all(
        known(x == y) or known(size == 1)
        for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def _strides_do_not_matter(node: Node) -> bool:
    for user in node.users:
        name = op_name(user)
        if name in _ANY_STRIDES and not user.kwargs:
            continue
        if name not in _PASS_STRIDES or not _strides_do_not_matter(user):
            return False
    return True


def _erase(nodes: list[Node]) -> None:
    """Removes those that nothing uses any more, last ones first."""
    if not nodes:
        return
    order = {node: i for i, node in enumerate(nodes[0].graph.nodes)}
    for node in sorted({*nodes}, key=order.__getitem__, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
