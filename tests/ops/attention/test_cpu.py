"""CPU tensors by torch's flash kernel: how calls are cut into parts, and what the kernel alone would get wrong."""

import random
from unittest import mock

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.attention import cpu
from torch_fdattn.ops.attention.cpu_parts import parts
from torch_fdattn.ops.attention.reference import attention_backward_reference, attention_reference
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.positions import Mask, visible
from torch_fdattn.ops.scores import NO_SCORES, Scores

pytestmark = pytest.mark.skipif(INTERPRET, reason="the interpreter runs the kernels")

NAN = float("nan")


def draw_mask(rng: random.Random, batch: int, kv_len: int) -> Mask:
    def ints(low: int, high: int) -> torch.Tensor | None:
        if rng.random() < 0.5:
            return None
        return torch.tensor([rng.randint(low, high) for _ in range(batch)], dtype=torch.int32)

    blocks = rng.choice([(0, 0), (0, 0), (4, 8)])
    left, right = rng.choice([-1, -1, 0, 3, 200]), rng.choice([-1, 0, 0, 4])
    bounds = ints(-1, kv_len + 2), ints(-5, kv_len + 5), ints(-5, 5)
    return Mask(*bounds, left, right, *blocks)


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
        monkeypatch.setattr(cpu, "_TAKES_GROUPS", False)
    (mask, scores), (q, k, v) = CALLS[name], tensors(v_dim=24)
    wide = [x.double() for x in (q, k, v)]
    expected, expected_lse = attention_reference(*wide, mask, 0.25, scores)
    with mock.patch.object(cpu, "_FORWARD", wraps=cpu._FORWARD) as kernel:
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
        mock.patch.object(cpu, "_FORWARD", wraps=cpu._FORWARD) as forward,
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
    out.sum().backward()
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


def test_a_batch_invariant_decode_has_the_bits_of_each_sequence():
    q, k, v = tensors(batch=5, q_len=1)
    lens = lengths(70, 70, 13, 70, 1)
    out, lse = torch_fdattn.decode(q, k, v, lens, batch_invariant=True)
    for b in range(5):
        own = [x[b : b + 1] for x in (q, k, v, lens)]
        alone = torch_fdattn.decode(*own, batch_invariant=True)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), alone, rtol=0, atol=0)


def test_the_reference_alone(monkeypatch):
    """TORCH_FDATTN_REFERENCE=1: the bits of the definition."""
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", True)
    q, k, v = tensors()
    found = torch_fdattn.attention(q, k, v, causal=True, scale=0.25)
    expected = attention_reference(q, k, v, Mask(window_right=0), 0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
