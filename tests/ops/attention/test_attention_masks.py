"""Explicit masks: what drawn cases (`test_attention_features.py`) do not single out."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import attention_oracle, check_lse, gradients, make_tensor

INF = float("inf")


def qkv(device, *, q_len=21, kv_len=37, dtype=torch.float32):
    shapes = (2, 4, q_len, 32), (2, 2, kv_len, 32), (2, 2, kv_len, 16)
    return [make_tensor(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def compare(inputs, bias, rtol, **options):
    """out, lse and all gradients against the fp64 oracle."""
    out, lse = torch_fdattn.attention(*inputs, attn_mask=bias, **options)
    leaves = [x for x in (*inputs, bias) if x.requires_grad]
    grads = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), leaves, grads)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    mask = doubles[3] if bias.requires_grad else bias
    exact = attention_oracle(*doubles[:3], attn_mask=mask, **options)
    expected = gradients(exact, doubles, [x.double() for x in grads])
    for a, b in zip((out, *found), (exact[0], *expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol)
    check_lse(lse.detach(), exact[1].detach(), torch.float32)


SHAPES = [
    (37,),
    (4, 21, 1),
    (2, 1, 21, 37),
    (21, 1),
    (1, 1),
    (2, 1, 1, 37),
    (2, 4, 21, 37),
    (1, 4, 1, 37),
]


@pytest.mark.parametrize("shape", [*SHAPES, (4, 21, 37), (1,), (2, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(shape, causal):
    q, k, v = (
        torch.randn(shape_, dtype=torch.float64, requires_grad=True)
        for shape_ in ((2, 4, 3, 16), (2, 2, 5, 16), (2, 2, 5, 16))
    )
    shape = tuple({21: 3, 37: 5}.get(size, size) for size in shape)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    slopes = torch.tensor([0.1, 0.2, 0.0, -0.3], dtype=torch.float64, requires_grad=True)

    def call(q, k, v, bias, slopes):
        return torch_fdattn.attention(
            q, k, v, causal=causal, softcap=3.0, attn_mask=bias, alibi_slopes=slopes
        )

    assert torch.autograd.gradcheck(call, (q, k, v, bias, slopes), fast_mode=True)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "shape",
    [*SHAPES[:2], *(pytest.param(x, marks=pytest.mark.slow) for x in SHAPES[2:])],
    ids=str,
)
def test_gradient_by_what_is_broadcast(shape, device):
    bias = torch.randn(shape, device=device, requires_grad=True)
    compare(qkv(device), bias, 2e-5, causal=True)


@pytest.mark.interpreter
def test_one_query_and_one_key(device):
    compare(
        qkv(device, q_len=1, kv_len=1), torch.randn(1, 1, device=device, requires_grad=True), 2e-5
    )
    compare(qkv(device, q_len=1), torch.randn(4, 1, 37, device=device, requires_grad=True), 2e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_rows_that_see_nothing(kind, device):
    """out 0, lse -inf, no gradient, whatever a loss's gradient at -inf is."""
    q, k, v = qkv(device)
    mask = torch.ones(2, 4, 21, 37, dtype=torch.bool, device=device)
    mask[0, :, 3:9] = False
    mask[1, 2] = False
    if kind == "bias":
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, -INF).requires_grad_()
    out, lse = torch_fdattn.attention(q, k, v, attn_mask=mask)
    leaves = [x for x in (q, k, v, mask) if x.requires_grad]
    dlse = torch.full_like(lse, float("nan")).masked_fill(lse > -INF, 1.0)
    for rows in ((0, slice(None), slice(3, 9)), (1, 2)):
        assert (out[rows] == 0).all()
        assert (lse[rows] == -INF).all()
    found = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse))
    assert (found[0][0, :, 3:9] == 0).all()
    assert (found[0][1, 2] == 0).all()
    assert all(torch.isfinite(x).all() for x in found)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "lowest",
    [torch.finfo(torch.float32).min, pytest.param(-3e38, marks=pytest.mark.slow), -INF],
)
def test_least_numbers_hide_keys(lowest, device):
    """As transformers writes its masks: finite, but nothing after a multiplication."""
    q, k, v = qkv(device)
    seen = torch.rand(2, 1, 21, 37, device=device) > 0.3
    seen[:, :, 5] = False
    bias = torch.zeros(seen.shape, device=device).masked_fill(~seen, lowest)
    for a, b in zip(
        torch_fdattn.attention(q, k, v, attn_mask=bias),
        torch_fdattn.attention(q, k, v, attn_mask=seen), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
def test_infinity_takes_the_row(device):
    """torch's formula gives NaN; here such keys share the row between them."""
    q, k, v = qkv(device)
    bias = torch.zeros(21, 37, device=device)
    bias[3, 5] = bias[4, 7] = bias[4, 36] = INF
    out, lse = torch_fdattn.attention(q, k, v, attn_mask=bias)
    values = v.repeat_interleave(2, 1)
    torch.testing.assert_close(out[:, :, 3], values[:, :, 5])
    torch.testing.assert_close(out[:, :, 4], (values[:, :, 7] + values[:, :, 36]) / 2)
    assert torch.isfinite(lse).all()
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()


@pytest.mark.interpreter
def test_infinity_in_the_last_row(device):
    """Which rows of a tile behind it read too: they have no gradient. It counts as 1e38, in the lse as well."""
    q, k, v = qkv(device)
    bias = torch.zeros(21, 37, device=device)
    bias[19, 2], bias[19, 3], bias[20, 3] = 9e37, INF, INF
    bias.requires_grad_()
    out, lse = torch_fdattn.attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(
        out[:, :, 19:], v.repeat_interleave(2, 1)[:, :, 3:4].expand(-1, -1, 2, -1)
    )
    torch.testing.assert_close(lse[:, :, 19:], torch.full_like(lse[:, :, 19:], 1e38))
    found = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
    taken = torch.zeros_like(bias, dtype=torch.bool)
    taken[19:], taken[19:, 3] = True, False
    expected = torch.autograd.grad(
        torch_fdattn.attention(q, k, v, attn_mask=torch.zeros_like(bias).masked_fill(taken, -INF).requires_grad_())[0]
        .square().sum(), (q, k, v),
    )  # fmt: skip
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found[3].isfinite().all()


@pytest.mark.interpreter
def test_entries_of_ten_thousand(device):
    """P comes from an lse rounded at that size, to 1e-3: so does torch's in fp32."""
    bias = 1e4 * torch.randn(2, 4, 21, 37, device=device)
    bias[..., 1] = bias[..., 0]  # two keys of the same, perhaps largest, entry
    compare(qkv(device), bias.requires_grad_(), 5e-3)


@pytest.mark.interpreter
def test_nan_where_nobody_looks(device):
    q, k, v = qkv(device)
    lens = torch.tensor([11, 30], dtype=torch.int32, device=device)
    bias = torch.randn(2, 1, 21, 37, device=device)
    results = []
    for garbage in (0.0, float("nan")):
        given = bias.clone()
        given[0, :, :, 11:], given[1, :, :, 30:] = garbage, garbage
        given.requires_grad_()
        outputs = torch_fdattn.attention(q, k, v, lens, attn_mask=given)
        leaves = (q, k, v, given)
        results.append(
            (*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), leaves))
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.interpreter
def test_nan_in_a_mask_is_seen(device):
    q, k, v = qkv(device)
    bias = torch.zeros(21, 37, device=device)
    bias[6, 2] = float("nan")
    out, _ = torch_fdattn.attention(q, k, v, attn_mask=bias)
    assert out[:, :, 6].isnan().all()
    assert torch.isfinite(out[:, :, 7:]).all()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_any_strides(dtype, device):
    """Read where it is: transposed, every other column, expanded, as a window of a larger table."""
    q, k, v = (x.detach() for x in qkv(device))
    table = torch.randn(2, 4, 80, 80, device=device)
    table = table > 0 if dtype == torch.bool else table.to(dtype)
    for mask in (
        table[:, :, 3:24, 5:42], table.mT[:, :, :21, :37], table[:, :, :42:2, :74:2],
        table[:1, :, :21, :37].expand(2, 4, 21, 37), table[0, 0, 0, :37].expand(21, 37),
    ):  # fmt: skip
        found, dense = (torch_fdattn.attention(q, k, v, attn_mask=x) for x in (mask, mask.clone()))
        for a, b in zip(found, dense, strict=True):  # other strides may be another kernel
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.interpreter
def test_the_same_bits_on_every_run(device):
    """All results at once; on a GPU of many tiles, a hundred times more."""
    gpu = device == "cuda"
    rows, keys, dim, dtype = (300, 700, 64, torch.float16) if gpu else (21, 37, 16, torch.float32)
    shapes = (2, 4, rows, dim), (2, 2, keys, dim), (2, 2, keys, dim), (keys,), (4,), (4,)
    leaves = [torch.randn(x, device=device).to(dtype).requires_grad_() for x in shapes]
    options = dict(causal=True, dropout_p=0.2, dropout_seed=torch.tensor([3, 4], device=device))

    def step():
        out, lse = torch_fdattn.attention(
            *leaves[:3], attn_mask=leaves[3], alibi_slopes=leaves[4], sinks=leaves[5], **options
        )
        loss = out.float().square().sum() + lse.sum()
        return out, lse, *torch.autograd.grad(loss, leaves)

    first = step()
    for _ in range(100 if gpu else 1):
        for a, b in zip(step(), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("sizes", [(2, 4, 0, 37), (2, 4, 21, 0), (0, 4, 21, 37)], ids=str)
def test_nothing_to_attend_to(sizes, device):
    batch, heads, q_len, kv_len = sizes
    q = torch.randn(batch, heads, q_len, 16, device=device, requires_grad=True)
    k = torch.randn(batch, 2, kv_len, 16, device=device)
    bias = torch.randn(1, kv_len, device=device, requires_grad=True)
    out, _ = torch_fdattn.attention(q, k, k, attn_mask=bias)
    dbias = torch.autograd.grad(out.sum(), bias)[0]
    assert dbias.shape == bias.shape
    assert (dbias == 0).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("broadcast", [False, True])
def test_nan_that_no_query_sees_leaves_no_gradient(broadcast, device):
    """In the last row: rows behind it, up to the tile's end, must not take it for their own."""
    q, k, v = qkv(device, q_len=17, kv_len=32)
    bias = torch.zeros(1 if broadcast else 17, 32, device=device)
    bias[-1, 20] = float("nan")  # of a key that causality hides from all
    bias.requires_grad_()
    q_start = torch.zeros(2, dtype=torch.int32, device=device)
    out, lse = torch_fdattn.attention(q, k, v, causal=True, q_start=q_start, attn_mask=bias)
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, bias)):
        assert torch.isfinite(gradient).all()


def test_long_rows_of_a_gradient(monkeypatch):
    """An expanded mask's rows lie in one place, its gradient's 2**23 elements apart: a tile spans 2**31."""
    from torch_fdattn.ops.attention import backward
    from torch_fdattn.ops.options import AttentionOptions
    from torch_fdattn.ops.scores import Scores

    seen = {}

    def run(launches):
        seen.update((x.kernel, x.options.get("WIDE")) for x in launches)

    monkeypatch.setattr(backward, "run", run)
    for keys, wide in ((2**23, True), (2**23 - 1, False)):
        q, out, dout, dq = (torch.empty(1, 1, 300, 16, device="meta") for _ in range(4))
        k, v, dk, dv = (torch.empty(1, 1, keys, 16, device="meta") for _ in range(4))
        bias = torch.empty(keys, device="meta").expand(300, -1)
        backward.launch_backward(
            dout, None, q, k, v, out, torch.empty(1, 1, 300, device="meta"), AttentionOptions(scores=Scores(attn_mask=bias)),
            dq, dk, dv, Scores(attn_mask=torch.empty(bias.shape, device="meta")),
        )  # fmt: skip
        assert seen[backward._dq_kernel] is wide
