"""varlen_attention in the framework: opcheck, gradcheck, torch.compile, autocast, what is refused."""

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import torch_fdattn
from torch_fdattn.testing import make_tensor

OPS = torch.ops.fdattn
MASK = (None, None, None, -1, 0, 0, 0, 0.25)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def qkv(device="cpu", layout="bshd", dtype=torch.float32, v_dim=16, kv_tokens=11):
    shapes = (4, 9, 16), (2, kv_tokens, 16), (2, kv_tokens, v_dim)
    return [make_tensor(x, layout, dtype=dtype, device=device).transpose(0, 1) for x in shapes]


def where(device="cpu"):
    return int32(0, 5, 8, device=device), int32(0, 4, 11, device=device)


def pages(device="cpu"):
    k, v = (make_tensor((5, 2, 4, 16), "bshd", device=device) for _ in "kv")
    return k, v, int32(3, 1, 4, 0, device=device).view(2, 2)


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        ("bshd", False),
        ("packed", True),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (("bshd", True), ("packed", False), ("bhsd", True), ("transposed", True))
        ),
    ],
)
def test_opcheck(layout, given, device):
    q, k, v = qkv(device, layout, v_dim=24 if given else 16)
    options = ()
    arguments = MASK
    if given:
        bounds = (int32(*x, device=device) for x in ((3, 6), (2, 4), (0, 1)))
        arguments = (*bounds, 4, 0, 0, 0, 0.25)
        slopes, sinks = torch.rand(2, 4, device=device), torch.rand(4, device=device).half()
        seed = torch.tensor([1, 2], device=device)
        options = 3.0, slopes, sinks, torch.randn(2, 1, 5, 7, device=device), 0.25, seed
    wider = torch.float32 if given else None
    opcheck(
        OPS.varlen_attention_forward, (q, k, v, *where(device), None, *arguments, wider, *options)
    )
    out, lse = OPS.varlen_attention_forward(
        q, k, v, *where(device), None, *arguments, None, *options
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if given else None
    state = dout, dlse, q, k, v, out, lse, *where(device)
    opcheck(OPS.varlen_attention_backward, (*state, *arguments, wider, *options))
    flags = (given,) * 3
    opcheck(OPS.varlen_attention_backward_all, (*state, *flags, *arguments, None, *options))


def test_opcheck_of_pages(device):
    k, v, table = pages(device)
    q = qkv(device)[0]
    lens = int32(7, 3, device=device)
    arguments = (q, k, v, where(device)[0], None, table, lens, *MASK[1:], None)
    opcheck(OPS.varlen_attention_forward, arguments)


@pytest.mark.parametrize("keys", [False, True], ids=["self", "cross"])
def test_opcheck_of_the_composite(keys, device):
    q, k, v = (x.requires_grad_() for x in qkv(device, kv_tokens=11 if keys else 9))
    begins = where(device) if keys else where(device)[:1]
    opcheck(OPS.varlen_attention, (q, k, v, *begins), {"causal": True, "window_left": 4})


@pytest.mark.parametrize("slopes_by", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_gradcheck(slopes_by):
    shapes = (4, 2, 16), (5, 1, 16), (5, 1, 24)
    q, k, v = (torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes)
    slopes = (torch.rand(slopes_by, dtype=torch.float64) * 0.1).requires_grad_()
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, slopes, sinks, bias):
        out, lse = torch_fdattn.varlen_attention(
            q, k, v, int32(0, 1, 3), int32(0, 1, 5), causal=True, softcap=2.0, alibi_slopes=slopes,
            sinks=sinks, attn_mask=bias, dropout_p=0.3, dropout_seed=torch.tensor([3, 4]),
        )  # fmt: skip
        return out, lse[:, :3]

    assert torch.autograd.gradcheck(call, (q, k, v, slopes, sinks, bias), fast_mode=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("use", ["out", "both"])
def test_compiled_training_step(use, backend, device):
    leaves = [x.requires_grad_() for x in qkv(device)]
    leaves.append(torch.rand(4, device=device, requires_grad=True))

    def step(q, k, v, slopes):
        out, lse = torch_fdattn.varlen_attention(
            q * 2, k, v, *where(device), causal=True, alibi_slopes=slopes
        )
        return out.square().sum() + (lse[:, :8].square().sum() if use == "both" else 0.0)

    expected = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert a.stride() == b.stride()


def test_no_recompile_over_lengths(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, *begins: torch_fdattn.varlen_attention(q, k, v, *begins, causal=True),
        backend=counter, fullgraph=True,
    )  # fmt: skip
    inputs = qkv(device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for begins in (((0, 5, 8), (0, 4, 11)), ((0, 0, 9), (0, 11, 11)), ((0, 1, 1), (0, 2, 3))):
            given = [int32(*x, device=device) for x in begins]
            found = compiled(*inputs, *given)
            expected = torch_fdattn.varlen_attention(*inputs, *given, causal=True)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_symbolic_token_counts(device):
    """Batches of other sizes are one graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, begins: torch_fdattn.varlen_attention(q, q, q, begins)[0],
        backend=counter, fullgraph=True, dynamic=True,
    )  # fmt: skip
    for tokens, begins in ((9, (0, 5, 8)), (12, (0, 1, 7)), (30, (0, 3, 29))):
        q, given = torch.randn(tokens, 4, 16, device=device), int32(*begins, device=device)
        torch.testing.assert_close(
            compiled(q, given), torch_fdattn.varlen_attention(q, q, q, given)[0]
        )
    assert counter.frame_count == 1


def test_autocast(device):
    inputs = [x.requires_grad_() for x in qkv(device)]
    with torch.autocast(device, dtype=torch.float16):
        out, lse = torch_fdattn.varlen_attention(*inputs, *where(device))
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    for gradient in torch.autograd.grad(out.float().sum(), inputs):
        assert gradient.dtype == torch.float32


def test_dropout_draws_its_seed(device):
    """By torch's generator, a seed a call; keys that are dropped for one sequence are not for the next."""
    q, k, v = qkv(device, kv_tokens=9)
    begins = int32(0, 4, 8, device=device)
    q[4:8], k[4:8], v[4:8] = q[:4], k[:4], v[:4]

    def call():
        return torch_fdattn.varlen_attention(q, k, v, begins, dropout_p=0.5)[0]

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:4], first[4:8])


def test_double_backward_is_an_error():
    q, k, v = (x.requires_grad_() for x in qkv())
    out, _ = torch_fdattn.varlen_attention(q, k, v, *where())
    with pytest.raises(NotImplementedError, match="varlen_attention has no second derivative"):
        torch.autograd.grad(out.sum(), (q, k, v), create_graph=True)


def test_pages_have_no_gradient():
    k, v, table = pages()
    q, begins = qkv()[0], where()[0]
    expected = torch_fdattn.varlen_attention(q, k, v, begins, page_table=table)
    q.requires_grad_()
    results = torch_fdattn.varlen_attention(q, k, v, begins, page_table=table)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
        with pytest.raises(NotImplementedError, match="no gradient where page_table is given"):
            result.sum().backward(retain_graph=True)
    with pytest.raises(
        NotImplementedError, match=r"^varlen_attention has no forward-mode derivative where page"
    ):
        torch.func.jvp(
            lambda q: torch_fdattn.varlen_attention(q, k, v, begins, page_table=table)[0],
            (q.detach(),), (q.detach(),),
        )  # fmt: skip


PAGES = dict(zip(("k", "v", "page_table"), pages(), strict=True)) | {"cu_seqlens_k": None}
WRONG = {
    "q of rank 4": (dict(q=torch.ones(1, 9, 4, 16)), ValueError, "q must have 3 dimensions (tokens, heads, head_dim), got shape (1, 9, 4, 16)"),
    "k of rank 4": (dict(k=torch.ones(1, 9, 4, 16)), ValueError, "k must have 3 dimensions (tokens, heads, head_dim)"),
    "head dim": (dict(q=torch.ones(9, 4, 520)), ValueError, "q's head_dim must be from 1 to 512, got 520"),
    "other head dim of k": (dict(k=torch.ones(11, 2, 24)), ValueError, "k must have shape (11, 2, 16) like q, got (11, 2, 24)"),
    "other tokens of v": (dict(v=torch.ones(10, 2, 16)), ValueError, "v must have shape (11, 2, 16) like k, got (10, 2, 16)"),
    "heads": (dict(q=torch.ones(9, 3, 16)), ValueError, "q's head count must be a positive multiple of k's, got 3 query heads and 2 key heads"),
    "dtype of k": (dict(k=torch.ones(11, 2, 16).half()), TypeError, "k must have dtype torch.float32 like q, got torch.float16"),
    "k elsewhere": (dict(k=torch.ones(11, 2, 16, device="meta")), ValueError, "k must be on cpu like q, got meta"),
    "float begins": (dict(cu_seqlens_q=torch.zeros(3)), TypeError, "cu_seqlens_q must be int32 (or int64), got torch.float32"),
    "begins of rank 2": (dict(cu_seqlens_q=int32(0, 9)[None]), ValueError, "cu_seqlens_q must have shape (sequences + 1,): where each sequence begins, and where the last ends, got (1, 2)"),
    "no begins": (dict(cu_seqlens_q=int32()), ValueError, "cu_seqlens_q must have shape (sequences + 1,)"),
    "begins elsewhere": (dict(cu_seqlens_q=int32(0, 5, 8, device="meta")), ValueError, "cu_seqlens_q must be on cpu like q, got meta"),
    "begins a list": (dict(cu_seqlens_q=[0, 5, 8]), TypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
    "begins of None": (dict(cu_seqlens_q=None), TypeError, "cu_seqlens_q must be a torch.Tensor, got NoneType"),
    "other sequences of k": (dict(cu_seqlens_k=int32(0, 11)), ValueError, "cu_seqlens_k must have shape (3,) like cu_seqlens_q, got (2,)"),
    "begins of k missing": (dict(cu_seqlens_k=None), ValueError, "cu_seqlens_k must be given where k has other tokens than q, got None with 11 tokens of k and 9 of q"),
    "kv_lens": (dict(kv_lens=int32(1, 2, 3)), ValueError, "kv_lens must have shape (2,) like the sequences of cu_seqlens_q, got (3,)"),
    "q_start": (dict(q_start=torch.ones(2)), TypeError, "q_start must be int32 (or int64), got torch.float32"),
    "slopes": (dict(alibi_slopes=torch.ones(9, 4)), ValueError, "alibi_slopes must have shape (2, 4) like q's heads, got (9, 4)"),
    "sinks": (dict(sinks=torch.ones(2)), ValueError, "sinks must have shape (4,) like q's heads, got (2,)"),
    "scale": (dict(scale=0.0), ValueError, "scale must be a positive finite number, got 0.0"),
    "window": (dict(window=3), TypeError, "window must be two ints (left, right) or None, got 3"),
    "kv_block": (dict(kv_block=2), ValueError, "kv_block and kv_stride must both be 0"),
    "dropout_p": (dict(dropout_p=1.5), ValueError, "dropout_p must be from 0 to 1, got 1.5"),
    "page_table with packed keys": (dict(page_table=int32(0, 0)[:, None], cu_seqlens_k=None), ValueError, "k must have 4 dimensions"),
    "page_table and begins of k": (PAGES | dict(cu_seqlens_k=int32(0, 4, 11)), ValueError, "cu_seqlens_k must be None where page_table is given"),
    "page_table of another batch": (PAGES | dict(page_table=int32(0, 1)[None]), ValueError, "page_table must have shape (2, pages a sequence) like the sequences of cu_seqlens_q, got (1, 2)"),
    "int64 page_table": (PAGES | dict(page_table=torch.zeros(2, 2).long()), TypeError, "page_table must be int32, got torch.int64"),
    "empty pages": (PAGES | dict(k=torch.ones(5, 2, 0, 16), v=torch.ones(5, 2, 0, 16)), ValueError, "k's pages must hold at least one token (dimension 2), got 0"),
    "2**29 tokens": (dict(q=torch.ones(1, 4, 16).expand(2**29, 4, 16)), ValueError, "q must hold fewer than 2**29 tokens, got 536870912"),
    "attn_mask of other heads": (dict(attn_mask=torch.ones(3, 5, 7)), ValueError, "attn_mask must be broadcastable to (2, 4, any, any) (batch, heads, queries, keys), got shape (3, 5, 7)"),
    "attn_mask of no keys": (dict(attn_mask=torch.ones(5, 0)), ValueError, "attn_mask must be broadcastable to (2, 4, any, any)"),
    "attn_mask of few queries": (dict(attn_mask=torch.ones(4, 7)), ValueError, "attn_mask must have entries for the longest sequence's 5 queries, got shape (4, 7)"),
    "attn_mask of few keys": (dict(attn_mask=torch.ones(2, 1, 1, 6)), ValueError, "attn_mask must have entries for the longest sequence's 7 keys, got shape (2, 1, 1, 6)"),
    "attn_mask of integers": (dict(attn_mask=torch.ones(5, 7).int()), TypeError, "attn_mask must be boolean, or bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    changed, kind, message = WRONG[name]
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"
    call = dict(zip(names, (*qkv(), *where()), strict=True)) | changed
    with pytest.raises(kind, match=re.escape(message)):
        torch_fdattn.varlen_attention(**call)


def test_raw_backward_checks_its_own_inputs():
    q, k, v = qkv()
    out, lse = OPS.varlen_attention_forward(q, k, v, *where(), None, *MASK, None)
    state = [out, lse, q, k, v, out, lse]
    for at, message in (
        (0, "dout must have shape (9, 4, 16) like q and v, got (8, 4, 16)"),
        (1, "dlse must have shape (4, 9) like q, got (3, 9)"),
        (5, "out must have shape (9, 4, 16) like q and v, got (8, 4, 16)"),
        (6, "lse must have shape (4, 9) like q, got (3, 9)"),
    ):
        wrong = [x[:-1] if i == at else x for i, x in enumerate(state)]
        with pytest.raises(ValueError, match=re.escape(message)):
            OPS.varlen_attention_backward(*wrong, *where(), *MASK, None)
