"""Nodes in place of an attention: our op, and what brings its inputs and output into order."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor
from torch.fx import Node

from torch_fdattn.compile_backend.choose import OpCall
from torch_fdattn.compile_backend.emit.empty_rows import with_empty_rows
from torch_fdattn.compile_backend.emit.mask_arguments import MaskArguments
from torch_fdattn.compile_backend.emit.mask_dims import in_four_dims, taken_apart
from torch_fdattn.compile_backend.emit.packing import chunk_starts, packed, unpacked
from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.functional import TWIN
from torch_fdattn.compile_backend.graph.mutations import storages, written_between
from torch_fdattn.compile_backend.graph.nodes import (
    asks_for_shape,
    equal_sizes,
    is_tensor,
    op_name,
    statically_true,
    tensor,
    value,
)
from torch_fdattn.compile_backend.masks.recovery import MaskRecovery
from torch_fdattn.compile_backend.match.attention import MatchedAttention, Temperature
from torch_fdattn.compile_backend.match.operands import BOTH, INNER, B, D, H, Operand, S
from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.ops.attention.op import empty_state


def emit(attention: MatchedAttention, call: OpCall, masks: MaskRecovery) -> None:
    """Replaces the attention's result; raises `Unsupported`, having changed nothing, where it cannot."""
    add = Adder(attention.result)
    given = MaskArguments(add, attention, masks.made)
    try:
        q, k, v = (_ordered(add, x, call.dtype) for x in (attention.q, attention.k, attention.v))
        for temperature in attention.temperatures:
            q = _at_temperature(add, q, temperature, attention)
        options = given.options(call.structure, _scale(attention, call)) | call.options
        queries, keys = q, k
        q, k = given.without_swallowed(q, k)
        if call.structure.chunk:
            operands = (chunk_starts(add, q, call.structure.chunk),)
            q, k, v = (packed(add, x) for x in (q, k, v))
        else:
            operands = given.positions(call.structure, q)
        if call.operands:
            operands = (*(x for x in operands if x is not None), *call.operands)
        op = getattr(torch.ops.fdattn, call.op).default
        with add.mode:  # not by calling it, whose checks could add guards
            like = value(q).contiguous() if call.contiguous else value(q)
            lse_shape = value(q).shape[1::-1] if call.structure.chunk else None
            pair = empty_state(like, value(v), lse_shape=lse_shape)
        pair = add.new(op, (q, k, v, *operands), yields=pair, **options)
        if attention.mask.levels is not None and attention.mask.levels.fills_apart:
            pair = _merged_with_fills(add, pair, (queries, keys, v), given.of_fills())
        out = add(operator.getitem, pair, 0)
        if call.structure.chunk:
            out = unpacked(add, out, queries)
        if attention.mask.empty != "zero" and not statically_true(attention.k.size(S) == 0):
            out = with_empty_rows(add, attention, given, pair, out, (queries, keys, v))
        _replace(add, attention, out, given)
    except Exception:  # what nobody thought of too: the graph must stay as it was
        add.undo()
        given.undo()
        raise


def _replace(add: Adder, attention: MatchedAttention, out: Node, given: MaskArguments) -> None:
    """Puts `out` (B, H, S, D) in the result's place, in its order, and erases what nothing uses any more."""
    out = _as_result(add, out, attention)
    out = _with_strides(add, out, attention.result)
    if value(attention.result).requires_grad and _is_written(attention.result):
        out = add(
            "clone", out
        )  # an attention's backward reads the output, that of a product does not
    given.keep()
    attention.result.replace_all_uses_with(out)
    _erase([*attention.mask.nodes, *attention.between, attention.result])
    _expand_by_sizes(attention)


def _expand_by_sizes(attention: MatchedAttention) -> None:
    """What is expanded as the scores are, by their sizes in place of them: else they would be computed for it."""
    rest = [node for node in attention.between if not node._erased]
    for node in rest:
        for user in [user for user in node.users if asks_for_shape(user, node)]:
            sizes = _sizes_of_scores(attention, node, add := Adder(user))
            if sizes is not None:
                user.replace_all_uses_with(add("expand", user.args[0], *sizes))
                user.graph.erase_node(user)
    _erase(rest)


def _sizes_of_scores(attention: MatchedAttention, node: Node, add: Adder) -> list | None:
    """A node's sizes, where they are numbers or those of q and k."""
    shape = value(node).shape if is_tensor(node) else ()
    if all(isinstance(n, int) for n in shape):
        return [*shape]
    q, k = attention.q, attention.k
    of = [(x, dim) for x, dim in ((q, B), (q, H), (q, S), (k, S)) if x.dims[dim] is not None]
    plain = q.both is None and q.inner is None and k.both is None
    if not plain or not equal_sizes([x.size(dim) for x, dim in of], shape):
        return None
    return [add.size(x.node, x.dims[dim]) for x, dim in of]


def _is_written(node: Node) -> bool:
    """Whether the graph may write into what a node yields, or into a copy of it that ours need not be."""
    copies = [node]
    for each in copies:
        copies += [x for x in each.users if op_name(x) in (*_PASS_STRIDES, "contiguous")]
    last, watched = node.graph.output_node(), storages(copies)
    if written_between(node.next, last, copies) is not None:
        return True
    while node is not last:
        if TWIN in node.meta and watched & storages(node.args[:1]):
            return True
        node = node.next
    return False


def _scale(attention: MatchedAttention, call: OpCall) -> float | None:
    """As it is without the queries' second copies in the head dim."""
    levels = attention.mask.levels
    if call.scale is not None or levels is None or not levels.needs_copies:
        return call.scale
    return attention.q.size(D) ** -0.5


def _merged_with_fills(add: Adder, pair: Node, qkv: tuple[Node, Node, Node], mask: Node) -> Node:
    """(out, lse) with the keys that fills hide: scores are the fills, and no gradient reaches q and k."""
    q, k, v = qkv
    queries, keys = (add("detach", x) for x in (q, k))
    zeros = add(torch.zeros_like, queries)
    with add.mode:
        yields = empty_state(value(q), value(v))
    other = add.new(
        torch.ops.fdattn.attention.default,
        (zeros, keys, v, None, None),
        yields=yields,
        attn_mask=mask,
    )
    parts = [add(torch.stack, [add(operator.getitem, x, i) for x in (pair, other)]) for i in (0, 1)]
    with add.mode:
        yields = tuple(value(x)[0].contiguous() for x in parts)
    return add.new(torch.ops.fdattn.merge_states.default, tuple(parts), yields=yields)


def _ordered(add: Adder, operand: Operand, dtype: torch.dtype) -> Node:
    """An operand as (B, H, S, D), in the dtype that autocast gave the original."""
    node, dims = operand.node, list(operand.dims)
    if operand.inner is not None:
        dims.insert(S, operand.inner)
    order = [dim for dim in dims if dim is not None]
    node = _permuted(add, node, order)
    if operand.both is not None:
        node = taken_apart(add, node, 0, operand.both[1])
    elif operand.inner is not None:
        node = add("flatten", node, 1, 2)
    elif None in operand.dims:
        node = add("unsqueeze", node, operand.dims.index(None))
    return node if value(node).dtype == dtype else add("to", node, dtype)


def _at_temperature(
    add: Adder, q: Node, temperature: Temperature, attention: MatchedAttention
) -> Node:
    """q (B, H, S, D) times, or over, what the scores were multiplied by, or divided by."""
    by = temperature.node
    if is_tensor(by):
        by = in_four_dims(add, by, temperature.dims, attention)
    function = operator.mul if temperature.how == "mul" else operator.truediv
    found = add(function, q, by)
    return found if value(found).dtype == value(q).dtype else add("to", found, value(q).dtype)


def _permuted(add: Adder, node: Node, order: list[int]) -> Node:
    moved = [i for i, dim in enumerate(order) if i != dim]
    if not moved:
        return node
    if len(moved) == 2:
        return add("transpose", node, *moved)
    return add("permute", node, *order)


def _as_result(add: Adder, out: Node, attention: MatchedAttention) -> Node:
    """What is (B, H, S, D) with the dims that the original had."""
    dims, found = attention.out_dims, [B, H, S, D]
    if BOTH in dims:
        out, found = add("flatten", out, 0, 1), [BOTH, S, D]
    elif INNER in dims:
        out, found = add("unflatten", out, 1, attention.groups), [B, H, INNER, S, D]
    elif len(dims) == 3:
        out, found = add("squeeze", out, 1), [B, S, D]
    return _permuted(add, out, [found.index(dim) for dim in dims])


#: Consumers whose results do not depend on the strides of their inputs.
_ANY_STRIDES = ("contiguous", "matmul", "bmm", "linear")
#: Consumers that pass strides on.
_PASS_STRIDES = ("transpose", "permute", "reshape", "flatten", "unsqueeze", "squeeze")


def _with_strides(add: Adder, out: Node, result: Node) -> Node:
    """The output with the strides of what it replaces, where anything could tell: `view`, for example."""
    expected = tensor(result)
    if _equal_strides(value(out), expected) or _strides_do_not_matter(result):
        return out
    if all(isinstance(stride, int) for stride in expected.stride()):
        order = sorted(range(expected.dim()), key=lambda dim: -expected.stride(dim))
    else:
        order = _order_of_symbolic(expected)
    inverse = [order.index(dim) for dim in range(len(order))]
    out = _permuted(add, out, order)
    out = _permuted(add, add("contiguous", out), inverse)
    if not _equal_strides(value(out), expected):
        raise Unsupported(
            "layout", f"the result's strides {tuple(expected.stride())} cannot be kept"
        )
    return out


def _order_of_symbolic(expected: Tensor) -> list[int]:
    """The dims as they lie in memory, of a tensor without gaps whose strides are symbols."""
    for order in itertools.permutations(range(expected.dim())):
        stride = 1
        for dim in reversed(order):
            size = expected.shape[dim]
            if not statically_true(expected.stride(dim) == stride) and not statically_true(
                size == 1
            ):
                break
            stride = stride * size
        else:
            return list(order)
    raise Unsupported("layout", "the result's strides are symbolic and leave gaps")


def _equal_strides(a: Tensor, b: Tensor) -> bool:
    return all(
        statically_true(x == y) or statically_true(size == 1)
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
