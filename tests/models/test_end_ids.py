"""End tokens that a folder's files name are of the model's vocabulary, which may be larger than the tokenizer's."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from torch_fdattn.models import ModelError, load_tokenizer

CONFIGS = {
    "a text model": {"vocab_size": 448},  # the tokenizer has 400
    "a model that takes images": {"vocab_size": 5, "text_config": {"vocab_size": 448}},
}


def _folder(bpe_folder, path, config: dict | None, **files: dict):
    folder = shutil.copytree(bpe_folder, path)
    for name, raw in {"config": config, **files}.items():
        if raw is not None:
            (folder / f"{name}.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ids_of_a_padded_vocabulary_are_taken(config, bpe_folder, tmp_path):
    for ends in (0, 399, [400, 447]):
        folder = _folder(bpe_folder, tmp_path / str(ends), config, generation_config={"eos_token_id": ends})  # fmt: skip
        expected = {1, *(ends if isinstance(ends, list) else [ends])}
        assert load_tokenizer(folder).eos_ids == expected


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("wrong", [-1, 448, 10**6, 10**30])
@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_ids_beyond_the_vocabulary_are_refused(name, wrong, config, bpe_folder, tmp_path):
    for i, ends in enumerate((wrong, [1, wrong])):
        given = {"eos_token_id": ends}
        files = {name: given} if name != "config" else {}
        folder = _folder(bpe_folder, tmp_path / str(i), config | (given if not files else {}), **files)  # fmt: skip
        expected = (
            f"{folder / name}.json: eos_token_id must be from 0 to 447, the model's vocab_size being 448, got {wrong}: "
            "name a token of the vocabulary, or leave it out"
        )
        with pytest.raises(ModelError) as caught:
            load_tokenizer(folder)
        assert str(caught.value) == expected


def test_without_a_model_its_vocabulary_may_be_any(bpe_folder, tmp_path):
    folder = _folder(bpe_folder, tmp_path / "a", None, generation_config={"eos_token_id": 10**6})
    assert load_tokenizer(folder).eos_ids == {1, 10**6}
    for wrong in (-1, 2**31):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(ModelError, match=rf"eos_token_id must be from 0 to {2**31 - 1}, got"):
            load_tokenizer(folder)


def test_a_named_end_token_beyond_the_vocabulary_is_refused(bpe_folder, tmp_path):
    settings = {"eos_token": "<|added|>", "added_tokens_decoder": {"400": {"content": "<|added|>"}}}
    folder = _folder(bpe_folder, tmp_path / "a", {"vocab_size": 401}, tokenizer_config=settings)
    assert load_tokenizer(folder).eos_ids == {400}
    (folder / "config.json").write_text('{"vocab_size": 400}')
    expected = "the id of eos_token '<|added|>' must be from 0 to 399, the model's vocab_size being 400, got 400"
    with pytest.raises(ModelError, match=re.escape(f"{folder}: {expected}")):
        load_tokenizer(folder)
