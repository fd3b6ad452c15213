"""The real engine over a tiny random model that writes bytes and has a chat template with tools and thoughts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.server.fake_engine import TEMPLATE
from torch_fdattn import engine, models

MAX_LENGTH = 128  # tokens of a prompt and its answer


def byte_tokenizer(folder: Path) -> models.Tokenizer:
    """A token a byte, and three special ones; written into the folder."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|begin|>", "<|end|>", "<|user|>"])
    inner.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return models.load_tokenizer(folder)


def tiny_llm(folder: Path, **options) -> engine.LLM:
    """Of few pages, so that requests wait for each other and are preempted."""
    torch.manual_seed(0)
    config = models.ModelConfig("qwen3", 260, 32, 48, 1, 4, 2, 16, MAX_LENGTH)
    given = {"pages": 48, "page_size": 8, "max_num_seqs": 16, "run_ahead": False, **options}
    return engine.LLM(models.Transformer(config), byte_tokenizer(folder), **given)
