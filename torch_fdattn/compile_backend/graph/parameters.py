"""What is learned: a tensor that holds what training made of `nn.Parameter`s, and no mask."""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import is_tensor, op_name, value

#: What yields numbers of its first tensor and no others.
_CHOOSES = {
    "bfloat16", "broadcast_to", "clone", "contiguous", "double", "expand", "expand_as", "flatten", "float",
    "gather", "getitem", "half", "index_select", "mT", "permute", "repeat", "repeat_interleave", "reshape",
    "squeeze", "to", "transpose", "type", "type_as", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
#: What yields numbers between -1 and 1, of whatever.
_BOUNDED = {"cos", "sigmoid", "sin", "softmax", "tanh"}
#: By the position of what must be learned: a projection holds no number that hides, a table's row none but its own.
_WEIGHT = {"conv1d": 1, "conv2d": 1, "embedding": 1, "linear": 1}


def is_parameter(node: object) -> bool:
    return isinstance(node, Node) and isinstance(value(node), torch.nn.Parameter)


def is_learned(node: Node) -> bool:
    """Whether a number of a tensor that wants a gradient is a parameter's, or a projection by one.

    An input that wants a gradient and is no `nn.Parameter` may be a bias and a mask, added outside of the graph.
    """
    while is_tensor(node) and value(node).requires_grad:
        name = op_name(node)
        if is_parameter(node) or name in _BOUNDED:
            return True
        position = _WEIGHT.get(name, 0 if name in _CHOOSES else None)
        if position is None or len(node.args) <= position:
            return False
        node = node.args[position]
    return False
