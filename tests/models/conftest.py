"""Tokenizers from every source: folders and GGUF files of byte-level BPE and of SentencePiece."""

from __future__ import annotations

import io
import json

import pytest

from tests.models.tokenizer_sources import TEMPLATE, TRAINING, write_tokenizer_gguf


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """As Llama 3 ships it: tokenizer.json that adds BOS, settings and template beside it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>", "<|user|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(TRAINING, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    folder = tmp_path_factory.mktemp("bpe")
    inner.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<|begin|>", "__type": "AddedToken"},
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    """As Llama 2 ships it: BPE with byte fallback, no normalisation."""
    library = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def llama2_folder(tmp_path_factory, sentencepiece_model):
    folder = tmp_path_factory.mktemp("llama2")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def llama2_gguf(tmp_path_factory, sentencepiece_model):
    library = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    inner = library.SentencePieceProcessor(model_proto=sentencepiece_model)

    def kind(i):
        if inner.is_control(i):
            return 3
        return 6 if inner.is_byte(i) else 2 if inner.is_unknown(i) else 1

    def fields(writer):
        pieces = range(len(inner))
        writer.add_tokenizer_model("llama")
        writer.add_token_list([inner.id_to_piece(i) for i in pieces])
        writer.add_token_scores([inner.get_score(i) for i in pieces])
        writer.add_token_types([kind(i) for i in pieces])
        writer.add_bos_token_id(inner.bos_id())
        writer.add_eos_token_id(inner.eos_id())

    path = tmp_path_factory.mktemp("llama2") / "model.gguf"
    write_tokenizer_gguf(path, fields)
    return path


@pytest.fixture(scope="module")
def bpe_gguf(tmp_path_factory, bpe_folder):
    raw = json.loads((bpe_folder / "tokenizer.json").read_text())["model"]

    def fields(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(list(raw["vocab"]))
        writer.add_token_types([3, 3, 3] + [1] * (len(raw["vocab"]) - 3))
        writer.add_token_merges([" ".join(merge) for merge in raw["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_chat_template(TEMPLATE)

    path = tmp_path_factory.mktemp("bpe") / "model.gguf"
    write_tokenizer_gguf(path, fields)
    return path
