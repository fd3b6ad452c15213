"""torch's own check of every op: schema, autograd registration, fake tensors, AOT dispatch."""

import pytest
import torch
from torch.library import opcheck

from torch_fdattn.testing import make_tensor

OPS = torch.ops.fdattn
PLAIN = ("bhsd", "bhsd", "bhsd")
LAYOUTS = [
    PLAIN,
    ("bshd", "bshd", "bshd"),
    ("transposed", "bshd", "bhsd"),
    ("slice", "packed", "every_other"),
    ("expanded", "expanded", "expanded"),
]
#: Every layout in fp32, the other dtypes contiguous; optional tensors given to every other one.
KINDS = pytest.mark.parametrize(
    ("layouts", "dtype", "given"),
    [
        *(
            # Every rank-4 layout of a dense order is treated like "transposed".
            pytest.param(
                layouts, torch.float32, i % 2 == 0, marks=pytest.mark.slow if i == 1 else ()
            )
            for i, layouts in enumerate(LAYOUTS)
        ),
        (PLAIN, torch.float32, False),
        (PLAIN, torch.bfloat16, True),
        pytest.param(PLAIN, torch.float64, False, marks=pytest.mark.slow),
    ],
    ids=lambda kind: "-".join(dict.fromkeys(kind)) if isinstance(kind, tuple) else str(kind),
)


def qkv(layouts, dtype, device):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 runs on the CPU only")
    shapes = (2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)
    return [
        make_tensor(shape, layout, dtype=dtype, device=device)
        for shape, layout in zip(shapes, layouts, strict=True)
    ]


def mask(given, device):
    """The mask arguments of a raw op, optional tensors given or None."""
    if not given:
        return (None, None, None, -1, -1, 0, 0, 0.25)
    values = ([7, 3], [9, 5], [0, 2])
    pointers = (torch.tensor(x, dtype=torch.int32, device=device) for x in values)
    return (*pointers, 4, 0, 2, 4, 0.25)


def wider(given, dtype):
    """The optional output dtype."""
    return torch.float32 if given and dtype != torch.float64 else None


def permuted(x):
    """The same values in another dense order of memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def lse_gradient(given, lse):
    return torch.randn_like(lse).mT.contiguous().mT if given else None


@KINDS
@pytest.mark.parametrize("op", [OPS.attention_forward, OPS.decode_forward], ids=str)
def test_forward(op, layouts, dtype, given, device):
    opcheck(op, (*qkv(layouts, dtype, device), *mask(given, device), wider(given, dtype)))


def test_decode_with_a_mask(device):
    softcap, slopes, sinks, attn_mask = scores(device)
    extras = None, None, softcap, slopes, sinks, False, attn_mask
    inputs = qkv(PLAIN, torch.float32, device)
    opcheck(OPS.decode_forward, (*inputs, *mask(True, device), None, *extras))


@KINDS
def test_backward(layouts, dtype, given, device):
    inputs, arguments = qkv(layouts, dtype, device), mask(given, device)
    out, lse = OPS.attention_forward(*inputs, *arguments, None)
    dout = permuted(torch.randn_like(out))
    state = (dout, lse_gradient(given, lse), *inputs, out, lse)
    opcheck(OPS.attention_backward, (*state, *arguments, wider(given, dtype)))


def scores(device):
    """Options of attention's raw ops, slopes and sinks of other dtypes than q."""
    slopes, sinks = torch.rand(2, 4, device=device), torch.rand(4, device=device).half()
    return 3.0, slopes, sinks, torch.randn(1, 7, 5, device=device).mT


@pytest.mark.parametrize(
    ("layouts", "wanted"),
    [
        (PLAIN, (True, False, False)),
        (PLAIN, (False, True, False)),
        pytest.param(LAYOUTS[1], (True, True, True), marks=pytest.mark.slow),
        *((layouts, (True, True, True)) for layouts in LAYOUTS[2:]),
    ],
    ids=lambda kind: "-".join(dict.fromkeys(map(str, kind))),
)
def test_backward_all(layouts, wanted, device):
    q, k, v = qkv(layouts, torch.float32, device)
    v = torch.cat([v, v[..., :8]], -1)
    arguments, options = mask(True, device), scores(device)
    opcheck(OPS.attention_forward, (q, k, v, *arguments, None, *options))
    out, lse = OPS.attention_forward(q, k, v, *arguments, None, *options)
    dout = permuted(torch.randn_like(out))
    state = (dout, torch.randn_like(lse), q, k, v, out, lse)
    opcheck(OPS.attention_backward_all, (*state, *wanted, *arguments, None, *options))


@KINDS
def test_merge(layouts, dtype, given, device):
    qkv(layouts, dtype, device)  # skips what the device cannot do
    outs = make_tensor((3, 2, 4, 5, 16), layouts[0], dtype=dtype, device=device)
    lses = torch.randn(3, 2, 5, 4, device=device).mT.to(torch.promote_types(dtype, torch.float32))
    opcheck(OPS.merge_states_forward, (outs, lses, wider(given, dtype)))
    out, lse = OPS.merge_states_forward(outs, lses, None)
    dout = permuted(torch.randn_like(out))
    state = (dout, lse_gradient(given, lse), outs, lses, permuted(out), lse)
    opcheck(OPS.merge_states_backward, state)


@pytest.mark.parametrize("layouts", LAYOUTS, ids=lambda names: "-".join(dict.fromkeys(names)))
@pytest.mark.parametrize(("op", "given"), [(OPS.attention, True), (OPS.decode, False)], ids=str)
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
