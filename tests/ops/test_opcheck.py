"""torch's own check of every op: schema, autograd registration, fake tensors, AOT dispatch."""

import pytest
import torch
from torch.library import opcheck

from torch_fdattn.testing import make_tensor

OPS = torch.ops.fdattn
LAYOUTS = pytest.mark.parametrize(
    "layouts",
    [("bhsd",) * 3, ("bshd",) * 3, ("transposed", "bshd", "bhsd"), ("slice", "packed", "every_other"), ("expanded",) * 3],
    ids=lambda names: "-".join(dict.fromkeys(names)),
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
OPTIONAL = pytest.mark.parametrize("given", [False, True], ids=["none", "given"])


def qkv(layouts, dtype, device, q_len=5):
    shapes = (2, 4, q_len, 16), (2, 2, 7, 16), (2, 2, 7, 16)
    return [
        make_tensor(shape, layout, dtype=dtype, device=device)
        for shape, layout in zip(shapes, layouts, strict=True)
    ]


def skip_on_gpu(dtype, device):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 runs on the CPU only")


def mask(given, device):
    """The mask arguments of a raw op, optional tensors given or None."""
    if not given:
        return (None, None, None, -1, -1, 0, 0, 0.25)
    lens, q_start, kv_start = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([7, 3], [9, 5], [0, 2]))
    return (lens, q_start, kv_start, 4, 0, 2, 4, 0.25)


def permuted(x):
    """The same values in another dense order of memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@LAYOUTS
@DTYPES
@OPTIONAL
@pytest.mark.parametrize("op", [OPS.attention_forward, OPS.decode_forward], ids=str)
def test_forward(op, layouts, dtype, given, device):
    skip_on_gpu(dtype, device)
    q, k, v = qkv(layouts, dtype, device)
    opcheck(op, (q, k, v, *mask(given, device), torch.float32 if given and dtype != torch.float64 else None))


@LAYOUTS
@DTYPES
@OPTIONAL
def test_backward(layouts, dtype, given, device):
    skip_on_gpu(dtype, device)
    q, k, v = qkv(layouts, dtype, device)
    arguments = mask(given, device)
    out, lse = OPS.attention_forward(q, k, v, *arguments, None)
    dout = permuted(torch.randn_like(out))
    dlse = torch.randn_like(lse).mT.contiguous().mT if given else None
    grad_dtype = torch.float32 if given and dtype != torch.float64 else None
    opcheck(OPS.attention_backward, (dout, dlse, q, k, v, out, lse, *arguments, grad_dtype))


@DTYPES
@OPTIONAL
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "transposed", "slice", "expanded"])
def test_merge(layout, dtype, given, device):
    skip_on_gpu(dtype, device)
    outs = make_tensor((3, 2, 4, 5, 16), layout, dtype=dtype, device=device)
    lses = torch.randn(3, 2, 5, 4, device=device).mT.to(torch.promote_types(dtype, torch.float32))
    opcheck(OPS.merge_states_forward, (outs, lses, torch.float32 if given and dtype != torch.float64 else None))
    out, lse = OPS.merge_states_forward(outs, lses, None)
    dlse = torch.randn_like(lse).mT.contiguous().mT if given else None
    opcheck(OPS.merge_states_backward, (permuted(torch.randn_like(out)), dlse, outs, lses, permuted(out), lse))


@LAYOUTS
@OPTIONAL
@pytest.mark.parametrize("op", [OPS.attention, OPS.decode], ids=str)
def test_differentiable(op, layouts, given, device):
    inputs = [x.requires_grad_() for x in qkv(layouts, torch.float32, device)]
    pointers = mask(given, device)[:3]
    opcheck(op, (*inputs, *pointers), {"causal": True, "window_left": 4 if given else -1})


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "transposed"])
def test_differentiable_merge(layout, device):
    outs = make_tensor((3, 2, 4, 5, 16), layout, device=device).requires_grad_()
    lses = torch.randn(3, 2, 4, 5, device=device, requires_grad=True)
    opcheck(OPS.merge_states, (outs, lses))
    opcheck(OPS.merge_states, (outs, lses), {"dtype": torch.bfloat16})
