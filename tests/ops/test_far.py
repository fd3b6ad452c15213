"""Positions and windows at the ends of what there is: sums and differences of them fit into int32."""

import itertools

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.positions import FAR
from torch_fdattn.testing import make_tensor

pytestmark = pytest.mark.interpreter
#: Beyond FAR, at it, and where only some keys of a call are in reach.
STARTS = (-(2**40), -FAR, -FAR + 20, 0, FAR - 20, FAR, 2**31 - 1)
WINDOWS = ((-1, 0), (FAR, FAR), (2**40, 0), (FAR - 10, 2**31 - 1))


def tensors(device, q_len=5):
    q = make_tensor((len(STARTS), 2, q_len, 16), device=device)
    return q, *(make_tensor((len(STARTS), 1, 40, 16), device=device) for _ in "kv")


def check(op, inputs, options, gradients):
    """The kernel on `inputs` against the reference, whose positions are int64."""
    found = []
    for dtype, where in ((inputs[0].dtype, inputs[0].device), (torch.float64, "cpu")):
        given = [x.detach().to(where, dtype).requires_grad_(gradients) for x in inputs]
        moved = {n: x.to(where) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        results = op(*given, **moved)
        if gradients:
            results += torch.autograd.grad(results[0].sum(), given)
        found.append(results)
    for x, exact in zip(*found, strict=True):
        torch.testing.assert_close(x.double().cpu(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kv_start",
    [FAR, *(pytest.param(x, marks=pytest.mark.slow) for x in (-(2**40), -FAR + 20, 0))],
)
@pytest.mark.parametrize(
    ("name", "window"),
    [
        pytest.param(name, window, marks=pytest.mark.slow if (i + turn) % 2 else ())
        for turn, name in enumerate(("attention", "decode"))
        for i, window in enumerate(WINDOWS)
    ],
)
def test_starts_and_windows(name, window, kv_start, device):
    """Each sequence's queries begin elsewhere; gradients too, whose kernel goes from keys to queries."""
    inputs = tensors(device)
    starts = dict(
        q_start=torch.tensor(STARTS, device=device),
        kv_start=torch.full((len(STARTS),), kv_start, device=device),
    )
    options = starts | dict(window=window, causal=False)
    check(getattr(torch_fdattn, name), inputs, options, gradients=name == "attention")


@pytest.mark.parametrize(
    "window", [WINDOWS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in WINDOWS[1:])], ids=str
)
@pytest.mark.parametrize("name", ["attention", "decode"])
def test_strided_keys(name, window, device):
    """50 keys in blocks of 2 whose last stands almost at FAR, and queries around each of them."""
    stride = FAR // 25
    ends = [b * stride for b in (0, 1, 12, 23, 24)]
    kv_starts = (-FAR, 0, FAR)
    starts = [x + y for x, y in itertools.product(kv_starts, ends)]
    q = make_tensor((len(starts), 1, 3, 16), device=device)
    k, v = (make_tensor((len(starts), 1, 50, 16), device=device) for _ in "kv")
    options = dict(
        q_start=torch.tensor(starts, device=device),
        kv_start=torch.tensor(kv_starts, device=device).repeat_interleave(len(ends)),
        window=window, causal=False, kv_block=2, kv_stride=stride,
    )  # fmt: skip
    check(getattr(torch_fdattn, name), (q, k, v), options, gradients=name == "attention")


def test_slopes_over_the_longest_distances(device):
    q, k, v = tensors(device, q_len=2)
    count = len(STARTS)
    options = dict(
        q_start=torch.tensor(STARTS, device=device),
        kv_start=torch.tensor(STARTS[::-1], device=device),
        alibi_slopes=torch.tensor([2.0**-30, 2.0**-28], device=device),
    )
    lens = torch.full((count,), 40, dtype=torch.int32, device=device)
    check(torch_fdattn.decode, (q, k, v), options | {"kv_lens": lens, "causal": False}, False)


def test_raw_ops_clamp_windows_too(device):
    q, k, v = tensors(device)
    starts = torch.tensor(STARTS, device=device), torch.zeros(len(STARTS), device=device).int()
    for op in (torch.ops.fdattn.attention_forward, torch.ops.fdattn.decode_forward):
        found, expected = (
            op(q, k, v, None, *starts, window, window, 0, 0, 0.2, None) for window in (2**62, FAR)
        )
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
