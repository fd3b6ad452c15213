"""What drawn cases of varlen_attention do not single out."""

import pytest
import torch

import torch_fdattn
from torch_fdattn import checks
from torch_fdattn.testing import assert_launched, expected_path, make_tensor

pytestmark = pytest.mark.interpreter
INF = float("inf")


def int32(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def qkv(device, tokens=40, kv_tokens=40, dtype=torch.float32):
    shapes = (tokens, 2, 16), (kv_tokens, 1, 16), (kv_tokens, 1, 16)
    return [torch.randn(x, device=device).to(dtype).requires_grad_() for x in shapes]


def outputs_and_gradients(call, leaves):
    out, lse = call(*leaves)
    seen = lse.masked_fill(lse == -INF, 0.0)
    return out, lse, *torch.autograd.grad(out.square().sum() + seen.square().sum(), leaves)


def test_is_attention_of_each_sequence(device):
    q, k, v = qkv(device, 23, 39)
    cu_seqlens = int32(0, 17, 23, device=device), int32(0, 20, 39, device=device)
    found = outputs_and_gradients(
        lambda *x: torch_fdattn.varlen_attention(*x, *cu_seqlens, causal=True, window=(9, 0)),
        (q, k, v),
    )
    for rows, keys in ((slice(0, 17), slice(0, 20)), (slice(17, 23), slice(20, 39))):
        own = [x[where].transpose(0, 1)[None] for x, where in ((q, rows), (k, keys), (v, keys))]
        own = [x.detach().clone().requires_grad_() for x in own]
        expected = outputs_and_gradients(
            lambda *x: torch_fdattn.attention(*x, causal=True, window=(9, 0)), own
        )
        torch.testing.assert_close(found[1][:, rows], expected[1][0])
        for x, y, where in zip(
            (found[0], *found[2:]), (expected[0], *expected[2:]), (rows, rows, keys, keys), strict=True
        ):  # fmt: skip
            torch.testing.assert_close(x[where], y[0].transpose(0, 1))


@pytest.mark.parametrize("sinks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_of_no_sequence(sinks, device):
    """NaN there reaches nothing, and their out is 0, their lse -inf (no sink's), their gradients 0."""
    q, k, v = (x.detach() for x in qkv(device, 20, 20))
    begins = int32(0, 0, 9, 17, device=device)
    results = []
    for garbage in (0.0, float("nan")):
        for x in (q, k, v):
            x[17:] = garbage
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        given = dict(sinks=torch.ones(2, device=device, dtype=torch.bfloat16)) if sinks else {}
        out, lse = torch_fdattn.varlen_attention(*leaves, begins, causal=True, **given)
        assert (out[17:] == 0).all()
        assert (lse[:, 17:] == -INF).all()
        dlse = torch.full_like(lse, 2.0)
        dlse[:, 17:] = float("nan")
        grads = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse))
        assert all((x[17:] == 0).all() for x in grads)
        results.append((out, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("tokens", "kv_tokens", "begins", "kv_begins"),
    [
        (5, 7, (0,), (0,)),
        (0, 7, (0, 0, 0), (0, 4, 7)),
        (0, 0, (0, 0), (0, 0)),
        (5, 0, (0, 2, 5), (0, 0, 0)),
        (5, 7, (0, 2, 5), (0, 0, 0)),
    ],
    ids=["no sequences", "no queries", "nothing", "no keys", "keys of no sequence"],
)
def test_empty(tokens, kv_tokens, begins, kv_begins, device):
    """Defined results, and zero gradients of parameters, too."""
    q, k, v = qkv(device, tokens, kv_tokens)
    slopes = torch.ones(len(begins) - 1, 2, device=device, requires_grad=True)
    sinks = torch.full((2,), -INF, device=device, requires_grad=True)
    out, lse = torch_fdattn.varlen_attention(
        q,
        k,
        v,
        int32(*begins, device=device),
        int32(*kv_begins, device=device),
        alibi_slopes=slopes,
        sinks=sinks,
    )
    assert (out == 0).all()
    assert (lse == -INF).all()
    for x in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, slopes, sinks)):
        assert (x == 0).all()


def test_more_sequences_than_one_step_of_the_search_compares(device):
    """131 sequences, most of them empty: each sees its own."""
    lengths = torch.arange(131) % 33 // 30
    begins = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().to(device)
    tokens = int(begins[-1])
    q, k, v = (x.detach() for x in qkv(device, tokens, tokens))
    owner = torch.repeat_interleave(torch.arange(131, device=device), lengths.to(device))
    seen = owner[:, None] == owner[None, :]
    q = q[:, :1]
    out, lse = torch_fdattn.varlen_attention(q, k, v, begins)
    by_heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected, expected_lse = torch_fdattn.attention(*by_heads, attn_mask=seen)
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    torch.testing.assert_close(lse, expected_lse[0])


@pytest.mark.slow
def test_int64_and_strided_cu_seqlens(device):
    q, k, v = (x.detach() for x in qkv(device))
    begins = int32(0, 17, 33, device=device)
    expected = torch_fdattn.varlen_attention(q, k, v, begins)
    for other in (begins.long(), torch.stack([begins, begins + 1], 1)[:, 0]):
        found = torch_fdattn.varlen_attention(q, k, v, other)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "begins",
    [
        (0, 30, 10, 99),
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ((-5, 7, 2**31 - 1, 40), (3, 20, 20, 40), (99, -1, 0, 0))
        ),
    ],
    ids=str,
)
def test_nonsense_in_cu_seqlens_stays_within_the_tensors(begins, device):
    """Results are undefined, but nothing outside is touched (for the sanitizer, and the interpreter's memory)."""
    whole = [torch.full((120, *x.shape[1:]), float("nan"), device=device) for x in qkv(device)]
    inputs = [x[40:80] for x in whole]
    for x, values in zip(inputs, qkv(device), strict=True):
        x.copy_(values.detach())
    leaves = [x.requires_grad_() for x in inputs]
    pointers = int32(*begins, device=device), int32(0, 9, 30, 40, device=device)
    out, lse = torch_fdattn.varlen_attention(*leaves, *pointers, causal=True)
    torch.autograd.grad(out, leaves, torch.zeros_like(out))
    assert out.shape == (40, 2, 16)
    assert lse.shape == (2, 40)


def test_beginnings_are_checked_where_asked_for(device, monkeypatch):
    q, k, v = (x.detach() for x in qkv(device))
    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    for begins in ((0, 30, 10), (1, 40), (0, 41)):
        with pytest.raises(ValueError, match="cu_seqlens_q must grow from 0 to at most 40, got"):
            torch_fdattn.varlen_attention(q, k, v, int32(*begins, device=device))
    begins = int32(0, 30, device=device), int32(0, 41, device=device)
    with pytest.raises(ValueError, match="cu_seqlens_k must grow from 0 to at most 40"):
        torch_fdattn.varlen_attention(q, k, v, *begins)
    torch_fdattn.varlen_attention(q, k, v, int32(0, 12, 40, device=device))
    on_meta = [x.to("meta") for x in (q, k, v)]
    begins, lens = int32(0, 12, 40, device="meta"), int32(3, 4, device="meta")
    assert torch_fdattn.varlen_attention(*on_meta, begins, kv_lens=lens)[0].shape == q.shape


def test_only_lse_has_a_gradient(device):
    q, k, v = qkv(device)
    begins = int32(0, 17, 33, device=device)
    _, lse = torch_fdattn.varlen_attention(q, k, v, begins, causal=True)
    found = torch.autograd.grad(lse[:, :33].square().sum(), (q, k, v))
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    _, lse = torch_fdattn.varlen_attention(*exact, begins.cpu(), causal=True)
    expected = torch.autograd.grad(lse[:, :33].square().sum(), exact)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=1e-4)
    assert (found[2] == 0).all()


def test_chunked_prefill_over_pages(device):
    """Two chunks of two prompts, each appended and then attended: as the prompts at once."""
    q, k, v = (x.detach() for x in qkv(device, 42, 42))
    begins = int32(0, 13, 42, device=device)
    expected, expected_lse = torch_fdattn.varlen_attention(q, k, v, begins, causal=True)
    k_pages, v_pages = (torch.full((14, 1, 4, 16), float("nan"), device=device) for _ in "kv")
    table = torch.full((2, 8), -1, dtype=torch.int32)
    free = torch.randperm(14).int()
    table[0, :4], table[1] = free[:4], free[4:12]
    table = table.to(device)
    done = [0, 0]
    for ends in ((9, 20), (13, 29)):
        rows = [
            torch.arange(start + first, start + end)
            for start, first, end in zip((0, 13), done, ends, strict=True)
        ]
        for b, row in enumerate(rows):
            before = int32(done[b], device=device)
            torch_fdattn.paged_append_kv(
                k_pages,
                v_pages,
                table[b : b + 1],
                *(x[row].transpose(0, 1)[None] for x in (k, v)),
                before,
            )
        chunk = torch.cat(rows).to(device)
        out, lse = torch_fdattn.varlen_attention(
            q[chunk], k_pages, v_pages, int32(0, len(rows[0]), len(chunk), device=device),
            page_table=table, kv_lens=int32(*ends, device=device), causal=True,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[chunk])
        torch.testing.assert_close(lse, expected_lse[:, chunk])
        done = list(ends)


def test_keys_on_pages_outside_the_cache_are_masked(device):
    q = torch.randn(5, 2, 16, device=device)
    k, v = (torch.randn(3, 1, 4, 16, device=device) for _ in "kv")
    table, lens = int32(2, 3, 1, -7, 0, 99, device=device).view(2, 3), int32(11, 9, device=device)
    begins = int32(0, 3, 5, device=device)
    found = torch_fdattn.varlen_attention(q, k, v, begins, page_table=table, kv_lens=lens)
    for rows, pages, last in ((slice(0, 3), (2, 1), 7), (slice(3, 5), (0,), 4)):
        own = (torch.cat([x[page] for page in pages], 1)[None, :, :last] for x in (k, v))
        expected = torch_fdattn.attention(q[rows].transpose(0, 1)[None], *own)
        torch.testing.assert_close(found[0][rows], expected[0][0].transpose(0, 1))
        torch.testing.assert_close(found[1][:, rows], expected[1][0])


@pytest.mark.slow  # drawn cases count them, too
def test_launches(device):
    q, k, v = qkv(device)
    paths = [
        expected_path(f"varlen_attention_{way}", device, q.dtype) for way in ("forward", "backward")
    ]
    with assert_launched(*paths):
        torch_fdattn.varlen_attention(q, k, v, int32(0, 40, device=device))[0].sum().backward()


@pytest.mark.parametrize("shape", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_gradients_of_parameters_alone(shape, device):
    q, k, v = (x.detach() for x in qkv(device))
    begins = int32(0, 17, 33, device=device)
    slopes = (torch.rand(shape, device=device) * 0.1).requires_grad_()
    sinks = torch.randn(2, device=device, requires_grad=True)
    out, lse = torch_fdattn.varlen_attention(
        q, k, v, begins, causal=True, alibi_slopes=slopes, sinks=sinks
    )
    found = torch.autograd.grad(out.square().sum() + lse[:, :33].sum(), (slopes, sinks))
    exact = [x.detach().double().cpu() for x in (q, k, v, slopes, sinks)]
    parameters = [x.requires_grad_() for x in exact[3:]]
    out, lse = torch_fdattn.varlen_attention(
        *exact[:3], begins.cpu(), causal=True, alibi_slopes=parameters[0], sinks=parameters[1]
    )
    expected = torch.autograd.grad(out.square().sum() + lse[:, :33].sum(), parameters)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=1e-4)


def test_layouts_are_kept(device):
    """Out in q's order of memory, gradients in their inputs'; slices of a fused projection are read as they are."""
    fused = torch.randn(9, 4, 16, device=device)
    q, k, v = (x.requires_grad_() for x in (fused[:, :2], fused[:, 2:3], fused[:, 3:]))
    heads_first = make_tensor((2, 9, 16), device=device).transpose(0, 1)
    begins = int32(0, 9, device=device)
    out, _ = torch_fdattn.varlen_attention(heads_first, k, v, begins)
    assert out.stride() == heads_first.stride()
    out, _ = torch_fdattn.varlen_attention(q, k, v, begins)
    for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert x.is_contiguous()
