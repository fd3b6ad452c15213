"""Padding that is data: a boolean row for all heads and queries of a sequence, of whatever shape."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.launch.launches import run
from torch_fdattn.ops import row_ranges, row_ranges_kernel
from torch_fdattn.ops.launch import broadcast_mask
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.scores import Scores
from torch_fdattn.testing import attention_oracle, gradients

KEYS = 150
QUERIES = 40 if INTERPRET else KEYS
INDEX = torch.arange(KEYS)
ROWS = {
    "padded at the end": INDEX < 77,
    "padded at the beginning": INDEX >= 61,
    "holes": INDEX % 3 > 0,
    "nothing": INDEX < 0,
    "everything": INDEX >= 0,
    "one key": INDEX == 83,
    "both sides": (INDEX >= 33) & (INDEX < 130),
    "whole tiles": (INDEX >= 64) & (INDEX < 128),
    "a hole in a block": (INDEX >= 10) & (INDEX != 90),
}


def expected_range(row: torch.Tensor) -> list[int]:
    shown = row.nonzero().flatten().tolist()
    first, end = (shown[0], shown[-1] + 1) if shown else (0, 0)
    return [first, end, int(len(shown) == end - first)]


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["(B, 1, 1, S)", "(S,)", "every other column", "expanded"])
def test_ranges(layout: str, device, monkeypatch) -> None:
    if device == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    rows = torch.stack(list(ROWS.values())).to(device)
    q, k = torch.empty(len(rows), 4, 5, 16, device=device), torch.empty(len(rows), 2, KEYS, 16, device=device)  # fmt: skip
    mask = {
        "(B, 1, 1, S)": rows[:, None, None],
        "(S,)": rows[0],
        "expanded": rows[:, None, None].expand(-1, 4, 5, -1),
        "every other column": rows.repeat_interleave(2, -1)[:, None, None, ::2],
    }[layout]
    monkeypatch.setattr(row_ranges, "MIN_KEYS", 1)
    scores = Scores(0.0, None, None, mask)
    ranges = row_ranges.empty_ranges(mask, q, k)
    run([row_ranges_kernel.ranges_launch(ranges, scores, q, k)])
    assert ranges.tolist() == [
        expected_range(row[0, 0].cpu()) for row in broadcast_mask(scores, q, k)[0]
    ]


def test_other_masks_have_none(device) -> None:
    q, k = torch.empty(2, 4, 5, 16, device=device), torch.empty(2, 2, KEYS, 16, device=device)
    for mask in (
        None,
        torch.zeros(2, 1, 1, KEYS, device=device),
        torch.ones(2, 1, 5, KEYS, dtype=torch.bool, device=device),
        torch.ones(2, 4, 1, KEYS, dtype=torch.bool, device=device),
    ):
        assert row_ranges.empty_ranges(mask, q, k) is None


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"causal": True}, marks=pytest.mark.slow),
        {"causal": True, "window": (40, -1)},
    ],
    ids=str,
)
def test_attention(options: dict, device, monkeypatch) -> None:
    monkeypatch.setattr(row_ranges, "MIN_KEYS", 1)
    rows = torch.stack(list(ROWS.values())).to(device)
    batch = len(rows)
    heads = 1 if INTERPRET else 2
    shapes = (batch, heads, QUERIES, 16), (batch, 1, KEYS, 16), (batch, 1, KEYS, 24)
    leaves = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    mask = rows[:, None, None]
    out, lse = torch_fdattn.attention(*leaves, attn_mask=mask, **options)
    want, want_lse = attention_oracle(*exact, attn_mask=mask, **options)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=5e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    grads = torch.randn_like(out), torch.where(lse.isfinite(), torch.randn_like(lse), 0.0)
    found = torch.autograd.grad((out, lse), leaves, grads)
    wanted = gradients((want, want_lse), exact, [x.double() for x in grads])
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=5e-5)


@pytest.mark.interpreter
def test_a_call_like_one_before_reads_its_own_mask(device, monkeypatch) -> None:
    monkeypatch.setattr(row_ranges, "MIN_KEYS", 1)
    shapes = (1, 2, 9, 16), (1, 1, KEYS, 16), (1, 1, KEYS, 24)
    given = [
        torch.randn(shape, device=device) for shape in shapes
    ]  # no two the same: such calls are not learnt
    exact = [x.double() for x in given]
    for name in ("padded at the end", "padded at the beginning", "holes", "everything"):
        mask = ROWS[name].to(device)[None, None, None]
        out, _ = torch_fdattn.attention(*given, attn_mask=mask)
        want, _ = attention_oracle(*exact, attn_mask=mask)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=5e-6)
