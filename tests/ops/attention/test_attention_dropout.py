"""Dropout: its bits on every path, its statistics, its seeds. (Drawn cases: `test_attention_features.py`.)"""

import functools
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_fdattn
from torch_fdattn.ops.attention.dropout import Dropout, kept_weights, philox
from torch_fdattn.testing import make_tensor

SEED = (1 << 50, 3)


@pytest.fixture(autouse=True)
def _torchs_seeds():
    yield
    torch_fdattn.set_deterministic(False)


def seed_of(device, *numbers):
    return torch.tensor(numbers or SEED, device=device)


def int32(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_philox_is_the_published_one():
    """Known answers of Random123's philox4x32 of 7 rounds."""
    for number, words in (
        (0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (-1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ):
        x = torch.tensor(number)
        assert tuple(int(word) for word in philox(x, x, x, x, x)) == words


def expected(p, q_pos, k_pos, batch=2, heads=4):
    return kept_weights(Dropout(p, seed_of("cpu")), q_pos[None], k_pos[None], batch, heads)


def bits_of_forward(q_len, kv_len, device, numbers=SEED, **options):
    """Weights are equal and values are unit vectors, 16 keys at a time: out shows which are kept."""
    q = torch.zeros(2, 4, q_len, 16, device=device)
    k = torch.zeros(2, 2, kv_len, 16, device=device)
    found = []
    for first in range(0, kv_len, 16):
        v = torch.zeros(kv_len, 16, device=device)
        v[first : first + 16] = torch.eye(16, device=device)[: kv_len - first]
        v = v.expand(2, 2, kv_len, 16)
        out, lse = torch_fdattn.attention(
            q, k, v, dropout_p=0.3, dropout_seed=seed_of(device, *numbers), **options
        )
        assert torch.equal(lse, torch_fdattn.attention(q, k, v, **options)[1])
        found.append(out != 0)
    return torch.cat(found, -1)[..., :kv_len].cpu()


def bits_of_backward(q_len, kv_len, device, numbers=SEED, **options):
    """dV under gradients that are unit vectors, 16 queries at a time."""
    q = torch.zeros(2, 4, q_len, 16, device=device)
    k, v = (torch.zeros(2, 4, kv_len, 16, device=device, requires_grad=True) for _ in "kv")
    seed = seed_of(device, *numbers)
    out, _ = torch_fdattn.attention(q, k, v, dropout_p=0.3, dropout_seed=seed, **options)
    found = []
    for first in range(0, q_len, 16):
        dout = torch.zeros(q_len, 16, device=device)
        dout[first : first + 16] = torch.eye(16, device=device)[: q_len - first]
        dv = torch.autograd.grad(out, v, dout.expand_as(out), retain_graph=True)[0]
        found.append(dv.mT != 0)
    return torch.cat(found, 2)[:, :, :q_len].cpu()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "bits", [bits_of_forward, pytest.param(bits_of_backward, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("keys", [pytest.param(16, marks=pytest.mark.slow), 32])
def test_the_references_mask(bits, keys, device):
    """Tiles of whole groups, 32 keys, and of less."""
    q_pos, k_pos = torch.arange(37 - 21, 37), torch.arange(37)
    with torch_fdattn.tiles(block_n=keys):
        found = bits(21, 37, device)
    assert torch.equal(found, expected(0.3, q_pos, k_pos))


@pytest.mark.interpreter
@pytest.mark.parametrize("bits", [bits_of_forward, bits_of_backward])
def test_heads_are_counted_from_the_seeds_third_number(bits, device):
    """As heads 3 to 6 of a call that has all of them."""
    q_pos, k_pos = torch.arange(3, 20), torch.arange(20)
    found = bits(17, 20, device, (*SEED, 3))
    assert torch.equal(found, expected(0.3, q_pos, k_pos, heads=7)[:, 3:])


@pytest.mark.interpreter
@pytest.mark.parametrize("bits", [bits_of_forward, bits_of_backward])
@pytest.mark.parametrize(
    "kind",
    [
        "shifted by 3",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("striped", "before 0", "striped as contiguous")
        ),
    ],
)
def test_every_path_to_a_position(bits, kind, device):
    """Groups of 32 keys where tiles begin with one, else key by key: the same bits for a position."""
    starts = dict(q_start=int32(5, 5, device=device))
    if kind.startswith("striped"):
        block, stride = (3, 7) if kind == "striped" else (8, 8)
        starts |= dict(kv_block=block, kv_stride=stride)
        k_pos = torch.arange(37) // block * stride + torch.arange(37) % block
    else:
        start = 3 if kind == "shifted by 3" else -32
        starts["kv_start"] = int32(start, start, device=device)
        k_pos = start + torch.arange(37)
    with torch_fdattn.tiles(block_n=32):
        found = bits(21, 37, device, **starts)
    assert torch.equal(found, expected(0.3, 5 + torch.arange(21), k_pos))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_how_many_are_kept(p):
    """Of 2**20, within five standard deviations; also of each lane, and of neighbours at once."""
    kept = expected(p, torch.arange(256), torch.arange(512)).double()
    rate = 1 - Dropout(p).threshold / 65536

    def near(x, probability):
        deviation = (probability * (1 - probability) / x.numel()) ** 0.5
        assert abs(x.mean().item() - probability) < 5 * deviation

    near(kept, rate)
    for lane in range(8):
        near(kept[..., lane::8], rate)
    near(kept[..., ::2] * kept[..., 1::2], rate**2)
    near(kept[:, :, ::2] * kept[:, :, 1::2], rate**2)
    near(kept[:, ::2] * kept[:, 1::2], rate**2)
    near(kept[:1] * kept[1:], rate**2)


def test_other_seeds_and_offsets_are_other_masks():
    q_pos, k_pos = torch.arange(64)[None], torch.arange(64)[None]
    numbers = [(0, 0), (1, 0), (0, 1), (1, 1), (2**32, 0), (0, 2**32), (-1, 1)]
    masks = [kept_weights(Dropout(0.5, seed_of("cpu", *x)), q_pos, k_pos, 1, 1) for x in numbers]
    for i, x in enumerate(masks):
        for y in masks[:i]:
            assert 0.4 < (x == y).double().mean() < 0.6


def qkv(device="cpu"):
    return [make_tensor((2, 2, 20, 16), device=device).requires_grad_() for _ in range(3)]


@pytest.mark.interpreter
def test_all_and_nothing(device):
    q, k, v = qkv(device)
    plain = torch_fdattn.attention(q, k, v)
    for p in (0.0, 1e-6):
        found = torch_fdattn.attention(q, k, v, dropout_p=p, dropout_seed=seed_of(device))
        assert torch.equal(found[0], plain[0])
    # The least there is: a drop of 1 in 2**16 is compiled into the kernels, forward and backward.
    out, _ = torch_fdattn.attention(q, k, v, dropout_p=2**-16, dropout_seed=seed_of(device))
    near, exact = ([x, *torch.autograd.grad(x.square().sum(), (q, k, v))] for x in (out, plain[0]))
    for found, expected in zip(near, exact, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    out, lse = torch_fdattn.attention(q, k, v, dropout_p=1.0, dropout_seed=seed_of(device))
    assert (out == 0).all()
    # On a CPU the reference computes what drops, torch's kernel what does not.
    torch.testing.assert_close(lse, plain[1], rtol=1e-6, atol=1e-6)
    dv = torch.autograd.grad(out.sum() + lse.sum(), v)[0]
    assert (dv == 0).all()


def test_gradcheck():
    q, k, v = (torch.randn(1, 2, 5, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, sinks, bias):
        return torch_fdattn.attention(
            q,
            k,
            v,
            causal=True,
            sinks=sinks,
            attn_mask=bias,
            dropout_p=0.4,
            dropout_seed=seed_of("cpu"),
        )

    assert torch.autograd.gradcheck(call, (q, k, v, sinks, bias), fast_mode=True)


def test_seeds_of_torch_and_of_our_own(device):
    q, k, v = (x.detach() for x in qkv(device))

    def outs():
        return [torch_fdattn.attention(q, k, v, dropout_p=0.5)[0] for _ in range(2)]

    def repeats(start, other):
        start()
        first = outs()
        other()
        start()
        assert all(torch.equal(a, b) for a, b in zip(first, outs(), strict=True))
        assert not torch.equal(*first)

    repeats(lambda: torch.manual_seed(3), lambda: None)
    repeats(lambda: torch_fdattn.set_deterministic(True, seed=3), lambda: torch.manual_seed(9))
    before = torch.get_rng_state()
    outs()
    assert torch.equal(torch.get_rng_state(), before) or device != "cpu"
    torch_fdattn.set_deterministic(False)
    repeats(lambda: torch.manual_seed(3), lambda: None)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved hooks", "reentrant"])
def test_checkpoints_and_seeds(reentrant, compiled, device):
    """Torch's generators are set back for a recomputation, ours is not: an error, not other weights' gradients."""
    torch._dynamo.reset()
    q, k, v = qkv(device)

    def step(q, k, v, **options):
        return torch_fdattn.attention(q, k, v, dropout_p=0.5, **options)[0]

    if compiled:
        step = torch.compile(step, backend="aot_eager")

    def difference(**options):
        """Of out and of what its gradient in v, in which it is linear, says that it was."""
        call = functools.partial(step, **options)
        out = checkpoint(call, q, k, v, use_reentrant=reentrant)
        v.grad = None
        out.sum().backward()
        return (out.sum() - (v.grad * v).sum()).abs() / out.abs().sum()

    assert difference() < 1e-5
    torch_fdattn.set_deterministic(True, seed=3)
    assert difference(dropout_seed=seed_of(device)) < 1e-5
    with pytest.raises(
        RuntimeError, match="dropout_seed must be given to calls with dropout in a backward"
    ):
        difference()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_graph_follows_the_setting(backend, device):
    """One seed a call, the same in forward and backward, and never one from the time of tracing."""
    torch._dynamo.reset()
    q, k, v = qkv(device)

    def step(q, k, v):
        return torch_fdattn.attention(q, k, v, dropout_p=0.5)[0].square().sum()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    found = []
    for function in (compiled, compiled, step):
        torch_fdattn.set_deterministic(True, seed=5)
        found.append(torch.autograd.grad(function(q, k, v), (q, k, v)))
    torch_fdattn.set_deterministic(True, seed=6)
    other = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    for a, b, c, d in zip(*found, other, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)
        assert not torch.equal(a, d)


WRONG = {
    "p above 1": (dict(dropout_p=1.5), ValueError, "dropout_p must be from 0 to 1, got 1.5"),
    "p below 0": (dict(dropout_p=-0.1), ValueError, "dropout_p must be from 0 to 1"),
    "p NaN": (dict(dropout_p=float("nan")), ValueError, "dropout_p must be from 0 to 1, got nan"),
    "p a string": (dict(dropout_p="x"), TypeError, "dropout_p must be a number, got str"),
    "a number as seed": (dict(dropout_p=0.1, dropout_seed=3), TypeError, "dropout_seed must be a torch.Tensor, got int"),
    "one number": (dict(dropout_p=0.1, dropout_seed=torch.tensor([3])), ValueError, "dropout_seed must have shape (2,)"),
    "int32 seed": (dict(dropout_p=0.1, dropout_seed=torch.tensor([3, 4]).int()), TypeError, "dropout_seed must be int64, got torch.int32"),
    "seed elsewhere": (dict(dropout_p=0.1, dropout_seed=torch.ones(2, device="meta").long()), ValueError, "dropout_seed must be on cpu like q, got meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    changed, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)):
        torch_fdattn.attention(*qkv(), **changed)


def test_wrong_settings():
    with pytest.raises(TypeError, match="enabled must be a bool, got 1"):
        torch_fdattn.set_deterministic(1)
    with pytest.raises(TypeError, match=r"seed must be an int or None, got 0\.5"):
        torch_fdattn.set_deterministic(True, seed=0.5)
    with pytest.raises(ValueError, match=rf"seed must be from .*, got {2**64}"):
        torch_fdattn.set_deterministic(True, seed=2**64)


def test_raw_ops_want_a_seed():
    q, k, v = (x.detach() for x in qkv())
    mask = (None, None, None, -1, -1, 0, 0, 0.25)
    with pytest.raises(ValueError, match="dropout_seed must be given to a raw op"):
        torch.ops.fdattn.attention_forward(q, k, v, *mask, None, 0.0, None, None, None, 0.5, None)
