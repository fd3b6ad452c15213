"""Hopper's forward against the oracle, on an sm_90."""

import itertools

import pytest
import torch

from tests.ops.decode.inputs import int32
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.testing import attention_oracle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)


ALL = Mask()


def attend(q, k, v, mask=ALL, scale=None):
    from torch_fdattn.launch.launches import run
    from torch_fdattn.ops.attention.hopper.launch import forward_launch, takes

    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    assert takes(q, k, v, out, mask)
    options = AttentionOptions(mask, q.shape[3] ** -0.5 if scale is None else scale)
    run((forward_launch(q, k, v, options, out, lse, counter),))
    assert counter.item() == 0
    return out, lse


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def check(q, k, v, mask=ALL, lens=None):
    found = attend(q, k, v, mask)
    kept = torch.arange(k.shape[2], device="cuda") < (k.shape[2] if lens is None else mask.kv_lens[:, None])  # fmt: skip
    k, v = (x.masked_fill(~kept.view(-1, 1, k.shape[2], 1), 0.0) for x in (k, v))
    options = dict(causal=mask.window_right == 0)
    if mask.window_left >= 0:
        options["window"] = (mask.window_left, mask.window_right)
    if mask.q_start is not None:
        options["q_start"] = mask.q_start.tolist()
    exact, exact_lse = attention_oracle(q.double(), k.double(), v.double(), lens, **options)
    torch.testing.assert_close(found[1].double(), exact_lse, rtol=1e-3, atol=1e-3)
    error = (found[0].double() - exact).norm() / exact.norm()
    assert error < (4e-3 if q.dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("queries", "keys"), [(128, 128), (512, 512), (1, 700), (300, 1000), (1000, 1000), (200, 70)]
)
def test_against_the_oracle(queries, keys, head_dim, causal, dtype):
    q = normal(2, 4, queries, head_dim, dtype=dtype)
    k, v = (normal(2, 2, keys, head_dim, dtype=dtype) for _ in range(2))
    check(q, k, v, Mask(window_right=0 if causal else -1))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(0, 0), (100, 0), (300, 20), (1000, 0)])
def test_windows(window, head_dim):
    q, k, v = (normal(1, h, 700, head_dim) for h in (4, 2, 2))
    check(q, k, v, Mask(window_left=window[0], window_right=window[1]))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_beyond_which_is_nan(causal, head_dim):
    q, k, v = (normal(4, h, 600, head_dim) for h in (4, 2, 2))
    lens = [600, 0, 129, 1]
    for x, (b, n) in itertools.product((k, v), enumerate(lens)):
        x[b, :, n:] = torch.nan
    check(q, k, v, Mask(int32(*lens, device="cuda"), window_right=0 if causal else -1), lens)


def test_positions():
    q, k, v = normal(2, 4, 100, 128), normal(2, 2, 900, 128), normal(2, 2, 900, 128)
    check(q, k, v, Mask(q_start=int32(800, 3, device="cuda"), window_right=0))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_same_bits_and_exact_means(head_dim):
    """The mean of small integers has no rounding: registers that wgmma reads too late would show."""
    q = torch.zeros(2, 8, 2048, head_dim, device="cuda", dtype=torch.bfloat16)
    k = normal(2, 2, 2048, head_dim)
    v = torch.randint(-8, 9, k.shape, device="cuda").bfloat16()
    expected = v.double().mean(2, keepdim=True).repeat_interleave(4, 1).expand(q.shape).bfloat16()
    for _ in range(100):
        assert torch.equal(attend(q, k, v)[0], expected)


def test_two_streams():
    inputs = [[normal(1, 8, 4096, 128) for _ in range(3)] for _ in range(2)]
    expected = [attend(*each, Mask(window_right=0))[0] for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, each in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(attend(*each, Mask(window_right=0))[0])
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))
