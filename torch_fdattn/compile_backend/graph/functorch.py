"""Nodes under functorch's transforms and forward-mode AD, whose tensors are not what their metadata says."""

from __future__ import annotations

import torch
from torch._functorch import predispatch as vmap
from torch.fx import GraphModule, Node

_VMAP = {vmap._vmap_increment_nesting: 1, vmap._vmap_decrement_nesting: -1}
_AROUND_VMAP = {vmap._add_batch_dim, vmap._remove_batch_dim, vmap.lazy_load_decompositions}


def transformed_nodes(gm: GraphModule) -> set[Node]:
    """Those inside of a vmap, or all, for grad and jvp."""
    inside, depth = set(), 0
    for node in gm.graph.nodes:
        depth += _VMAP.get(node.target, 0)
        if depth:
            inside.add(node)
        elif _is_functorch(node):
            return set(gm.graph.nodes)
    return inside


def _is_functorch(node: Node) -> bool:
    """grad, jvp and the like."""
    if node.op != "call_function" or node.target in _VMAP or node.target in _AROUND_VMAP:
        return False
    module = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    return (
        module.startswith(("torch._functorch", "torch._C._functorch"))
        or name.endswith("_increment_nesting")
        or node.target is torch.autograd.forward_ad.enter_dual_level
        or name == "_enter_dual_level"
    )
