"""Faults of the drop-ins: what FlashAttention's arguments mean."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import FLASH_ATTN, FLASH_ATTN_INSTALLED

_FOLDER = "torch_fdattn/dropins/flash_attn"
FAULTS = (
    Fault(
        "flash_attn: new keys are not attended to", f"{_FOLDER}/cache.py",
        "return cache._replace(lens=lens + k.shape[1])", "return cache._replace(lens=lens)", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: causal queries all turn alike", f"{_FOLDER}/cache.py",
        'hides = options["causal"] or any(', "hides = any(", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: a first key too many is hidden", f"{_FOLDER}/cache.py",
        "positions >= cache.leftpad[:, None]", "positions > cache.leftpad[:, None]", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: the other pairs turn", f"{_FOLDER}/rotation.py",
        "    if rotation.interleaved:\n", "    if not rotation.interleaved:\n", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: a window's sides exchanged", f"{_FOLDER}/arguments.py",
        "return max(left, -1), max(right, -1)", "return max(right, -1), max(left, -1)", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: the scale of half the head dim", f"{_FOLDER}/arguments.py",
        "scale=_scale(softmax_scale, q.shape[-1])", "scale=_scale(softmax_scale, q.shape[-1] // 2)", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: deterministic forgotten", f"{_FOLDER}/arguments.py",
        "    return ordered()\n", "    return nullcontext()\n", FLASH_ATTN,
    ),
    Fault(
        "ordered: the forward's alone", "torch_fdattn/ops/attention/autograd.py",
        "ctx.ordered = is_ordered()", "ctx.ordered = False", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: dropout of the first sequence in all", f"{_FOLDER}/attention_probs.py",
        "dropout_p, seed, b)", "dropout_p, seed, 0)", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: errors that are no RuntimeError", f"{_FOLDER}/arguments.py",
        "raise ArgumentValueError(*error.args) from error", "raise", FLASH_ATTN,
    ),
    Fault(
        "flash_attn: another is replaced unasked", f"{_FOLDER}/install.py",
        "if not replace and (", "if replace and (", FLASH_ATTN_INSTALLED,
    ),
)  # fmt: skip
