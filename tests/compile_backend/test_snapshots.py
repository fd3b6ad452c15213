"""What every matched form becomes: the calls of ours in its rewritten graph, a line each; and what it computes."""

from __future__ import annotations

import math
import re

import torch
from expecttest import assert_expected_inline

from tests.compile_backend.harness import check, mask_of, qkv
from tests.compile_backend.mask_forms import SLOPES, transformers_mask
from tests.compile_backend.test_forms import SDPA, UNFUSED, sdpa
from tests.compile_backend.test_mask_biases import ALIBI, BIASES
from tests.compile_backend.test_masks import RECOVERED
from tests.compile_backend.test_softcap_and_sinks import with_sinks


def calls(name: str, fn, *args, mask: str | None = None) -> str:
    """The calls of ops of ours in the graph of fn, without what follows; eager's numbers and gradients."""
    try:
        found = check(fn, *args, lower="eager")
        assert "scaled_dot_product" not in found.graph
        assert "softmax" not in found.graph
        assert mask is None or mask_of(found) == mask
    except AssertionError as error:
        error.add_note(name)
        raise
    return " | ".join(re.findall(r"torch\.ops\.fdattn\.(.*?);", found.graph))


def snapshot(forms: dict, *args, masks: dict | None = None) -> str:
    masks = masks or dict.fromkeys(forms)
    lines = [f"{name}: {calls(name, fn, *args, mask=masks[name])}" for name, fn in forms.items()]
    return "\n".join(lines).replace("ᵀ", " transposed")  # expecttest writes ASCII alone


def test_sdpa():
    assert_expected_inline(
        snapshot(SDPA, *qkv()),
        """\
positional: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = None)
keywords: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.3)
its C++ name: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None)
its aten name: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None)
without dropout: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None)
a scale: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 2.0)""",
    )


def test_unfused_attention():
    assert_expected_inline(
        snapshot(UNFUSED, *qkv()),
        """\
plain: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0)
special: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0)
special, fp32: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0)
divided by a square root: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
divided by a tensor: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
q scaled: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
q and k scaled: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
k transposed scaled: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
softmax in fp32: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
float, type_as: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
dropout that is off: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
dropout of nothing: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25)
the seed's form: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25)
masked_fill: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25)
where: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 1.0)
mask before the scale: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25)
mask first in the sum: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 1.0)
einsum: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0)
einsum, operands swapped: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0)
einsum, other letters: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.5)
nn.Softmax: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0)
repeated heads: attention.default(l_q_, getitem, getitem_2, None, None, causal = False, scale = 0.25)""",
    )


def test_masks():
    forms = {name: fn for name, (_, fn) in RECOVERED.items()}
    masks = {name: mask for name, (mask, _) in RECOVERED.items()}
    assert_expected_inline(
        snapshot(forms, *qkv(), masks=masks),
        """\
causal: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = None)
window: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = None, window_left = 2)
window, eager: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25, window_left = 2)
band by triu and tril: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None, window_left = 1, window_right = 2)
symmetric window: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None, window_left = 2, window_right = 2)
one side: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None, window_left = 1)
looks ahead: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None, window_right = 1)
strictly causal, first row free: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None, attn_mask = or_)
strictly causal: attention.default(l_q_, l_k_, l_v_, None, full, causal = True, scale = None)
floor division by one: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = None)
numbers as conditions: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25)
equal, by its method: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25)
equal to a number that float32 rounds: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25)
1 - mask times the least number: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25)
positions without a jump: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = None)
repeated: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = None)
indices of at least 0: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None)
two added masks: attention.default(l_q_, l_k_, add, None, None, causal = True, scale = 0.25, window_left = 2)""",
    )


def test_alibi_and_biases():
    assert_expected_inline(
        snapshot(ALIBI, *qkv(), SLOPES),
        """\
slopes that are counted: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25, alibi_slopes = select)
distance: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25, alibi_slopes = select)
keys alone: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25, alibi_slopes = select)
two additions: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 1.0, alibi_slopes = select)
filled afterwards: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 1.0, alibi_slopes = select)""",
    )
    bias = torch.nn.Parameter(torch.randn(1, 4, 8, 8))
    assert_expected_inline(
        snapshot(BIASES, *qkv(), bias),
        """\
sdpa: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None, attn_mask = where)
added: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25, attn_mask = where)
scaled with the scores: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.5, attn_mask = where)
subtracted: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0, attn_mask = where)
with a causal mask: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 1.0, attn_mask = where)
two of them: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0, attn_mask = add_2)""",
    )


def test_others():
    def of_batches(q, k, v):
        scores = torch.baddbmm(
            torch.zeros(8, 8, 8), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.25
        )
        return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view_as(q)

    sinks, mask = torch.randn(4, requires_grad=True), torch.zeros(8, 8)
    mask[3] = -math.inf
    forms = {
        "baddbmm": of_batches,
        "softcap": lambda q, k, v: (20 * torch.tanh(q @ k.mT / 20)).softmax(-1) @ v,
        "softcap and window": lambda q, k, v: (
            (20 * torch.tanh(q @ k.mT * 0.25 / 20))
            .masked_fill(~transformers_mask(q, k, window=3), -math.inf).softmax(-1) @ v
        ),
        "sinks": lambda q, k, v: with_sinks(q, k, v, sinks),
        "safe softmax": lambda q, k, v: torch.ops.aten._safe_softmax(q @ k.mT * 0.25 + mask, -1) @ v,
    }  # fmt: skip
    assert_expected_inline(
        snapshot(forms, *qkv()),
        """\
baddbmm: attention.default(unsqueeze, unsqueeze_1, unsqueeze_2, None, None, causal = False, scale = 0.25)
softcap: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 1.0, softcap = 20.0)
softcap and window: attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25, window_left = 2, softcap = 20.0)
sinks: attention.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = 0.25, sinks = expand_1)
safe softmax: attention.default(cat, cat_1, l_v_, None, None, causal = False, scale = 0.25, attn_mask = sub)""",
    )
    one = {"decode, full": lambda q, k, v: sdpa(q, k, v), "decode, causal": lambda q, k, v: sdpa(q, k, v, transformers_mask(q, k, offset=11))}  # fmt: skip
    assert_expected_inline(
        snapshot(one, *qkv(1, 12, grad=False)),
        """\
decode, full: decode.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None)
decode, causal: decode.default(l_q_, l_k_, l_v_, None, None, causal = False, scale = None)""",
    )
