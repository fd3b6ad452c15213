"""What layers are told in place of a mask, and that each form is the mask that it stands for."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from torch_fdattn.dropins import transformers as dropin

pytest.importorskip("transformers", reason="transformers is the reference here")
hf = pytest.importorskip("transformers.masking_utils", reason="transformers is the reference here")


@pytest.fixture(scope="module", autouse=True)
def registered():
    dropin.register()


def rng_of(seed: int) -> random.Random:
    return random.Random(seed)


def visible(mask, q_length: int, kv_length: int, causal: bool):
    """Which keys a layer lets each query see: by attention itself, whose values are the keys' numbers.

    `causal` is what the layer's own flag says, which is to have no say.
    """
    one_hot = torch.eye(kv_length).expand(2, 1, -1, -1)
    zeros = torch.zeros(2, 1, q_length, 16), torch.zeros(2, 1, kv_length, 16)
    pad = torch.nn.functional.pad(one_hot, (0, -kv_length % 8 + 16))
    out, _ = dropin.fdattn_attention(
        SimpleNamespace(is_causal=causal), *zeros, pad, mask, is_causal=None
    )
    return out.transpose(1, 2)[..., :kv_length] > 0


def drawn_call(rng: random.Random):
    """A call of transformers' for a mask, with any offsets."""
    q_length, past = rng.choice([1, 3, 8]), rng.choice([0, 0, 5, 11])
    kv_offset = rng.choice([0, 0, min(past, 4)])
    room = rng.choice([0, 0, 7, -min(2, q_length - 1)])  # keys behind the last query
    kv_length = past - kv_offset + q_length + room
    causal = rng.random() < 0.8
    call = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
    call["q_offset"] = torch.tensor(past) if room and rng.random() < 0.7 else past
    call["allow_is_causal_skip"] = causal and rng.random() < 0.8
    call["allow_is_bidirectional_skip"] = not causal and rng.random() < 0.8
    padding = rng.choice([None, "ones", "left", "right", "mixed"])
    if padding is not None:
        given = torch.ones(2, past + q_length + rng.choice([0, max(0, room)]), dtype=torch.bool)
        if padding in ("left", "right"):
            given[0, slice(0, 2) if padding == "left" else slice(-2, None)] = False
        elif padding == "mixed":
            given = torch.rand(given.shape) < 0.7
        call["attention_mask"] = given
    if not causal:
        call["mask_function"] = hf.bidirectional_mask_function
    elif rng.random() < 0.5:
        window = rng.choice([1, 3, 6, 40])
        call["mask_function"] = hf.sliding_window_causal_mask_function(window)
        call["local_size"] = window
    if rng.random() < 0.1:
        other = hf.packed_sequence_mask_function(torch.arange(64).expand(2, 64) // 3)
        call["mask_function"] = hf.and_masks(
            call.get("mask_function", hf.causal_mask_function), other
        )
    return call


def test_what_layers_are_told_is_the_mask():
    forms = set()
    for seed in range(300):
        torch.manual_seed(seed)
        call = drawn_call(rng_of(seed))
        mask = dropin.fdattn_mask(**call)
        skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        wanted = hf.sdpa_mask(**{**call, **skip})
        q_length = call["q_length"]
        found = visible(mask, q_length, call["kv_length"], seed % 2 == 0)
        assert torch.equal(found, wanted), (seed, call)
        # Gemma 4's layers that share keys attend for the last queries alone, and cut their masks.
        last = rng_of(seed).randrange(1, q_length + 1)
        found = visible(mask[:, :, -last:], last, call["kv_length"], seed % 2 == 0)
        assert torch.equal(found, wanted[:, :, -last:]), (seed, call, last)
        forms.add((mask.dtype, mask.shape[1] > 2, mask.shape[3] == 0))
    assert {form[0] for form in forms} == {torch.bool, torch.uint8, torch.int32, torch.int8}
    assert (torch.uint8, True, True) in forms
    assert (torch.uint8, True, False) in forms
    assert (torch.int32, True, False) in forms


def test_masks_that_are_made_are_few():
    """No tensor of queries times keys where lengths and padding say all."""
    left = torch.ones(2, 64, dtype=torch.bool)
    left[0, :9] = False
    sliding = {"mask_function": hf.sliding_window_causal_mask_function(8), "local_size": 8}
    assert dropin.fdattn_mask(2, 64, 64).numel() == 0
    assert dropin.fdattn_mask(2, 64, 64, attention_mask=torch.ones_like(left)).numel() == 0
    assert dropin.fdattn_mask(2, 64, 64, **sliding).numel() == 0
    for more in ({}, sliding):
        mask = dropin.fdattn_mask(2, 64, 64, attention_mask=left, **more)
        assert mask.untyped_storage().nbytes() == 2 * 64
        assert mask.dtype == torch.uint8
    state = dropin.fdattn_mask(2, 1, 4096, torch.tensor(700), allow_is_causal_skip=False)
    assert state[:, 0, 0].tolist() == [[700, 701]] * 2
    assert all(x.is_contiguous() for x in state[:, 0, 0].unbind(1))
    both = {"mask_function": hf.bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    mask = dropin.fdattn_mask(2, 64, 64, attention_mask=left, allow_is_causal_skip=False, **both)
    assert mask.untyped_storage().nbytes() == 2 * 64


def test_values_are_not_read_while_tracing():
    with torch._subclasses.FakeTensorMode():
        mask = dropin.fdattn_mask(2, 8, 8, attention_mask=torch.ones(2, 8, dtype=torch.bool))
    assert (mask.dtype, mask.shape) == (torch.uint8, (2, 2, 1, 8))


@pytest.mark.parametrize(
    "function",
    [
        hf.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)),
        hf.sliding_window_causal_mask_function(7),  # not of the local size that is named
        hf.and_masks(hf.sliding_window_overlay(8), hf.bidirectional_mask_function),
        hf.or_masks(hf.sliding_window_overlay(8), hf.causal_mask_function),
        lambda b, h, q, k: k <= q + 1,
    ],
)
def test_other_masks_are_made(function):
    mask = dropin.fdattn_mask(2, 16, 16, mask_function=function, local_size=8)
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 16, 16))
    assert torch.equal(
        mask, hf.sdpa_mask(2, 16, 16, mask_function=function, allow_is_causal_skip=False)
    )


def test_a_mask_that_the_caller_wants_made_is_made():
    mask = dropin.fdattn_mask(2, 16, 16, allow_is_causal_skip=False)
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 16, 16))


@pytest.mark.parametrize(
    "mask",
    [
        dropin.mask_forms.causal(2, 3, None, "cpu").repeat(1, 1, 8, 1),
        dropin.mask_forms.causal(2, 0, torch.ones(2, 8, dtype=torch.bool), "cpu").to(torch.int16),
        dropin.mask_forms.nothing_hidden(2, "cpu").expand(2, 4, 1, 0),
        dropin.mask_forms.over_a_static_cache(2, 3, torch.tensor(4))[..., :1],
        torch.ones(2, 4, 1, 8, dtype=torch.uint8),  # a user's, of four heads
    ],
)
def test_forms_that_a_model_has_changed_are_refused(mask):
    q, k = torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, 8, 16)
    with pytest.raises(ValueError, match=r"what fdattn_mask makes, got torch\."):
        dropin.fdattn_attention(SimpleNamespace(is_causal=True), q, k, k, mask)


def test_without_a_mask_the_layer_says():
    """As under sdpa: nobody here made one."""
    for flag in (False, True):
        found = visible(None, 5, 5, flag)
        assert torch.equal(found, torch.ones(5, 5).tril(0 if flag else 5).bool().expand(2, 1, 5, 5))
