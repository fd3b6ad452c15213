"""Calls that hold an attention inside, in one node that is not opened: reported, never rewritten."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import described
from torch_fdattn.compile_backend.masks.recovery import MaskRecovery
from torch_fdattn.compile_backend.report import Unsupported

FORM = "one call"
_CALLS = {
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
    torch.ops.higher_order.flex_attention,
}


def is_opaque(node: Node) -> bool:
    return node.op == "call_function" and node.target in _CALLS


def match(node: Node, masks: MaskRecovery) -> None:
    raise Unsupported("opaque", f"{described(node)} holds its attention inside")
