"""CPU tensors by torch's flash kernel: how calls are cut into parts, and what the kernel alone would get wrong."""

import random
from unittest import mock

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.attention import cpu
from torch_fdattn.ops.attention.cpu_parts import only_part, parts
from torch_fdattn.ops.attention.reference import attention_backward_reference, attention_reference
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.positions import Mask, visible
from torch_fdattn.ops.scores import NO_SCORES, Scores

pytestmark = pytest.mark.skipif(INTERPRET, reason="the interpreter runs the kernels")

NAN = float("nan")


@pytest.fixture(autouse=True)
def with_the_kernel(monkeypatch):
    """Where the rest of the suite takes the reference alone, too."""
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", False)


def draw_mask(rng: random.Random, batch: int, kv_len: int) -> Mask:
    def ints(low: int, high: int) -> torch.Tensor | None:
        if rng.random() < 0.5:
            return None
        return torch.tensor([rng.randint(low, high) for _ in range(batch)], dtype=torch.int32)

    blocks = rng.choice([(0, 0), (0, 0), (4, 8)])
    left, right = rng.choice([-1, -1, 0, 3, 200]), rng.choice([-1, 0, 0, 4])
    bounds = ints(-1, kv_len + 2), ints(-5, kv_len + 5), ints(-5, 5)
    return Mask(*bounds, left, right, *blocks)


def test_the_only_part_of_a_call_is_the_one_that_parts_gives():
    rng, found = random.Random(0), 0
    for _ in range(400):
        rows, keys = rng.choice([(1, 1), (5, 5), (5, 7), (1, 7)])
        q, k = torch.empty(2, 4, rows, 16), torch.empty(2, 2, keys, 16)
        mask = rng.choice([Mask(), Mask(window_right=0), draw_mask(rng, 2, keys)])
        part = only_part(q, k, mask, NO_SCORES)
        if part is not None:
            found += 1
            assert [part] == list(parts(q, k, mask, NO_SCORES))
    assert found > 100


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_parts_see_what_the_mask_says(first):
    """Each pair of a query and a key in exactly one part, or hidden, to the letter."""
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        batch, q_len, kv_len = rng.randint(1, 3), rng.choice([1, 7, 300]), rng.choice([1, 9, 500])
        mask = draw_mask(rng, batch, kv_len)
        q, k = torch.empty(batch, 2, q_len, 16), torch.empty(batch, 1, kv_len, 16)
        expected = visible(mask, q_len, kv_len, q.device).expand(batch, -1, -1)
        seen = torch.zeros(batch, q_len, kv_len)
        for part in parts(q, k, mask, NO_SCORES, alone=rng.random() < 0.3):
            own = seen[part.sequences, part.rows, part.keys]
            if part.causal:
                own += torch.ones(own.shape[1:]).tril()
            else:
                own += 1.0 if part.bias is None else (part.bias == 0)[:, 0]
        assert torch.equal(seen, expected.float()), f"seed {seed}: {mask}"


def test_bands_of_a_window_are_narrow():
    """Or a window would cost what all keys do."""
    q = torch.empty(1, 1, 4096, 16)
    cut = list(parts(q, q, Mask(window_left=255, window_right=0), NO_SCORES))
    assert (
        sum((x.rows.stop - x.rows.start) * (x.keys.stop - x.keys.start) for x in cut) < 4096 * 600
    )


def tensors(
    batch=2, heads=4, kv_heads=2, q_len=33, kv_len=70, dim=16, v_dim=16, dtype=torch.float32
):
    made = torch.Generator().manual_seed(0)
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)  # fmt: skip
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def lengths(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


CALLS = {
    "full": (Mask(), NO_SCORES),
    "causal, bottom right": (Mask(window_right=0), NO_SCORES),
    "causal, more queries than keys": (Mask(lengths(20, 9), window_right=0), NO_SCORES),
    "lengths": (Mask(lengths(70, 41)), NO_SCORES),
    "window": (Mask(window_left=9, window_right=2), NO_SCORES),
    "positions": (Mask(None, lengths(3, 50), lengths(-2, 7), 30, 0), NO_SCORES),
    "block-cyclic": (Mask(window_right=0, kv_block=4, kv_stride=8), NO_SCORES),
    "ALiBi": (Mask(window_right=0), Scores(alibi_slopes=torch.tensor([0.1, -0.2, 0.3, 0.0]))),
    "sinks": (Mask(window_right=0), Scores(sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]))),
    "additive mask": (Mask(window_right=0), Scores(attn_mask=torch.arange(70) * 0.1)),
    "boolean mask": (Mask(), Scores(attn_mask=torch.arange(70) % 3 > 0)),
    "a mask of infinities": (
        Mask(), Scores(attn_mask=torch.tensor([float("inf"), -float("inf"), 0.0, -1e39]).repeat(18)[:70]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_the_definition(name, groups, monkeypatch):
    """In fp32 beside fp64; groups: as kernels of torch before 2.13 take heads."""
    if not groups:
        monkeypatch.setattr(cpu, "TAKES_GROUPS", False)
    (mask, scores), (q, k, v) = CALLS[name], tensors(v_dim=24)
    wide = [x.double() for x in (q, k, v)]
    expected, expected_lse = attention_reference(*wide, mask, 0.25, scores)
    with mock.patch.object(cpu, "FORWARD", wraps=cpu.FORWARD) as kernel:
        out, lse = cpu.attention_on_cpu(q, k, v, mask, 0.25, scores)
    assert kernel.called
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)

    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    state = expected.float(), expected_lse.float(), mask, 0.25, scores
    asked = Scores(0.0, None, scores.sinks, None)
    with mock.patch.object(cpu, "_BACKWARD", wraps=cpu._BACKWARD) as kernel:
        *grads, of_scores = cpu.attention_backward_on_cpu(
            dout, None, q, k, v, *state, score_grads=asked
        )
    assert kernel.called
    *exact, exact_scores = attention_backward_reference(
        dout.double(), None, *wide, expected, expected_lse, mask, 0.25, scores
    )
    for grad, value in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad.double(), value, rtol=1e-4, atol=1e-4)
    if scores.sinks is not None:
        torch.testing.assert_close(of_scores.sinks.double(), exact_scores.sinks, rtol=1e-4, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize("name", ["softcap", "dropout", "gradient of lse", "gradient of a mask"])
def test_what_the_kernel_cannot_is_the_references(name):
    q, k, v = (x.requires_grad_() for x in tensors(q_len=70))
    options = {
        "softcap": dict(softcap=2.0),
        "dropout": dict(dropout_p=0.5, dropout_seed=torch.tensor([1, 2])),
        "gradient of a mask": dict(attn_mask=torch.randn(70, requires_grad=True)),
    }.get(name, {})
    with (
        mock.patch.object(cpu, "FORWARD", wraps=cpu.FORWARD) as forward,
        mock.patch.object(cpu, "_BACKWARD", wraps=cpu._BACKWARD) as backward,
    ):
        out, lse = torch_fdattn.attention(q, k, v, causal=True, **options)
        (out.sum() + (lse.sum() if name == "gradient of lse" else 0.0)).backward()
    assert forward.called == name.startswith("gradient")
    assert not backward.called


def test_nothing_behind_lengths_and_windows_is_read():
    q, k, v = tensors()
    clean = [x.clone() for x in (k, v)]
    for x in (k, v):
        x[0, :, 40:], x[1, :, 65:] = NAN, NAN
        x[:, :, :2] = NAN  # the first query of the shorter sequence stands at 7 and sees 3 … 7
    given = dict(causal=True, window=(4, 0))
    out, lse = torch_fdattn.attention(q, k, v, lengths(40, 65), **given)
    expected = torch_fdattn.attention(q, *clean, lengths(40, 65), **given)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)


def test_rows_without_keys_and_rows_whose_lse_is_zero():
    """The kernel says 0 of both."""
    q, k, v = tensors(batch=1, q_len=3, kv_len=3)
    q[:, :, 1] = 0.0
    entries = torch.tensor([[False] * 3, [True, False, False], [True] * 3])
    q.requires_grad_()
    out, lse = torch_fdattn.attention(q, k, v, attn_mask=entries)
    assert (lse[:, :, 0] == float("-inf")).all()
    assert (lse[:, :, 1] == 0.0).all()
    assert (out[:, :, 0] == 0.0).all()
    torch.testing.assert_close(out[:, :, 1], v[:, :, 0].repeat_interleave(2, 1))
    with mock.patch.object(cpu, "attention_backward_reference") as reference:
        out.sum().backward()
    assert not reference.called
    assert (q.grad[:, :, 0] == 0.0).all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("kv_len", [3, 600])
def test_nan_is_not_lost(kv_len):
    """The kernel says 0 of a row all of whose scores are NaN, where it has one block of keys."""
    q, k, v = tensors(batch=2, q_len=3, kv_len=kv_len)
    q[0, 0, 1, 0] = k[1] = NAN
    out, lse = torch_fdattn.attention(q, k, v)
    expected = torch.zeros(2, 4, 3, dtype=torch.bool)
    expected[0, 0, 1] = expected[1] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().all(-1), expected)
    assert torch.equal(out.isnan().any(-1), expected)


def test_strided_last_dims_and_tensors_without_elements():
    """Wrong numbers and a crash of the kernel alone."""
    q, k, v = tensors()
    expected = torch_fdattn.attention(q, k, v)
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    torch.testing.assert_close(torch_fdattn.attention(*strided), expected)
    out, lse = torch_fdattn.attention(q, k[:, :, :0], v[:, :, :0])
    assert (out == 0.0).all()
    assert (lse == float("-inf")).all()
    assert torch_fdattn.attention(q[:, :, :0], k, v)[0].shape == (2, 4, 0, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lse_of_half_precision_is_that_of_float32(dtype):
    q, k, v = tensors(dtype=dtype)
    exact = attention_reference(*(x.double() for x in (q, k, v)), Mask(), 0.25)[1]
    lse = torch_fdattn.attention(q, k, v, scale=0.25)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "sinks", "softcap", "float64", "pages"])
def test_a_batch_invariant_decode_has_the_bits_of_each_sequence(name):
    q, k, v = tensors(batch=40, heads=6, q_len=1, kv_len=64, dim=32, v_dim=32)
    lens = torch.arange(40, dtype=torch.int32) + 1
    options: dict = dict(batch_invariant=True)
    options |= {"sinks": dict(sinks=torch.randn(6)), "softcap": dict(softcap=9.0)}.get(name, {})
    if name == "float64":
        q, k, v = q.double(), k.double(), v.double()
    op, inputs = torch_fdattn.decode, (q, k, v, lens)
    if name == "pages":  # one of them invalid
        op, table = torch_fdattn.paged_decode, torch.arange(160, dtype=torch.int32).view(40, 4)
        table[2, 0] = -1
        pages = [x.view(40, 2, 4, 16, 32).transpose(1, 2).flatten(0, 1) for x in (k, v)]
        inputs = q, *pages, table, lens
    out, lse = op(*inputs, **options)
    for b in range(40):
        own = [x[b : b + 1] if len(x) == 40 else x for x in inputs]
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), op(*own, **options), rtol=0, atol=0)  # fmt: skip


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_torchs_default_dtype_changes_nothing(name, default):
    (mask, scores), (q, k, v) = CALLS[name], tensors()
    expected = cpu.attention_on_cpu(q, k, v, mask, 0.25, scores)
    given = *expected, mask, 0.25, scores
    grads = cpu.attention_backward_on_cpu(expected[0], None, q, k, v, *given)[:3]
    torch.set_default_dtype(default)
    try:
        found = cpu.attention_on_cpu(q, k, v, mask, 0.25, scores)
        found_grads = cpu.attention_backward_on_cpu(expected[0], None, q, k, v, *given)[:3]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close((*found, *found_grads), (*expected, *grads), rtol=0, atol=0)


def hidden_from_some() -> dict[str, tuple]:
    """q, k, v and options, where rows do not see what is NaN or overflows."""
    q, k, v = tensors(batch=1, heads=2, q_len=4, kv_len=8)
    entries = torch.zeros(4, 8)
    entries[0, 7] = NAN
    late = k.clone()
    late[:, :, 7] = NAN
    large = k.clone()
    large[:, :, 2] = 3e38
    return {
        "a mask's entry": (q, k, v, dict(causal=True, attn_mask=entries)),
        "a key": (q, late, v, dict(causal=True)),
        "a score": (q * 1e4, large, v, dict(attn_mask=torch.arange(8) != 2)),
    }


@pytest.mark.parametrize("name", hidden_from_some())
def test_what_is_hidden_does_not_matter(name, monkeypatch):
    q, k, v, options = hidden_from_some()[name]
    dout = torch.ones(1, 2, 4, 16)

    def results() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = torch_fdattn.attention(*leaves, **options)
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    found = results()
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", True)
    torch.testing.assert_close(found, results(), equal_nan=True, rtol=1e-5, atol=1e-5)
    assert found[1][:, :, 0].isfinite().all()


def test_expanded_tensors():
    """Slow and inexact, or as large as the scores, where torch's kernel had them."""
    q, k, v = tensors(q_len=300, kv_len=300)
    q, k = (x[:, :, :1].expand_as(x) for x in (q, k))
    entries = (torch.rand(300, 300) < 0.7).expand(2, 4, 300, 300)
    seen = []

    def kernel(*args, **kwargs):
        seen.append((*args[:3], kwargs["attn_mask"]))
        return forward(*args, **kwargs)

    forward = cpu.FORWARD
    with mock.patch.object(cpu, "FORWARD", kernel):
        out, _ = torch_fdattn.attention(q, k, v, attn_mask=entries)
    assert all(x.stride(-2) >= 16 for call in seen for x in call[:3])
    assert all(call[3].shape == (1, 1, 300, 300) for call in seen)
    mask = Mask(), 16**-0.5, Scores(attn_mask=entries)
    expected, _ = attention_reference(q.double(), k.double(), v.double(), *mask)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_many_small_sequences_go_to_the_reference_together():
    q, k, v = tensors(batch=64, q_len=1, kv_len=16)
    lens = torch.arange(64, dtype=torch.int32) % 17
    with mock.patch.object(cpu, "FORWARD", wraps=cpu.FORWARD) as kernel:
        torch_fdattn.decode(q, k, v, lens)
        assert not kernel.called
        torch_fdattn.decode(q[:8], k[:8], v[:8], lens[:8])
        assert kernel.called


def test_the_reference_alone(monkeypatch):
    """TORCH_FDATTN_REFERENCE=1: the bits of the definition."""
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", True)
    q, k, v = tensors()
    found = torch_fdattn.attention(q, k, v, causal=True, scale=0.25)
    expected = attention_reference(q, k, v, Mask(window_right=0), 0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_products_that_overflow_are_nan():
    """As the reference has it; the kernel says 0."""
    q = torch.tensor([3.0, -3.0]).repeat(8)[None, None, None]
    out, lse = torch_fdattn.attention(q, torch.full((1, 1, 1, 16), 3e38), torch.ones(1, 1, 1, 16))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_autocast_changes_nothing_of_a_backward():
    """Where the reference answers."""
    q, k, v = tensors()
    q.requires_grad_()
    loss = torch_fdattn.attention(q, k, v, softcap=5.0)[0].square().sum()
    (expected,) = torch.autograd.grad(loss, q, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(loss, q)
    assert torch.equal(found, expected)
