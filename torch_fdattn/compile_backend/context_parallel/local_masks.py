"""Masks that a model makes of the positions of its local tokens, in positions of all tokens.

transformers' models, given `position_ids`, compare these: causal and windows by their differences, and packed documents, which
begin where a position is not the one before it and 1 (`find_packed_sequence_indices`). That they are the positions of this
rank's tokens is seen when the graph runs (`positions.py`): then one document is all there is, whatever jumps a shard has, and
the mask is a window over all tokens. Whether it is boolean, or holds 0 and a number that hides (eager attention's), says
nothing else: each query sees its own key, so that what hides the others weighs nothing.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from torch_fdattn.compile_backend.graph.data_flow import DataFlow
from torch_fdattn.compile_backend.graph.nodes import op_name, value
from torch_fdattn.compile_backend.masks.entries import axis
from torch_fdattn.compile_backend.masks.expressions import (
    TRUE,
    Condition,
    IsZero,
    Lookup,
    NonNegative,
    Poly,
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
    conditions = conjuncts(condition)
    compared = [_difference(x) for x in conditions]
    if None in compared:
        return None
    positions = _input_compared(conditions, compared)
    given = None if positions is None else _outermost(positions, until, flow)
    if given is None:
        return None
    structure = Structure()
    for condition, (node, forward, distance) in zip(conditions, compared, strict=True):
        if isinstance(condition, IsZero):
            if distance or not _numbers_documents(node, positions):
                return None
        elif node is not positions or distance < 0:
            return None
        elif forward:
            structure.right = _nearer(structure.right, distance)
        else:
            structure.left = _nearer(structure.left, distance)
    attention.mask = RecoveredMask(structure, nodes=attention.mask.nodes)
    attention.masked = False
    return given


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


def _difference(condition: Condition) -> tuple[Node, bool, int] | None:
    """(x, forward, r) of a condition on x[q] - x[k] + r, or where it is not forward on x[k] - x[q] + r."""
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
    return of_query.node, factors == (1, -1), distance


def _input_compared(conditions: list[Condition], compared: list[tuple]) -> Node | None:
    """The input of the graph whose entries say what is near."""
    nodes = {x[0] for of, x in zip(conditions, compared, strict=True) if isinstance(of, NonNegative)}  # fmt: skip
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
