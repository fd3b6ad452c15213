"""Inputs by which every result is exact, whatever the tiles: equal scores over sixteen keys, balanced whole values."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.attention.dropout import Dropout, kept_weights
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import assert_launched, expected_path

QUERIES, KEYS, SEEN, MEAN = 65, 80, 16, 3
#: Sequences: each takes the interpreter as long as the first.
BATCH = 1 if INTERPRET else 2
#: Head dims and features that have tiles of their own in `configs.py`.
HEAD_DIMS = (16, 64, 80, 128, 256, 512)
FEATURES = (
    "full",
    "causal",
    "window",
    "mask",
    "bias",
    "padding",
    "softcap, ALiBi",
    "softcap, ALiBi, window",
    "sinks",
)


#: In the interpreter as those that are left: a bias, the same with a window.
ALIKE = ("mask", "sinks", "softcap, ALiBi")


def slow_if_interpreted(value, is_slow: bool = True):
    return pytest.param(value, marks=pytest.mark.slow if INTERPRET and is_slow else ())


DTYPES = torch.float16, torch.bfloat16, slow_if_interpreted(torch.float32)


def options_of(feature: str, device: str, dtype: torch.dtype) -> tuple[dict, torch.Tensor]:
    """(what is asked for, which keys each query sees: sixteen of whole pairs, or all)."""
    pairs, row = torch.arange(KEYS) // 2, torch.arange(QUERIES)[:, None]
    some = (pairs - row) % 5 == 0  # eight pairs a query
    lens = torch.tensor([SEEN] * BATCH, dtype=torch.int32, device=device)
    first = (torch.arange(KEYS) < SEEN).expand(QUERIES, -1)
    match feature:
        case "causal":  # of queries behind all keys
            start = torch.full((BATCH,), KEYS, dtype=torch.int32, device=device)
            return dict(kv_lens=lens, q_start=start, causal=True), first
        case "window" | "softcap, ALiBi, window":
            behind = row + SEEN - 1 - torch.arange(KEYS)
            start = torch.full((BATCH,), SEEN - 1, dtype=torch.int32, device=device)
            more = dict(softcap=2.0, alibi_slopes=torch.zeros(4, device=device))
            found = dict(q_start=start, window=(SEEN - 1, 0), **(more if "," in feature else {}))
            return found, (behind >= 0) & (behind < SEEN)
        case "mask":
            return dict(attn_mask=some.to(device)), some
        case "bias":
            hidden = torch.zeros(QUERIES, KEYS, dtype=dtype).masked_fill(~some, float("-inf"))
            return dict(attn_mask=hidden.to(device).requires_grad_()), some
        case "padding":
            return dict(
                attn_mask=first[:1].expand(BATCH, 1, 1, KEYS).contiguous().to(device)
            ), first
        case "softcap, ALiBi":
            slopes = torch.zeros(4, device=device)
            return dict(kv_lens=lens, softcap=2.0, alibi_slopes=slopes), first
        case "sinks":  # of no weight
            sinks = torch.full((4,), float("-inf"), device=device)
            return dict(attn_mask=some.to(device), sinks=sinks), some
    return dict(kv_lens=lens), first


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim", [slow_if_interpreted(x, x > 16) for x in HEAD_DIMS])
@pytest.mark.parametrize("feature", [slow_if_interpreted(x, x in ALIKE) for x in FEATURES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_exact(dtype, feature, head_dim, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter has no bfloat16")
    options, seen = options_of(feature, device, dtype)
    half = torch.randint(-2, 3, (BATCH, 2, SEEN // 2, head_dim))
    values = MEAN + torch.stack([half, -half], 3).flatten(2, 3)  # each pair's mean is MEAN
    values = values.repeat(1, 1, KEYS // SEEN, 1)  # and that of any sixteen in a row
    values[..., 16:] = MEAN
    q = torch.zeros(BATCH, 4, QUERIES, head_dim, dtype=dtype, device=device, requires_grad=True)
    k = torch.randint(-4, 5, (BATCH, 2, KEYS, head_dim)).to(device, dtype).requires_grad_()
    v = values.to(device, dtype).requires_grad_()
    paths = [expected_path(f"attention_{x}", device, dtype) for x in ("forward", "backward")]
    with assert_launched(*paths):
        out, lse = torch_fdattn.attention(q, k, v, scale=1.0, **options)
        mask = [options["attn_mask"]] if feature == "bias" else []
        dq, dk, dv, *dmask = torch.autograd.grad(out, (q, k, v, *mask), torch.ones_like(out))
    assert (out == MEAN).all()
    torch.testing.assert_close(lse, torch.full_like(lse, SEEN).log())
    seen = seen.to(device).double()
    rows = seen.sum(0)[None, None, :, None] * 2 / SEEN  # two query heads a KV head
    assert torch.equal(dv, rows.expand(dv.shape).to(dtype))
    assert (dk == 0).all()  # dS times q, which is zero
    ds = (v.detach().double() - MEAN).sum(-1) / SEEN
    keys = (ds[..., None] * k.detach().double()).repeat_interleave(2, 1)
    assert torch.equal(dq, (seen @ keys).to(dtype))
    for found in dmask:  # of all sequences and query heads
        assert torch.equal(found, (seen * ds.sum((0, 1)) * 2).to(dtype))


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim", [slow_if_interpreted(x, x > 16) for x in HEAD_DIMS])
@pytest.mark.parametrize("feature", ["causal", *map(slow_if_interpreted, ("full", "mask", "bias"))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_exact_under_dropout(dtype, feature, head_dim, device):
    """Of every second weight, which doubles the others: all that is rounded has seven bits."""
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter has no bfloat16")
    options, seen = options_of(feature, device, dtype)
    start = options.setdefault("q_start", torch.zeros(BATCH, dtype=torch.int32, device=device))
    dropout = Dropout(0.5, torch.tensor([3, 5], device=device))
    q = torch.zeros(BATCH, 4, QUERIES, head_dim, dtype=dtype, device=device, requires_grad=True)
    k = torch.randint(-4, 5, (BATCH, 2, KEYS, head_dim)).to(device, dtype).requires_grad_()
    v = torch.randint(1, 6, (BATCH, 2, KEYS, head_dim)).to(device, dtype).requires_grad_()
    dout = torch.zeros(BATCH, 4, QUERIES, head_dim, dtype=dtype, device=device)
    dout[..., 0] = 1
    paths = [expected_path(f"attention_{x}", device, dtype) for x in ("forward", "backward")]
    with assert_launched(*paths):
        out, lse = torch_fdattn.attention(
            q, k, v, scale=1.0, dropout_p=dropout.p, dropout_seed=dropout.seed, **options
        )  # fmt: skip
        mask = [options["attn_mask"]] if feature == "bias" else []
        dq, dk, dv, *dmask = torch.autograd.grad(out, (q, k, v, *mask), dout)
    torch.testing.assert_close(lse, torch.full_like(lse, SEEN).log())
    positions = start[:, None] + torch.arange(QUERIES, device=device)
    keys = torch.arange(KEYS, device=device)[None]
    kept = kept_weights(dropout, positions, keys, BATCH, 4).double()
    assert 0.4 < kept.mean() < 0.6
    p = seen.to(device).double() / SEEN
    whole_k, whole_v = (x.detach().double().repeat_interleave(2, 1) for x in (k, v))
    assert torch.equal(out, (2 * p * kept @ whole_v).to(dtype))
    dv_of_heads = (2 * p * kept).mT @ dout.double()
    assert torch.equal(dv, dv_of_heads.unflatten(1, (2, 2)).sum(2).to(dtype))
    assert (dk == 0).all()  # dS times q, which is zero
    dp = dout.double() @ whole_v.mT
    ds = p * (2 * kept * dp - out.detach()[..., :1].double())
    assert torch.equal(dq, (ds @ whole_k).to(dtype))
    for found in dmask:  # of all sequences and query heads
        assert torch.equal(found, ds.sum((0, 1)).to(dtype))
