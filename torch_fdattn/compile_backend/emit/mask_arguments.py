"""A recovered mask as arguments of our ops: nodes for what tensors it takes, keywords for the rest."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from functools import cached_property, reduce

import torch
from torch._functorch.predispatch import _vmap_decrement_nesting
from torch.fx import Node

from torch_fdattn.compile_backend.emit.mask_dims import in_four_dims
from torch_fdattn.compile_backend.emit.mask_nodes import MaskNodes
from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.mutations import written_between
from torch_fdattn.compile_backend.graph.nodes import described, equal_sizes, statically_true, value
from torch_fdattn.compile_backend.masks.expressions import Poly
from torch_fdattn.compile_backend.masks.structure import Structure
from torch_fdattn.compile_backend.masks.terms import ExplicitMask
from torch_fdattn.compile_backend.masks.values import SWALLOWS
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.ops.scores import MASK_LIMIT


class MaskArguments:
    """Makes the nodes of one attention; what depends on a mask alone is made once for all layers."""

    def __init__(self, add: Adder, attention: MatchedAttention, made: dict[tuple, Node]) -> None:
        self.add, self.attention, self.made = add, attention, made
        self.levels = attention.mask.levels
        self.new: dict[tuple, Node] = {}
        self.adders: list[Adder] = []

    def keep(self) -> None:
        """The nodes stay: other attentions may use them."""
        self.made.update(self.new)

    def undo(self) -> None:
        for adder in reversed(self.adders):
            adder.undo()

    def positions(self, structure: Structure, q: Node) -> tuple[Node | None, Node | None]:
        """(kv_lens, q_start); q (B, H, S, D)."""
        return self._of_each_sequence(structure.lengths, q), self._of_each_sequence(
            structure.start, q
        )

    def options(self, structure: Structure, scale: float | None) -> dict:
        """Keywords; none of masks that says what is so by default."""
        mask = self.attention.mask
        options: dict = {"causal": structure.right == 0, "scale": scale}
        if structure.left >= 0:
            options["window_left"] = structure.left
        if structure.right > 0:
            options["window_right"] = structure.right
        if self.attention.softcap:
            options["softcap"] = self.attention.softcap
        if mask.slopes is not None:
            options["alibi_slopes"] = self._slopes(mask.slopes)
        if self.attention.sinks is not None:
            options["sinks"] = self._sinks(*self.attention.sinks)
        explicit = self._joined(mask.kept)
        if self.levels is not None:
            explicit = self._below_highest(explicit)
            if self.levels.fills_apart:
                explicit = self._limited_to(explicit, self.visible(self.levels.fills))
        if explicit is not None:
            options["attn_mask"] = explicit
        return options

    def _of_each_sequence(self, poly: Poly | None, q: Node) -> Node | None:
        """An int32 for each sequence."""
        if poly is None:
            return None
        size, constant, device = self.add.size(q, 0), poly.constant, value(q).device
        if constant == 0:
            return self.add(torch.zeros, size, dtype=torch.int32, device=device)
        if isinstance(constant, int):
            return self.add(torch.full, (size,), constant, dtype=torch.int32, device=device)
        if constant is not None:
            raise Unsupported("mask", f"queries begin at {constant}, a symbolic number")
        root, sizes = self.attention.mask.roots[poly], self.attention.sizes
        node = self._made(root, poly, lambda at: MaskNodes(at, sizes, ("b",)).positions(poly))
        fits = statically_true(value(node).shape == (size,))
        return node if fits else self.add("expand", node, size)

    def _sinks(self, poly: Poly, joined: Node) -> Node:
        """(H,)."""
        sizes = self.attention.sizes
        made = _floating(self.add, MaskNodes(self.add, sizes, ("h",)).number(poly))
        made = self.add("expand", made, sizes.heads)
        # Under torch.no_grad() a parameter and its views want a gradient, but what is computed from them does not.
        return made if value(joined).requires_grad else self.add("detach", made)

    def _slopes(self, poly: Poly) -> Node:
        """(B, H) or (H,)."""
        root, sizes = self.attention.mask.roots[poly], self.attention.sizes
        node = self._made(
            root, poly, lambda at: _floating(at, MaskNodes(at, sizes, ("b", "h")).number(poly))
        )
        shape = sizes.batch, sizes.heads
        if statically_true(value(node).shape[0] == 1):
            node, shape = self.add("select", node, 0, 0), shape[1:]
        return node if equal_sizes(value(node).shape, shape) else self.add("expand", node, *shape)

    def of_fills(self) -> Node:
        """The mask of the attention to keys that fills hide, which is merged with that to all others."""
        mask = self._below_highest(self._joined(self.levels.terms))
        filled = self.add(torch.logical_not, self.visible(self.levels.fills))
        return self._limited_to(mask, filled)

    def _limited_to(self, mask: Node, keys: Node) -> Node:
        """A mask of these keys, less those that weigh nothing in their row."""
        others = self.add(torch.logical_not, keys)
        weightless = self.add(operator.lt, mask, SWALLOWS)
        return self.add("masked_fill", mask, self.add(operator.or_, others, weightless), -math.inf)

    def _below_highest(self, mask: Node) -> Node:
        # What nothing hides below: where -inf hides all it stays.
        infinite = self.add(operator.eq, self._highest, -math.inf)
        base = self.add("masked_fill", self._highest, infinite, 0.0)
        return self.add(operator.sub, self._wide(mask), base)

    def of(self, kept: ExplicitMask) -> Node:
        node = self._of_term(kept)
        if kept.condition is not None:
            return node
        return in_four_dims(self.add, node, kept.term.dims, self.attention)

    def visible(self, fills: Iterable[ExplicitMask]) -> Node:
        """Whether no fill hides a key."""
        return reduce(lambda a, b: self.add(operator.and_, a, b), map(self.of, fills))

    def _joined(self, terms: Iterable[ExplicitMask]) -> Node | None:
        """Masks in the order in which they are written, over scores of zero; boolean if none holds a number."""
        joined: Node | None = None
        for kept in terms:
            joined = self._over(joined, self.of(kept), kept)
            if kept.scale != 1 and value(joined).dtype != torch.bool:
                joined = self.add(operator.mul, joined, kept.scale)
        return joined

    def _over(self, before: Node | None, node: Node, kept: ExplicitMask) -> Node:
        """A mask over those that were written before it."""
        add, is_number = self.add, before is not None and value(before).dtype != torch.bool
        if value(node).dtype != torch.bool:
            if before is None or is_number:
                return node if before is None else add(operator.add, before, self._wide(node, kept))
            return add("masked_fill", node, add(torch.logical_not, before), -math.inf)
        if not is_number and math.isinf(kept.fill):
            return node if before is None else add(operator.and_, before, node)
        if not is_number:
            zeros = add(torch.zeros, (), dtype=kept.term.dtype, device=value(node).device)
            if before is None:
                return add(torch.where, node, zeros, kept.fill)
            before = add(torch.where, before, zeros, -math.inf)
        before = self._wide(before, kept)  # which may not hold the number otherwise
        return add("masked_fill", before, add(torch.logical_not, node), kept.fill)

    @cached_property
    def _highest(self) -> Node:
        """Of each row of all masks, also of those that are structure: (…, 1)."""
        made = self.add("amax", self._wide(self._joined(self.levels.terms)), -1, keepdim=True)
        return self.add("detach", made) if value(made).requires_grad else made

    def _wide(self, node: Node, kept: ExplicitMask | None = None) -> Node:
        """A mask in the dtype in which it is combined with scores, or at least in fp32."""
        dtype = value(node).dtype
        wide = torch.promote_types(dtype, kept.term.dtype or dtype if kept else torch.float32)
        return node if dtype == wide else self.add("to", node, wide)

    def without_swallowed(self, q: Node, k: Node) -> tuple[Node, Node]:
        """q and k that give scores of zero in rows of whose scores nothing is left.

        Where gradients reach these all the same, q less itself brings the gradient of q. A second copy of q in the
        head dim brings that of k, by k less itself.
        """
        levels, add = self.levels, self.add
        if levels is None or levels.limit is None:
            return q, k
        rows = add(operator.le, self._highest, levels.limit)
        if not levels.flows:
            return add("masked_fill", q, rows, 0.0), k
        constant, keys = add("detach", q), add("detach", k)
        first = add(torch.where, rows, add(operator.sub, q, constant), q)
        second = add(torch.where, rows, constant, add(torch.zeros_like, constant))
        q = add(torch.cat, [first, second], -1)
        return q, add(torch.cat, [k, add(operator.sub, k, keys)], -1)

    def _of_term(self, kept: ExplicitMask) -> Node:
        root = kept.term.node
        if kept.condition is not None:
            condition, sizes = kept.condition, self.attention.sizes
            return self._made(root, condition, lambda at: MaskNodes(at, sizes).condition(condition))
        written = written_between(_after(root), self.attention.result, [root]) is not None
        if written or value(root).requires_grad:
            return _as_operand(self.add, kept)  # where attention is, as it is there
        return self._made(root, kept, lambda at: _as_operand(at, kept))

    def _made(self, root: Node, what: object, make: Callable[[Adder], Node]) -> Node:
        """A node next to the mask, where what it is made from holds what it held for the mask."""
        key = root, what
        node = self.made.get(key) or self.new.get(key)
        if node is None:
            adder = Adder(_after(root), like=root)
            self.adders.append(adder)
            node = self.new[key] = make(adder)
        writer = written_between(_after(root), self.attention.result, [node])
        if writer is not None:
            raise Unsupported(
                "in-place", f"{described(writer)} may write into what a mask is made of"
            )
        return node


def _floating(add: Adder, node: Node) -> Node:
    """Slopes and sinks, which may be counted, as our ops take them."""
    return node if value(node).is_floating_point() else add("to", node, torch.float32)


def _after(node: Node) -> Node:
    """The first place behind a node where others may stand: outside of the vmap whose result it is."""
    node = node.next
    while node.op == "placeholder" or node.target is _vmap_decrement_nesting:
        node = node.next
    return node


def _as_operand(add: Adder, kept: ExplicitMask) -> Node:
    """A mask itself, as our ops take it."""
    node, term = kept.term.node, kept.term
    if not term.is_added:
        return add(torch.logical_not, node) if term.kind == "hidden" else node
    if value(node).dtype == torch.bool:
        node = add("to", node, term.dtype)
    if term.floor is not None:
        node = add("clamp", node, term.floor)
    if term.factor != 1:
        node = add(operator.mul, node, term.factor)
    if kept.limited:
        # Finite numbers that our ops would take for -inf, which to a softmax is another thing.
        infinite = add(operator.eq, node, -math.inf)
        node = add(torch.where, infinite, node, add("clamp", node, -MASK_LIMIT))
    return node
