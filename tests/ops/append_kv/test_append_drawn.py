"""Drawn calls of append_kv and paged_append_kv against plain loops: what is written, and what must not be."""

import pytest
import torch

import torch_fdattn
from tests.ops.append_kv.cases import Expected, draw
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.reference import append_reference, append_to_slots
from torch_fdattn.testing import assert_launched, drawn_seeds, expected_path


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", drawn_seeds(320))
def test_drawn(seed, device, record_drawn):
    case = draw(seed, device)
    record_drawn("append_kv", case.features)
    expected = Expected(case)
    ran = case.on(device)
    with assert_launched(expected_path("append_kv", device, case.tensors["k"].dtype)):
        ran.call()
    expected.check(ran)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "seed", [pytest.param(2000 + x, marks=pytest.mark.slow if x >= 16 else ()) for x in range(40)]
)
def test_the_kernel_and_the_reference_agree_bit_for_bit(seed, kernel_device):
    """Where nothing is turned; on a GPU the turned elements may differ by a fused multiply-add."""
    case = draw(seed, kernel_device)
    if kernel_device == "cuda":
        case.tensors |= dict.fromkeys(("cos", "sin", "positions", "q"))
    ran, defined = case.on(kernel_device), case.on("cpu")
    ran.call()
    append_reference(Append(**defined.tensors))
    for name in ("k_cache", "v_cache", "q"):
        if (x := defined.tensors.get(name)) is not None:
            assert torch.equal(_bits(ran.tensors[name].cpu()), _bits(x)), name


@pytest.mark.parametrize("k_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_new_lens", [False, True])
def test_tokens_copied_one_by_one_are_those_of_the_reference(k_dtype, cache_dtype, with_new_lens):
    """With pages, positions and counts that are out of range."""
    generator = torch.Generator().manual_seed(0)

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, dtype=torch.int32, generator=generator)

    for _ in range(50):
        caches = [torch.zeros(6, 2, 3, 8, dtype=cache_dtype) for _ in range(4)]
        k, v = torch.randn(2, 4, 2, 1, 8, generator=generator).to(k_dtype)
        # No two sequences have a page in common.
        table = torch.randperm(16, generator=generator).int().view(4, 4) - 5
        given = table, k, v, ints(-3, 15, 4), ints(-1, 3, 4) if with_new_lens else None
        append_to_slots(Append(*caches[:2], *given))
        append_reference(Append(*caches[2:], *given))
        for found, expected in zip(caches[:2], caches[2:], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.interpreter
@pytest.mark.parametrize("more", [0, 21])
def test_one_token_of_many_sequences(more, kernel_device):
    """A packed prefill's tokens, a page each: a tile has rows of several sequences."""
    from torch_fdattn.ops.append_kv.kernel import MANY_SEQUENCES  # imports triton

    batch = MANY_SEQUENCES + more
    torch.manual_seed(batch)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float16, device=kernel_device)  # noqa: E731
    k, v = make(batch, 2, 1, 24), make(batch, 2, 1, 16)
    pages, slots = torch.randperm(batch + 9)[:batch].int(), torch.randint(0, 4, (batch,)).int()
    pages[1] = -1  # padding, stored nowhere
    new_lens = torch.ones(batch, dtype=torch.int32)
    new_lens[2] = 0
    defined = [torch.zeros(batch + 9, 2, 4, dims, dtype=torch.float16) for dims in (24, 16)]
    found = [x.to(kernel_device) for x in defined]
    moved = (x.to(kernel_device) for x in (pages[:, None], slots, new_lens))
    table, kv_lens, own = moved
    torch_fdattn.paged_append_kv(*found, table, k, v, kv_lens, own)
    for i in range(batch):
        if i not in (1, 2):
            for cache, x in zip(defined, (k, v), strict=True):
                cache[pages[i], :, slots[i]] = x[i, :, 0].cpu()
    for cache, expected in zip(found, defined, strict=True):
        assert torch.equal(cache.cpu(), expected)


def _bits(x):
    """With one NaN for all: which one a conversion gives is the processor's own choice."""
    if x.dtype.itemsize > 1:
        x = x.masked_fill(x.isnan(), float("nan"))
    return x.contiguous().view(torch.uint8)
