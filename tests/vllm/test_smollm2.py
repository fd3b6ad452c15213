"""SmolLM2 in fp32, greedy: vLLM with our backend and our engine write what transformers writes, alone and batched."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.vllm.generation import Counted, Text, check_texts, greedy
from tests.vllm.smollm2 import LAYERS, TOKENS, encoded, export
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.models import load_model, load_tokenizer
from torch_fdattn.ops.library import launches

pytest.importorskip("vllm", reason="make test-vllm")

#: Tokens of a step of vLLM's scheduler, and requests.
STEP_TOKENS, STEP_REQUESTS = 64, 8


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return encoded(load_tokenizer("smollm2"))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return export(model, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def texts(folder, prompts) -> list[Text]:
    """The reference: transformers, a prompt at a time."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return greedy(theirs, prompts, TOKENS)


@pytest.fixture(scope="module")
def llm(folder, registered):
    from vllm import LLM

    return LLM(
        str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=512,
        max_num_seqs=STEP_REQUESTS, max_num_batched_tokens=STEP_TOKENS, block_size=16,
        enable_prefix_caching=False,
    )  # fmt: skip


def check_launches(steps: int) -> None:
    """Every layer of every step appended and attended by ours, once."""
    assert launches["append_kv/cpu"] == LAYERS * steps
    attended = launches["varlen_attention_forward/cpu"] + launches["decode_forward/cpu"]
    assert attended == LAYERS * steps
    assert set(launches) <= {
        "append_kv/cpu",
        "varlen_attention_forward/cpu",
        "decode_forward/cpu",
    }


def test_vllm_alone(llm, texts):
    counted = Counted(llm)
    launches.clear()
    for text in texts:
        check_texts([text], counted.generate)
    check_launches(counted.steps)
    # Of the steps of a prompt those with one token are decodes: the long one's last.
    steps = [range(0, len(text.prompt) - 1, STEP_TOKENS) for text in texts]
    prefills = sum(map(len, steps))
    assert prefills > len(texts)
    assert launches["varlen_attention_forward/cpu"] >= LAYERS * prefills
    assert launches["decode_forward/cpu"] >= LAYERS * (TOKENS - 1) * (len(texts) - 1)


def test_vllm_batched(llm, texts):
    counted = Counted(llm)
    launches.clear()
    check_texts(texts, counted.generate)
    check_launches(counted.steps)
    assert launches["varlen_attention_forward/cpu"] > 0
    assert launches["decode_forward/cpu"] > 0


def continued(model, prompts, counts) -> list[list[int]]:
    """By our engine, all at the same time."""
    longest = max(map(sum, zip(map(len, prompts), counts, strict=True)))
    params = [SamplingParams(temperature=0, max_tokens=count) for count in counts]
    outputs = LLM(model, max_model_len=longest).generate(prompts, params)
    return [output.outputs[0].token_ids for output in outputs]


def test_the_engine_alone(model, texts):
    for text in texts:
        check_texts([text], functools.partial(continued, model))


def test_the_engine_batched(model, texts):
    check_texts(texts, functools.partial(continued, model))
