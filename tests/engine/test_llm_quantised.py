"""Pages of one byte an element, with a scale for each token and KV head."""

from __future__ import annotations

import pytest
import torch

from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.dist.kv_cache.scales import KV_FORMATS
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.engine.paged_step import PagedKV

FORMATS = list(KV_FORMATS)
#: Nats of KL divergence to the fp32 cache, and log-probabilities; a format has 2 to 7 bits of mantissa.
LIMITS = {"fp8_e4m3": 0.02, "fp8_e5m2": 0.1, "int8": 0.002}
ALL = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=64, logprobs=64)


def logprobs(model, options, prompts=PROMPTS):
    """float64 (tokens, vocab) of all prompts' tokens, and the completions."""
    llm = LLM(model, max_model_len=64, cuda_graph=False, **{"pages": 64, **options})
    outputs = llm.generate(prompts, ALL)
    rows = [x for output in outputs for x in output.prompt_logprobs[1:]]
    table = [[row[token].logprob for token in range(64)] for row in rows]
    return torch.tensor(table, dtype=torch.float64), [x.outputs[0] for x in outputs]


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_it_is_near_the_unquantised_cache(device, kv_dtype):
    model = random_model(device)
    expected, _ = logprobs(model, {})
    found, _ = logprobs(model, {"kv_dtype": kv_dtype})
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    assert 0 < divergence < LIMITS[kv_dtype]


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize(
    "options", [{"max_batch_tokens": 1}, {"max_batch_tokens": 3}, {"page_size": 5}]
)
def test_scales_depend_on_their_token_alone(device, kv_dtype, options):
    """So every way to cut a prompt gives the same, and what was stored before decides nothing."""
    model = random_model(device)
    expected, completions = logprobs(model, {"kv_dtype": kv_dtype})
    found, others = logprobs(model, {"kv_dtype": kv_dtype, **options})
    # A value on the border of two stored numbers may be rounded to the other one.
    assert (found - expected).abs().mean() < 1e-3
    for completion, other in zip(completions, others, strict=True):
        assert abs(completion.logprobs[0][other.token_ids[0]].logprob - other.logprobs[0][other.token_ids[0]].logprob) < 0.1  # fmt: skip


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_what_is_stored(device, kv_dtype):
    """Over nine orders of magnitude, beside padding, which leaves no trace."""
    form = KV_FORMATS[kv_dtype]
    kv = PagedKV(2, 3, 4, 2, 16, dtype=torch.float32, device=torch.device(device), form=form)
    k, v = torch.randn(2, 5, 2, 1, 16, device=device)
    k *= torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1.0], device=device)[:, None, None, None]
    pages = torch.tensor([2, 2, 0, 0, -1], dtype=torch.int32, device=device)
    slots = torch.tensor([0, 3, 1, 2, 0], dtype=torch.int32, device=device)
    kv.store(1, k, v, pages, slots)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    got_k, got_v, own = kv.pages_for_prefill(1, table, torch.float32)
    assert own.tolist() == [[0, 1]]
    step = 2.0**-3 if kv_dtype == "fp8_e5m2" else 2.0**-4  # half a unit in the last place
    for got, x in ((got_k, k), (got_v, v)):
        at = got[[0, 0, 1, 1], :, [0, 3, 1, 2]]
        x = x[:4, :, 0]
        largest = x.abs().amax(-1, keepdim=True)
        bound = largest / 254 if kv_dtype == "int8" else step * x.abs() + largest * 2.0**-12
        assert ((at - x).abs() <= 1.01 * bound).all()
        assert int((got != 0).sum()) == 4 * 2 * 16 or kv_dtype == "int8"
    assert not (kv.pages_for_prefill(0, table, torch.float32)[0] != 0).any()


def test_pages_follow_the_bytes(device):
    sizes = dict(num_layers=2, page_size=16, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    assert PagedKV.page_bytes(**sizes, form=None) == 2 * 2 * 16 * 2 * 128
    assert PagedKV.page_bytes(**sizes, form=KV_FORMATS["int8"]) == 2 * 2 * 16 * 2 * 68


def test_other_formats_are_refused(device):
    with pytest.raises(ValueError, match="kv_dtype must be one of"):
        LLM(random_model(device), kv_dtype="fp4", pages=4)
