"""Inside `context_parallel`: attention that no call shows which could go over the ranks, and would see one rank's tokens.

It is known by what is called (kernels, `flex_attention`, layers) or, where a model writes it out, by its softmax.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention
from torch._ops import OpOverload, OpOverloadPacket

_CALLS = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
    flex_attention,
    *(
        getattr(torch, name)
        for name in dir(torch)
        if name.startswith(("_scaled_dot_product", "_flash_attention", "_triton_scaled_dot"))
    ),
    *(
        overload
        for name in (
            "attention_fp8",
            "decode",
            "paged_decode",
            "decode_out",
            "paged_decode_out",
        )
        for op in [getattr(torch.ops.fdattn, name)]
        for overload in (op, op.default)
    ),
)
#: Namespaces of ops of torch, and what those of other libraries' have in their names (`_flash_attn3_…` of a hub's).
_TORCH, _LIBRARIES = ("aten", "torch_attn"), ("flash_attn", "xformers")
#: In names of these libraries' ops that go token by token.
_NO_ATTENTION = ("norm", "rotary", "cross_entropy", "silu", "swiglu")
#: What turns scores into weights, and the first step of those that write it as exp(scores - logsumexp).
_SOFTMAXES = (
    F.softmax, torch.softmax, torch._softmax, torch.special.softmax, Tensor.softmax,
    F.log_softmax, torch.log_softmax, torch._log_softmax, torch.special.log_softmax, Tensor.log_softmax,
    torch.logsumexp, torch.special.logsumexp, Tensor.logsumexp,
)  # fmt: skip
#: What models of transformers name the attention that they write out.
_WRITTEN_OUT = "eager_attention_forward"
_FRAMES = 6  # from a mode's handler up to the caller of a torch function


def name_of_local_attention(func: object, args: tuple, kwargs: dict, tokens: int) -> str | None:
    """What to call it, where a call of torch's is attention over a rank's own `tokens`; None where it is none."""
    if func in _CALLS:
        return getattr(func, "__name__", str(func))
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return str(func) if _is_kernel(str(func)) else None
    if func in _SOFTMAXES:
        return _name_of_softmax(args[0] if args else kwargs.get("input"), tokens)
    return None


def _is_kernel(op: str) -> bool:
    namespace, name = op.split(".")[:2]
    if namespace not in _TORCH and not any(x in namespace for x in _LIBRARIES):
        return False
    if any(x in name for x in (*_NO_ATTENTION, "backward", "bwd")):
        return False
    return any(x in name for x in ("attention", "attn", "fwd"))


def _name_of_softmax(scores: Tensor | None, tokens: int) -> str | None:
    """Of scores (B, H, …, tokens, tokens) or (B · H, tokens, tokens), one more with a sink, or of any in a function of that name."""
    if isinstance(scores, Tensor) and scores.dim() >= 3:
        rows, keys = scores.shape[-2:]
        if rows == tokens and keys in (tokens, tokens + 1):
            if torch.compiler.is_compiling():  # where sizes may have no numbers
                return "attention written out (a softmax over scores of this rank's tokens)"
            remedy = ""
            if scores.dim() == 3:
                remedy = "; if it is no attention, flatten it to two dims"
            return f"attention written out (a softmax over {tuple(scores.shape)} scores{remedy})"
    if torch.compiler.is_compiling():  # which gives its frames' names to nobody
        return None
    frame = sys._getframe(3)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == _WRITTEN_OUT:
            return f'{_WRITTEN_OUT} (attn_implementation="eager")'
        frame = frame.f_back
    return None


def refuse_local(name: str) -> None:
    """Raises NotImplementedError, or while Dynamo traces what `refuse_compiled` does."""
    message = f"{name} inside context_parallel would attend to this rank's tokens only"
    remedy = (
        "call F.scaled_dot_product_attention or torch_fdattn.attention (of models of transformers, use "
        'attn_implementation="fdattn")'
    )
    if (
        torch.compiler.is_compiling()
    ):  # also of eager `flex_attention`, which calls Dynamo by itself
        refuse_compiled(f"{message}: in eager code {remedy}; in compiled code")
    raise NotImplementedError(f"{message}: {remedy}")


def refuse_compiled(message: str) -> None:
    """Raises RuntimeError while Dynamo traces, which ends the compilation.

    What traced code raises by itself only breaks the graph, and after that Dynamo (2.13) calls methods of tensors with other
    operands: results were wrong in silence. It takes NotImplementedError for a limit of its own.
    """
    raise RuntimeError(
        f"{message}: call the compiled model outside of context_parallel, made by torch.compile(model, "
        'backend="fdattn", options={"context_parallel": {"group": group, "shards": shards}}), or leave attention out of what '
        "is compiled (torch.compiler.disable)"
    )


# What torch.compiler.assume_constant_result would set, without its import of torch._dynamo: Dynamo calls it.
refuse_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
