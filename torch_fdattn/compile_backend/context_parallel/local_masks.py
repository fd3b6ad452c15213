"""Masks that a model makes of the positions of its local tokens, in positions of all tokens.

transformers' models, given `position_ids`, compare these: causal and windows by their differences, chunks by their quotients
(Llama 4), a prefix by a number (an `or_mask_function`), and packed documents, which begin where a position is not the one
before it and 1 (`find_packed_sequence_indices`). That they are the positions of this
rank's tokens is seen when the graph runs (`positions.py`): then one document is all there is, whatever jumps a shard has (or there
are those that the option's "cu_seqlens" names, which ring attention keeps apart in any case), and the mask is a window, chunks
or a prefix of all tokens, the latter two counted from where positions are 0. Whether it is boolean, or holds 0 and a number that hides (eager attention's), says
nothing else: each query sees its own key, so that what hides the others weighs nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch.fx import Node

from torch_fdattn.compile_backend.graph.data_flow import DataFlow
from torch_fdattn.compile_backend.graph.nodes import op_name, value
from torch_fdattn.compile_backend.masks.entries import axis
from torch_fdattn.compile_backend.masks.expressions import (
    TRUE,
    Condition,
    Either,
    IsZero,
    Lookup,
    NonNegative,
    Poly,
    Quotient,
    conjuncts,
)
from torch_fdattn.compile_backend.masks.recovery import MaskRecovery
from torch_fdattn.compile_backend.masks.structure import Structure
from torch_fdattn.compile_backend.masks.terms import MaskTerm, RecoveredMask
from torch_fdattn.compile_backend.match.attention import MatchedAttention


def over_all_tokens(attention: MatchedAttention, flow: DataFlow) -> Node | None:
    """Gives the attention its mask in positions of all tokens, and returns the input of the outermost graph that must hold
    these of its tokens; None where the mask is no such one, and stays.
    """
    result = attention.result
    terms, until = _where_they_are_made(attention.mask.terms, result, flow)
    # Between a mask and the checkpoint that is given it, the flow has seen that nothing writes to it.
    read_at = result if until is result else terms[0].node
    condition = MaskRecovery().condition(
        terms, attention.sizes, value(result).dtype, read_at, sinks=attention.sinks is not None,
        groups=attention.groups,
    )  # fmt: skip
    if condition is None or condition == TRUE:
        return None
    found = [_compared(x) for x in conjuncts(condition)]
    if None in found:
        return None
    positions = _input_compared(found)
    given = None if positions is None else _outermost(positions, until, flow)
    structure = None if given is None else _structure(found, positions)
    if structure is None:
        return None
    attention.mask = RecoveredMask(structure, nodes=attention.mask.nodes)
    attention.masked = False
    mask = f"mask: {attention.mask.name}"
    attention.notes = [mask if x.startswith("mask: ") else x for x in attention.notes]
    return given


class _Compared(NamedTuple):
    """What a condition compares: entries x of a tensor, at a query's index and at a key's."""

    node: Node
    #: "right": x[k] <= x[q] + number; "left": x[k] >= x[q] - number; "equal": x[k] = x[q]; "chunk": of quotients by number;
    #: "prefix": x[k] <= x[q], or x[k] < number
    kind: str
    number: int


def _structure(found: list[_Compared], positions: Node) -> Structure | None:
    """What they say together, if all but the numbers of documents are of positions."""
    structure, chunks, prefixes = Structure(), set(), set()
    for node, kind, limit in found:
        if kind == "equal":
            if not _numbers_documents(node, positions):
                return None
        elif limit < 0:
            return None
        elif kind == "right":
            structure.right = _nearer(structure.right, limit)
        elif kind == "left":
            structure.left = _nearer(structure.left, limit)
        else:
            (chunks if kind == "chunk" else prefixes).add(limit)
    if len(chunks) > 1 or (prefixes and (chunks or len(prefixes) > 1 or structure != Structure())):
        return None
    if prefixes:
        structure.right, structure.prefix = 0, prefixes.pop()
    structure.chunk = chunks.pop() if chunks else None
    return structure


def _where_they_are_made(
    terms: list[MaskTerm], until: Node, flow: DataFlow
) -> tuple[list[MaskTerm], Node]:
    """A mask as the graph shows it that makes it, and the node there by which it is needed: a checkpoint is given its
    layers' masks.
    """
    while len(terms) == 1:
        (term,) = terms
        call = flow.caller(term.node)
        given = (
            flow.sources(term.node) if term.node.op == "placeholder" and call is not None else []
        )
        if len(given) != 1 or flow.is_written(given[0], call):
            break
        terms, until = [replace(term, node=given[0])], call
    return terms, until


def _outermost(positions: Node, until: Node, flow: DataFlow) -> Node | None:
    """The input of the outermost graph that an input is, if nothing writes to it before it is needed."""
    while not flow.is_written(positions, until):
        until = flow.caller(positions)
        if until is None:
            return positions
        given = flow.sources(positions)
        if len(given) != 1 or given[0].op != "placeholder":
            return None
        (positions,) = given
    return None


def _compared(condition: Condition) -> _Compared | None:
    return _window(condition) or _chunk(condition) or _prefix(condition)


def _window(condition: Condition) -> _Compared | None:
    """Of x[q] - x[k] + number, or x[k] - x[q] + number."""
    if not isinstance(condition, (NonNegative, IsZero)):
        return None
    poly: Poly = condition.of
    found = sorted(
        (x for x in poly.atoms if isinstance(x, Lookup)), key=lambda x: x.index[-1] == axis("k")
    )
    if len(found) != 2:
        return None
    of_query, of_key = found
    factors = poly.coefficient(of_query), poly.coefficient(of_key)
    distance = poly.without(of_query, of_key).constant
    ends = of_query.index[-1] == axis("q") and of_key.index[-1] == axis("k")
    same = of_query.node is of_key.node and of_query.index[:-1] == of_key.index[:-1]
    if not (ends and same and factors in ((1, -1), (-1, 1)) and isinstance(distance, int)):
        return None
    if isinstance(condition, IsZero):
        return None if distance else _Compared(of_query.node, "equal", 0)
    return _Compared(of_query.node, "right" if factors == (1, -1) else "left", distance)


def _chunk(condition: Condition) -> _Compared | None:
    """Of ⌊x[q] / number⌋ = ⌊x[k] / number⌋."""
    quotients = [x for x in condition.of.atoms if isinstance(x, Quotient)] if isinstance(condition, IsZero) else []  # fmt: skip
    if len(quotients) != 2 or len({x.by for x in quotients}) != 1:
        return None
    first, second = quotients
    if condition.of.coefficient(first) * condition.of.coefficient(second) != -1:
        return None
    # Nothing is added to the positions: what is added to both would be lost in their difference.
    bare = all(x.of == Poly.atom(y) for x in quotients for y in x.of.atoms)
    if condition.of.without(first, second).terms or not bare:
        return None
    equal = _window(IsZero(first.of - second.of))
    return None if equal is None else _Compared(equal.node, "chunk", first.by)


def _prefix(condition: Condition) -> _Compared | None:
    """Of x[k] <= x[q] or x[k] < number."""
    parts = list(condition.parts) if isinstance(condition, Either) else []
    if len(parts) != 2 or not all(isinstance(x, NonNegative) for x in parts):
        return None
    causal, before = sorted(parts, key=lambda x: -len(x.of.atoms))
    order = _window(causal)
    if order is None or order[1:] != ("right", 0) or len(before.of.atoms) != 1:
        return None
    (of_key,) = before.of.atoms
    last = before.of.without(of_key).constant
    if of_key not in causal.of.atoms or before.of.coefficient(of_key) != -1:
        return None
    is_key = isinstance(of_key, Lookup) and of_key.index[-1] == axis("k")
    return _Compared(order.node, "prefix", last + 1) if is_key and isinstance(last, int) else None


def _input_compared(found: list[_Compared]) -> Node | None:
    """The input of the graph whose entries say what is near."""
    nodes = {x.node for x in found if x.kind != "equal"}
    if len(nodes) != 1:
        return None
    (node,) = nodes
    return node if node.op == "placeholder" else None


def _numbers_documents(node: Node, positions: Node) -> bool:
    """Whether it counts where positions are not the ones before them and 1; of the first one, any number."""
    if op_name(node) != "cumsum" or (*node.args[1:], *node.kwargs.values()) != (-1,):
        return False
    steps = node.args[0]
    if op_name(steps) not in ("ne", "not_equal") or steps.args[1:] != (1,):
        return False
    differences = steps.args[0]
    along = {"dim": -1, **differences.kwargs}
    if op_name(differences) != "diff" or len(differences.args) != 1 or along["dim"] != -1:
        return False
    if not along.keys() <= {"dim", "prepend"}:
        return False
    source = differences.args[0]
    # As many as there are positions: what is put before the first one is one number.
    as_many = value(node).shape == value(source).shape
    while op_name(source) == "expand":
        source = source.args[0]
    return as_many and source is positions


def _nearer(bound: int, distance: int) -> int:
    return distance if bound < 0 else min(bound, distance)
