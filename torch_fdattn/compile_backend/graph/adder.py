"""Inserts nodes into a graph, each with what it yields."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.fx.node import map_arg

from torch_fdattn.compile_backend.graph.nodes import tensor, value


class Adder:
    """Inserts nodes before a node, each with what it yields (the AOTAutograd cache asks for it)."""

    def __init__(self, before: Node, like: Node | None = None) -> None:
        """like: the node whose source line and device they share; by default that one."""
        self.before = before
        self.like = like or before
        self.graph = before.graph
        self.mode = tensor(self.like).fake_mode
        self.added: list[Node] = []

    def new(self, target: Callable | str, args: tuple, *, yields: object, **kwargs) -> Node:
        kind = "call_method" if isinstance(target, str) else "call_function"
        with self.graph.inserting_before(self.before):
            node = self.graph.create_node(kind, target, args, kwargs)
        node.meta = {key: x for key, x in self.like.meta.items() if key != "example_value"}
        node.meta["example_value"] = yields
        self.added.append(node)
        return node

    def __call__(self, target: Callable | str, *args, **kwargs) -> Node:
        """A function's or, by its name, a method's call; what it yields is found by calling it."""
        function = getattr(Tensor, target) if isinstance(target, str) else target
        # Autocast that is on here need not be on where the node stands, and all casts are explicit.
        device = value(self.like).device.type
        # In C++, ops made of others (matmul, in torch 2.11) ask for sizes as numbers, which adds guards.
        with self.mode, enable_python_dispatcher(), torch.autocast(device, enabled=False):
            yields = function(*map_arg(args, value), **map_arg(kwargs, value))
        return self.new(target, args, yields=yields, **kwargs)

    def size(self, node: Node, dim: int) -> int | Node:
        """A number, or a node of one where it is symbolic."""
        size = value(node).shape[dim]
        return size if isinstance(size, int) else self("size", node, dim)

    def undo(self) -> None:
        for node in reversed(self.added):
            self.graph.erase_node(node)
