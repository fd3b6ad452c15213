"""Explicit masks of packed sequences: counted from each sequence's own first query and key."""

import pytest
import torch
from torch import Tensor

import torch_fdattn
from torch_fdattn.ops.library import INTERPRET

Q_LENS, KV_LENS = (5, 0, 19, 1), (7, 3, 20, 0)
HEADS, KV_HEADS, DIM = 4, 2, 16
ROWS, COLUMNS = max(Q_LENS) + 2, max(KV_LENS) + 3
DTYPE = torch.float32 if INTERPRET else torch.float64
pytestmark = pytest.mark.interpreter
#: Interpreted, many small sequences take their time.
SLOW = [pytest.mark.slow] if INTERPRET else []
SHAPES = [
    (4, HEADS, ROWS, COLUMNS), (4, 1, ROWS, COLUMNS), (1, HEADS, ROWS, COLUMNS), (HEADS, ROWS, COLUMNS), (ROWS, COLUMNS),
    (4, 1, 1, COLUMNS), (4, 1, ROWS, 1), (HEADS, 1, 1), (COLUMNS,), (),
]  # fmt: skip


def begins(lengths: tuple[int, ...], device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def qkv(device) -> list[Tensor]:
    """With two tokens of no sequence behind the last."""
    counts = sum(Q_LENS) + 2, sum(KV_LENS) + 2, sum(KV_LENS) + 2
    heads = HEADS, KV_HEADS, KV_HEADS
    dtype = torch.float32 if torch.device(device).type == "cuda" else DTYPE
    return [
        torch.randn(n, h, DIM, dtype=dtype, device=device).requires_grad_()
        for n, h in zip(counts, heads, strict=True)
    ]


def one_by_one(q, k, v, mask: Tensor, **options) -> tuple[Tensor, Tensor]:
    """`attention` of each sequence by itself, under its part of the mask."""
    mask = mask[(None,) * (4 - mask.dim())]
    outs, lses, row, key = [], [], 0, 0
    for b, (m, n) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        own = mask[b : b + 1] if mask.shape[0] > 1 else mask
        own = own[:, :, : m if mask.shape[2] > 1 else None, : n if mask.shape[3] > 1 else None]
        parts = (
            x[at : at + c].transpose(0, 1)[None]
            for x, at, c in ((q, row, m), (k, key, n), (v, key, n))
        )
        out, lse = torch_fdattn.attention(*parts, attn_mask=own.expand(1, HEADS, m, n), **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
        row, key = row + m, key + n
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        pytest.param(shape, causal, marks=[] if quick else SLOW)
        for i, shape in enumerate(SHAPES)
        for causal, quick in ((False, i in (2, 6)), (True, i == 0))
    ],
)
def test_equals_one_sequence_after_the_other(shape, causal, device) -> None:
    q, k, v = qkv(device)
    bias = torch.randn(shape, dtype=q.dtype, device=device).requires_grad_()
    out, lse = torch_fdattn.varlen_attention(
        q, k, v, begins(Q_LENS, q.device), begins(KV_LENS, q.device), causal=causal, attn_mask=bias
    )
    tokens = sum(Q_LENS)
    assert not out[tokens:].any()
    assert lse[:, tokens:].isneginf().all()
    expected, expected_lse = one_by_one(q, k, v, bias, causal=causal)
    close = dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:tokens], expected, **close)
    torch.testing.assert_close(lse[:, :tokens], expected_lse, **close)
    dout = torch.randn_like(expected)
    leaves = [q, k, v, bias]
    found = torch.autograd.grad(out[:tokens], leaves, dout)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("of", "to"),
    [
        ((1, 1, 1, COLUMNS), (1, 1, ROWS, COLUMNS)),
        pytest.param((4, 1, 1, COLUMNS), (4, HEADS, ROWS, COLUMNS), marks=SLOW),
        pytest.param((1, 1, ROWS, 1), (1, 1, ROWS, COLUMNS), marks=SLOW),
    ],
)
def test_expanded_masks(of, to, device) -> None:
    """Strides of 0 are no dims of 1: the gradient has every entry."""
    q, k, v = qkv(device)
    bias = torch.randn(of, dtype=q.dtype, device=device).expand(to)
    found = []
    for own in (bias.detach(), bias.contiguous()):
        out, _ = torch_fdattn.varlen_attention(
            q, k, v, begins(Q_LENS, q.device), begins(KV_LENS, q.device), attn_mask=own.requires_grad_()
        )  # fmt: skip
        found.append(torch.autograd.grad(out.square().sum(), [q, k, v, own]))
    for expanded, whole in zip(*found, strict=True):
        torch.testing.assert_close(expanded, whole)


def test_expanded_rows_fewer_than_a_sequence_has(kernel_device: str) -> None:
    """Only checked where lengths lie on the host: elsewhere nothing is written behind the mask's own rows."""
    from torch_fdattn.ops.attention.backward import launch_backward
    from torch_fdattn.ops.options import AttentionOptions
    from torch_fdattn.ops.packed import Packed, by_heads
    from torch_fdattn.ops.scores import Scores

    tokens, rows = 40, 3
    q, k, v, out, dout, dq, dk, dv = (
        by_heads(torch.randn(tokens, 1, DIM, device=kernel_device)) for _ in range(8)
    )
    lse = torch.zeros(1, tokens, device=kernel_device)
    bias = torch.zeros(1, 1, 1, tokens, device=kernel_device).expand(-1, -1, rows, -1)
    memory = torch.full((1, 1, tokens, tokens), 7.0, device=kernel_device)
    launch_backward(
        dout, None, q, k, v, out, lse, AttentionOptions(scale=0.25, scores=Scores(attn_mask=bias)), dq, dk, dv,
        Scores(attn_mask=memory[:, :, :rows]), packed=Packed(begins((tokens,), kernel_device)),
    )  # fmt: skip
    assert memory[:, :, :rows].ne(7).all()
    assert memory[:, :, rows:].eq(7).all()


@pytest.mark.parametrize("rows", [pytest.param(1, marks=SLOW), ROWS])
def test_booleans_and_pages(rows: int, device) -> None:
    """Of pages only the valid keys need entries; a row that sees nothing is zero."""
    with torch.no_grad():
        q, k, v = qkv(device)
        mask = torch.rand(4, HEADS, rows, max(KV_LENS), device=q.device) < 0.6
        mask[2, :, 0] = False
        page, table = 4, torch.zeros(4, 6, dtype=torch.int32)
        pages = [
            torch.full((12, page, KV_HEADS, DIM), float("nan"), dtype=q.dtype, device=q.device)
            for _ in "kv"
        ]
        free = iter(torch.randperm(12).tolist())
        for b, (first, n) in enumerate(zip(begins(KV_LENS, "cpu").tolist(), KV_LENS, strict=False)):
            for j in range(-(-n // page)):
                table[b, j] = next(free)
                count = min(page, n - j * page)
                for cache, x in zip(pages, (k, v), strict=True):
                    at = first + j * page
                    cache[table[b, j], :count] = x[at : at + count]
        out, lse = torch_fdattn.varlen_attention(
            q, *(x.transpose(1, 2) for x in pages), begins(Q_LENS, q.device), page_table=table.to(q.device),
            kv_lens=torch.tensor(KV_LENS, dtype=torch.int32, device=q.device), causal=True, attn_mask=mask,
        )  # fmt: skip
        expected, expected_lse = one_by_one(q, k, v, mask, causal=True)
    tokens = sum(Q_LENS)
    torch.testing.assert_close(out[:tokens], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[:, :tokens], expected_lse, rtol=1e-4, atol=1e-5)
    assert expected_lse.isneginf().any()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((4, HEADS, ROWS, COLUMNS), id="own", marks=SLOW),
        pytest.param((4, 1, ROWS, COLUMNS), id="shared"),
    ],
)
def test_entries_that_no_pair_has(shape, device) -> None:
    """May be anything, and have no gradient."""
    q, k, v = qkv(device)
    bias = torch.full(shape, float("nan"), dtype=q.dtype, device=q.device)
    for b, (m, n) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        bias[b, :, :m, :n] = torch.randn(m, n)
    used = ~bias.isnan()
    out, _ = torch_fdattn.varlen_attention(
        q,
        k,
        v,
        begins(Q_LENS, q.device),
        begins(KV_LENS, q.device),
        attn_mask=bias.requires_grad_(),
    )
    assert out.isfinite().all()
    found = torch.autograd.grad(out.square().sum(), [bias, q, k, v])
    assert all(x.isfinite().all() for x in found)
    assert not found[0][~used].any()
    assert found[0][used].count_nonzero() > 0.9 * used.sum()
    again = torch_fdattn.varlen_attention(
        q, k, v, begins(Q_LENS, q.device), begins(KV_LENS, q.device), attn_mask=bias
    )[0]
    assert torch.equal(torch.autograd.grad(again.square().sum(), bias)[0], found[0])


def test_forward_mode() -> None:
    if INTERPRET:
        pytest.skip("float64 runs on the CPU only")
    q, k, v = (x.detach() for x in qkv("cpu"))
    bias, tangent = (torch.randn(HEADS, ROWS, COLUMNS, dtype=DTYPE) for _ in range(2))

    def ours(bias):
        return torch_fdattn.varlen_attention(
            q, k, v, begins(Q_LENS, "cpu"), begins(KV_LENS, "cpu"), attn_mask=bias
        )

    _, (out, lse) = torch.func.jvp(ours, (bias,), (tangent,))
    step = 1e-6
    above, below = ours(bias + step * tangent), ours(bias - step * tangent)
    seen = above[1].isfinite()
    torch.testing.assert_close(out, (above[0] - below[0]) / (2 * step), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        lse[seen], ((above[1] - below[1]) / (2 * step))[seen], rtol=1e-6, atol=1e-7
    )
