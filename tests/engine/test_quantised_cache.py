"""Caches of one byte an element: perplexity and tokens against the unquantised cache, scales, refusals.

SmolLM2-135M in fp32 on tests/engine/prose.py, teacher-forced through the cache, scales from the first 64
tokens; the figures are in docs/notes/quantised-caches.md. The bounds leave them some room.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.engine.cached_batch import KINDS, CachedBatch, make_cache
from tests.engine.prose import TEXT
from tests.engine.test_paged_cache import needs_smollm2
from tests.engine.tiny import POSITION, PROMPT, PROMPTS, random_model
from torch_fdattn.dist.kv_cache.scales import KV_FORMATS
from torch_fdattn.engine import PagedKVCache
from torch_fdattn.models import load_model, load_tokenizer, resolve

#: How much the perplexity may differ, and on how many tokens the most likely one must agree.
BOUNDS = {"fp8_e4m3": (0.02, 0.93), "fp8_e5m2": (0.03, 0.88), "int8": (0.02, 0.93)}
CALIBRATION = 64


@pytest.fixture(scope="module")
def smollm2():
    """(model, the text's tokens)"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model("smollm2", dtype=torch.float32, device=device)
    tokens = load_tokenizer(resolve("smollm2")).encode(TEXT)
    return model, torch.tensor([tokens], device=device)


@torch.inference_mode()
def teacher_forced(smollm2, kind: str, kv_dtype: str | None) -> tuple[float, torch.Tensor]:
    """(mean loss of what follows the calibration, the most likely token at each place)."""
    model, tokens = smollm2
    cache = make_cache(model, kind, 1, tokens.shape[1], kv_dtype=kv_dtype)
    # Chunks for both ways of attending: over 16 columns and not.
    chunks = [tokens[:, :CALIBRATION], *tokens[:, CALIBRATION:-32].split(200, 1)]
    chunks += tokens[:, -32:].split(16, 1)
    logits = torch.cat([model(chunk, cache) for chunk in chunks], 1)[0, CALIBRATION:-1]
    return F.cross_entropy(logits, tokens[0, CALIBRATION + 1 :]).item(), logits.argmax(-1)


@pytest.fixture(scope="module")
def unquantised(smollm2):
    return teacher_forced(smollm2, "contiguous", None)


@needs_smollm2
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_the_perplexity_stays(smollm2, unquantised, kv_dtype):
    difference, agreement = BOUNDS[kv_dtype]
    loss, likeliest = teacher_forced(smollm2, "contiguous", kv_dtype)
    ratio = math.exp(loss - unquantised[0])
    agreed = (likeliest == unquantised[1]).float().mean().item()
    assert abs(ratio - 1) <= difference, f"perplexity times {ratio:.4f}, {agreed:.1%} agree"
    assert agreed >= agreement, f"perplexity times {ratio:.4f}, {agreed:.1%} agree"
    assert loss != unquantised[0]  # else nothing was quantised


@needs_smollm2
@pytest.mark.slow
def test_pages_change_nothing(smollm2):
    """But the order of sums, which turns some keys of later layers to the other neighbour in float8."""
    loss, likeliest = teacher_forced(smollm2, "paged", "fp8_e4m3")
    expected = teacher_forced(smollm2, "contiguous", "fp8_e4m3")
    assert loss == pytest.approx(expected[0], abs=5e-3)
    assert (likeliest == expected[1]).float().mean() > 0.95


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_byte_an_element(device, kv_dtype, dtype):
    model = random_model(device).to(dtype)
    for kind in KINDS:
        batch = CachedBatch(model, kind, kv_dtype=kv_dtype)
        plain = CachedBatch(model, kind)
        assert batch.cache.nbytes * dtype.itemsize == plain.cache.nbytes
        for each in (batch, plain):
            each.prefill([PROMPT])
        assert batch.cache.bytes_used() == len(PROMPT) * POSITION // 4
        assert batch.cache.bytes_used() * dtype.itemsize == plain.cache.bytes_used()


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("chunk", [6, 17, 512])
def test_both_caches_write_the_same_tokens(device, kv_dtype, chunk):
    """Over ragged prompts, through paged_decode and through gathered pages."""
    model = random_model(device)
    options = dict(batch=4, kv_dtype=kv_dtype, chunk=chunk)
    expected = CachedBatch(model, **options).generate(PROMPTS, 12)
    for page_size in (1, 5):
        batch = CachedBatch(model, "paged", page_size=page_size, **options)
        assert batch.generate(PROMPTS, 12) == expected


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_is_right_to_the_formats_precision(device, kind, kv_dtype):
    """One layer with random keys: every element within half a step of its format."""
    form = KV_FORMATS[kv_dtype]
    step = {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "int8": 0}[kv_dtype]
    cache = KINDS[kind](1, 2, 2, 32, 16, dtype=torch.float32, device=device, kv_dtype=kv_dtype)
    k = (
        torch.randn(2, 2, 32, 16, device=device)
        * torch.tensor([1.0, 30.0], device=device)[:, None, None]
    )
    cache.append(0, k, 2 * k)
    cache.advance(32)
    amax = k.abs().amax((0, 2, 3))
    torch.testing.assert_close(cache.scales.k[0], amax * form.headroom / form.largest)
    found = cache._contiguous(0, 32, torch.float32)
    for x, scale, expected in zip(found, (cache.scales.k, cache.scales.v), (k, 2 * k), strict=True):
        smallest = scale[0][None, :, None, None] * (0.5 if kv_dtype == "int8" else 2**-9)
        assert ((x[:, :, :32] - expected).abs() <= step * expected.abs() + smallest * 1.001).all()


def test_scales_are_those_of_the_first_chunk_and_stay(device):
    model = random_model(device)
    batch = CachedBatch(model, batch=2, kv_dtype="int8", chunk=8)
    scales = batch.cache.scales
    addresses = scales.k.data_ptr(), scales.v.data_ptr()
    assert not batch.cache.calibrated
    batch.prefill([[3, 9, 40], list(range(20))])
    first = scales.k.clone(), scales.v.clone()
    assert batch.cache.calibrated
    assert all((x != 1).all() for x in first)
    alone = CachedBatch(model, kv_dtype="int8")
    alone.prefill([list(range(8))])  # all that the first chunk holds beside padding
    torch.testing.assert_close(alone.cache.scales.k, first[0])
    torch.testing.assert_close(alone.cache.scales.v, first[1])
    batch.cache.reset()
    batch.prefill([[60] * 9, [1, 2]])
    assert torch.equal(scales.k, first[0])
    assert torch.equal(scales.v, first[1])
    assert addresses == (scales.k.data_ptr(), scales.v.data_ptr())


def test_padding_has_no_part_in_the_scales(device):
    cache = PagedKVCache(1, 2, 2, 16, 16, dtype=torch.float32, device=device, kv_dtype="int8")
    k = torch.randn(2, 2, 5, 16, device=device)
    k[0, :, :3] = float("nan")
    k[1, :, :1] = 1e9
    cache.reserve([2, 4])
    step = cache.ragged_step(torch.tensor([2, 4], dtype=torch.int32, device=device), 5)
    step.append(0, k, k)
    real = torch.cat([k[0, :, 3:], k[1, :, 1:]], 1)
    expected = real.abs().amax((1, 2)) * KV_FORMATS["int8"].headroom / 127
    torch.testing.assert_close(cache.scales.k[0], expected)


def test_a_step_that_stores_nothing_sets_no_scales(device):
    """As the runs do that warm up for a capture."""
    batch = CachedBatch(random_model(device), kv_dtype="int8")
    token = torch.tensor([[5]], device=device)
    batch.step(token, active=[False])
    assert not batch.cache.calibrated
    batch.step(token)  # the first token may come without a prompt
    assert batch.cache.calibrated


def test_bad_arguments_are_refused(device):
    with pytest.raises(ValueError, match=r"kv_dtype must be one of \('fp8_e4m3', .*, got 'fp4'"):
        make_cache(random_model(device), "contiguous", 1, 8, kv_dtype="fp4")
