"""Wrong calls of attention_fp8: each an error that names the argument, what was expected and what came."""

import re

import pytest
import torch

import torch_fdattn
from tests.ops.attention_fp8.inputs import quantised
from torch_fdattn import checks
from torch_fdattn.ops import launches

NAMES = "q", "k", "v", "q_scale", "k_scale", "v_scale"
F8 = torch.float8_e4m3fn


def tensor(*shape, dtype=F8):
    return torch.randn(shape).to(dtype)


#: Changed arguments, the error, a part of its message. Right is a q of (2, 4, 5, 16), a k and a v of (2, 2, 9, 16).
WRONG = {
    "bf16 q": (dict(q=tensor(2, 4, 5, 16, dtype=torch.bfloat16)), TypeError, "q must be torch.float8_e4m3fn, got torch.bfloat16; quantise what it is in bfloat16, float16 or float32: q, q_scale = torch_fdattn.quantise_per_head(q)"),
    "e5m2 k": (dict(k=tensor(2, 2, 9, 16, dtype=torch.float8_e5m2)), TypeError, "k must be torch.float8_e4m3fn, got torch.float8_e5m2; quantise what it is in bfloat16, float16 or float32: k, k_scale = torch_fdattn.quantise_per_head(k)"),
    "int8 v": (dict(v=torch.zeros(2, 2, 9, 16, dtype=torch.int8)), TypeError, "v must be torch.float8_e4m3fn, got torch.int8"),
    "list for q": (dict(q=[1.0]), TypeError, "q must be a torch.Tensor, got list"),
    "None for v_scale": (dict(v_scale=None), TypeError, "v_scale must be a torch.Tensor, got NoneType"),
    "number for q_scale": (dict(q_scale=1.0), TypeError, "q_scale must be a torch.Tensor, got float"),
    "q of rank 3": (dict(q=tensor(4, 5, 16)), ValueError, "q must have 4 dimensions"),
    "k of another batch": (dict(k=tensor(3, 2, 9, 16)), ValueError, "k must have shape (2, 2, 9, 16) like q, got (3, 2, 9, 16)"),
    "heads do not divide": (dict(q=tensor(2, 5, 5, 16)), ValueError, "q's head count must be a positive multiple of k's, got 5 query heads and 2 key heads"),
    "head dim 520": (dict(q=tensor(2, 4, 5, 520)), ValueError, "q's head_dim must be from 1 to 512, got 520"),
    "v's head dim": (dict(v=tensor(2, 2, 9, 24)), ValueError, "v's head_dim must be k's, 16, got 24; attention takes a v of another one"),
    "meta k": (dict(k=tensor(2, 2, 9, 16).to("meta")), ValueError, "k must be on cpu like q, got meta"),
    "bf16 scale": (dict(k_scale=torch.ones(2).bfloat16()), TypeError, "k_scale must be float32, got torch.bfloat16; k_scale.float() is"),
    "scalar scale": (dict(q_scale=torch.tensor(1.0)), ValueError, "q_scale must have shape (4,) or (2, 4) like q's heads, got (); one number for all heads is given as q_scale.expand(4)"),
    "scale of q's heads for v": (dict(v_scale=torch.ones(4)), ValueError, "v_scale must have shape (2,) or (2, 2) like v's heads, got (4,)"),
    "scale that would broadcast": (dict(k_scale=torch.ones(1, 2)), ValueError, "k_scale must have shape (2,) or (2, 2) like k's heads, got (1, 2)"),
    "scale of every key": (dict(k_scale=torch.ones(2, 2, 9)), ValueError, "got (2, 2, 9)"),
    "meta scale": (dict(v_scale=torch.ones(2, device="meta")), ValueError, "v_scale must be on cpu like v, got meta"),
    "fp32 out": (dict(out_dtype=torch.float32), TypeError, "out_dtype must be torch.bfloat16 or torch.float16, got torch.float32"),
    "fp8 out": (dict(out_dtype=F8), TypeError, "out_dtype must be torch.bfloat16 or torch.float16, got torch.float8_e4m3fn"),
    "no out_dtype": (dict(out_dtype=None), TypeError, "out_dtype must be torch.bfloat16 or torch.float16, got None"),
    "float kv_lens": (dict(kv_lens=torch.ones(2)), TypeError, "kv_lens must be int32 (or int64), got torch.float32"),
    "list for kv_lens": (dict(kv_lens=[1, 2]), TypeError, "kv_lens must be an int32 (or int64) tensor of shape (batch,) or None, got list"),
    "window below -1": (dict(window=(-2, 3)), ValueError, "window must be (left, right) with each at least 0"),
    "negative scale": (dict(scale=-1.0), ValueError, "scale must be a positive finite number, got -1.0"),
    "negative softcap": (dict(softcap=-1.0), ValueError, "softcap must be positive, or 0 for none, got -1.0"),
    "slopes of keys": (dict(alibi_slopes=torch.ones(2)), ValueError, "alibi_slopes must have shape (4,) like q's heads, got (2,)"),
    "causal a string": (dict(causal="yes"), TypeError, "causal must be a bool, got str"),
    "unknown layout": (dict(layout="sbhd"), ValueError, "layout must be one of bhsd, bshd, got 'sbhd'"),
    "an explicit mask": (dict(attn_mask=torch.ones(5, 9).bool()), TypeError, "unexpected keyword argument 'attn_mask'"),
}  # fmt: skip


def right():
    return dict(zip(NAMES, quantised((2, 4, 5, 16), (2, 2, 9, 16)), strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_clear_error(name):
    changed, kind, message = WRONG[name]
    launches.clear()
    with pytest.raises(kind, match=re.escape(message)):
        torch_fdattn.attention_fp8(**right() | changed)
    assert not launches


def test_scales_that_are_read_back(monkeypatch):
    torch_fdattn.attention_fp8(**right() | dict(k_scale=torch.tensor([1.0, -1.0])))
    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    torch_fdattn.attention_fp8(**right())
    for numbers in ([1.0, -1.0], [0.0, 1.0], [1.0, torch.inf], [torch.nan, 1.0]):
        with pytest.raises(
            ValueError, match="k_scale must be positive and finite, got values from"
        ):
            torch_fdattn.attention_fp8(**right() | dict(k_scale=torch.tensor(numbers)))


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (torch.randn(4, 5, 16), ValueError, "x must have 4 dimensions"),
        (torch.ones(2, 4, 5, 16).int(), TypeError, "x must be bfloat16, float16, float32 (or float64 on CPU), got torch.int32"),
        (tensor(2, 4, 5, 16), TypeError, "x must be bfloat16, float16, float32 (or float64 on CPU), got torch.float8_e4m3fn"),
        ([1.0], TypeError, "x must be a torch.Tensor, got list"),
    ],
)  # fmt: skip
def test_errors_of_quantise_per_head(x, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        torch_fdattn.quantise_per_head(x)


@pytest.mark.parametrize("name", [*NAMES[:1], *NAMES[3:], "sinks", "alibi_slopes"])
def test_gradients_are_refused(name):
    arguments = right()
    given = arguments.get(name, torch.rand(4)).detach().requires_grad_()
    message = f"attention_fp8 is forward only, and {name} requires a gradient: call it under torch.no_grad() or give {name}.detach(); torch_fdattn.attention has derivatives"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        torch_fdattn.attention_fp8(**arguments | {name: given})
    with torch.no_grad():
        out = torch_fdattn.attention_fp8(**arguments | {name: given})[0]
    assert not out.requires_grad


def test_what_was_quantised_with_a_gradient_is_refused():
    x = torch.randn(2, 4, 5, 16, requires_grad=True)
    q, q_scale = torch_fdattn.quantise_per_head(x)
    with pytest.raises(NotImplementedError, match="q requires a gradient"):
        torch_fdattn.attention_fp8(**right() | dict(q=q, q_scale=q_scale))


def test_forward_mode_and_transforms_are_refused():
    arguments = right()
    scale = arguments.pop("k_scale")

    def call(k_scale):
        return torch_fdattn.attention_fp8(**arguments, k_scale=k_scale)[1].sum()

    with pytest.raises(NotImplementedError, match="forward only, and k_scale has a tangent"):
        torch.func.jvp(call, (scale,), (scale,))
    for transform in (torch.func.grad, torch.func.hessian):
        with pytest.raises(NotImplementedError, match="attention_fp8 is forward only, and k_scale"):
            transform(call)(scale)


def test_the_raw_op_refuses_too():
    arguments = right()
    given = [arguments[name] for name in NAMES]
    given[3] = given[3].requires_grad_()
    with pytest.raises(NotImplementedError, match="not differentiable"):
        torch.ops.fdattn.attention_fp8_forward(*given, None, -1, -1, 0.25, torch.bfloat16)
