"""Explicit masks of decode: what they hide is as if it were not in the cache."""

import functools
import math

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops import library
from torch_fdattn.testing import make_tensor

from .inputs import caches, int32

pytestmark = pytest.mark.interpreter
CAPACITY = 300
#: Keys that each sequence's mask hides at the front, as left padding does; of the third it hides all.
HIDDEN = (0, 7, CAPACITY, 130)


def made(device):
    """q of three tokens (4, 6, 3, 32), k and v of two heads."""
    _, k, v, _ = caches(device, lens=(CAPACITY,) * 4, capacity=CAPACITY)
    return make_tensor((4, 6, 3, 32), device=device, dtype=torch.float32), k, v


def padding(device):
    return torch.arange(CAPACITY, device=device) >= int32(*HIDDEN, device=device)[:, None]


def forms(device):
    """The padding in every form that a mask may have, by name."""
    rows = padding(device)[:, None, None]
    added = torch.zeros_like(rows, dtype=torch.float32).masked_fill(~rows, -math.inf)
    whole = rows.expand(-1, 6, 3, -1)
    return {
        "bool": rows,
        "bfloat16": added.bfloat16(),
        "heads": whole[:, :, :1].contiguous(),
        "queries": whole[:, :1].contiguous(),
        "every entry": whole.contiguous(),
        "transposed": added.expand(-1, 6, 3, -1).transpose(2, 3).contiguous().transpose(2, 3),
        "misaligned": torch.cat((rows[..., :1], rows), -1)[..., 1:],
    }


@functools.cache  # of equal draws: the form of the mask makes no difference
def expected(device):
    """Each sequence over the keys that it is to see, moved to the front of the cache."""
    torch.manual_seed(0)
    (q, k, v), found = made(device), []
    for b, hidden in enumerate(HIDDEN):
        rest = (x[b : b + 1, :, hidden:] for x in (k, v))
        found.append(torch_fdattn.decode(q[b : b + 1], *rest, causal=False))
    return [torch.cat(x) for x in zip(*found, strict=True)]


def same(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "invariant"), [(form, i % 2 == 1) for i, form in enumerate(forms("cpu"))]
)
def test_hidden_keys_are_as_if_not_there(form, invariant, device):
    q, k, v = made(device)
    found = torch_fdattn.decode(
        q, k, v, causal=False, attn_mask=forms(device)[form], batch_invariant=invariant
    )
    same(found, expected(device))
    assert (found[0][2] == 0).all()
    assert (found[1][2] == -math.inf).all()


@pytest.mark.parametrize("added", [False, True])
def test_every_head_and_query_its_own(added, device):
    q, k, v = made(device)
    mask = torch.rand(6, 3, CAPACITY, device=device) - 0.5
    scores = (q.double() @ k.double().repeat_interleave(3, 1).mT) / math.sqrt(32)
    scores = scores + mask if added else scores.masked_fill(mask < 0, -math.inf)
    wanted = scores.softmax(-1) @ v.double().repeat_interleave(3, 1), scores.logsumexp(-1)
    found = torch_fdattn.decode(q, k, v, causal=False, attn_mask=mask if added else mask >= 0)
    same(found, [x.float() for x in wanted])


def test_into_given_tensors_and_again_with_other_entries(device):
    """The second call takes the first one's plan."""
    q, k, v = made(device)
    mask = padding(device)[:, None, None]
    for _ in range(2):
        wanted = torch_fdattn.decode(q, k, v, causal=False, attn_mask=mask)
        given = tuple(torch.full_like(x, math.nan) for x in wanted)
        torch_fdattn.decode(q, k, v, causal=False, attn_mask=mask, out=given)
        assert all(torch.equal(x, y) for x, y in zip(given, wanted, strict=True))
        mask = torch.ones_like(mask)
    same(given, torch_fdattn.decode(q, k, v, causal=False))


def test_more_sequences_than_a_launch_scans(device, monkeypatch):
    q, k, v = made(device)
    if device == "cuda" or library.INTERPRET:
        from torch_fdattn.launch import prepared
        from torch_fdattn.ops.decode import schedule

        monkeypatch.setattr(schedule, "MAX_BATCH", 1)
        prepared.forget()
    for name in ("bool", "every entry"):
        same(
            torch_fdattn.decode(q, k, v, causal=False, attn_mask=forms(device)[name]),
            expected(device),
        )


def test_with_lengths(device):
    """Keys behind a sequence's end are hidden whatever their entries are."""
    q, k, v = made(device)
    mask = torch.full((CAPACITY,), math.nan, device=device)
    mask[:40] = 0.0
    lens = int32(40, 40, 40, 40, device=device)
    found = torch_fdattn.decode(q, k, v, lens, causal=False, attn_mask=mask)
    same(found, torch_fdattn.decode(q, k, v, lens, causal=False))


def test_a_mask_of_another_cache(device):
    q, k, v = made(device)
    with pytest.raises(ValueError, match=r"attn_mask must be broadcastable to \(4, 6, 3, 300\)"):
        torch_fdattn.decode(q, k, v, attn_mask=padding(device)[:, None, None, 1:])
    with pytest.raises(TypeError, match="attn_mask must be boolean"):
        torch_fdattn.decode(q, k, v, attn_mask=padding(device)[:, None, None].int())
