"""Queries and keys that are multiplied by numbers which a model counts by the indices of its local tokens.

Llama 4's temperature grows with a token's index (`attn_temperature_tuning`), which it takes from an `arange` over the tokens
that it is given, not from `position_ids`. Over a part of a sequence these are other numbers, and nothing else shows it.

Rotary angles are not looked into: models of the user's own count them from where their rank's tokens begin.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import op_name, statically_true, value
from torch_fdattn.compile_backend.report import Unsupported

#: What comes before these are a token's features, or angles, and no factors.
_NO_FACTORS = {
    "addmm", "baddbmm", "bmm", "cos", "einsum", "embedding", "linear", "matmul", "mm", "scaled_dot_product_attention", "sin",
    "softmax",
}  # fmt: skip


def refuse_counts_of_local_tokens(*operands: Node, length: object) -> None:
    """Raises `Unsupported` where q, k or v, of `length` tokens, is made of an arange over as many."""
    seen, ahead = set(operands), list(operands)
    while ahead:
        node = ahead.pop()
        if op_name(node) == "arange":
            if statically_true(value(node).shape[0] == length):
                raise Unsupported(
                    "context-parallel",
                    "q, k or v depends on indices of this rank's tokens (an arange), which are not their positions: compute it "
                    "from position_ids (Llama 4: attn_temperature_tuning=False, which is exact for fewer tokens of all ranks "
                    "than floor_scale)",
                )
        elif op_name(node) not in _NO_FACTORS and node.target is not torch.polar:
            ahead += [x for x in node.all_input_nodes if x not in seen]
            seen.update(node.all_input_nodes)
