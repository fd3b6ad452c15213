"""Keys of generation_config.json and tokenizer_config.json that nobody knows: passed over, or refused by what they are called."""

from __future__ import annotations

import re

import pytest

from torch_fdattn.models import ModelError, config_keys, load_tokenizer


def test_unknown_keys_of_a_generation_config_that_change_what_is_drawn_are_refused():
    config_keys.check_generation_keys({"chat_format": "chatml", "my_mask": None, "some_penalty": 1})
    for key in ("suppress_everything", "foo_mask", "some_penalty"):
        with pytest.raises(ModelError, match=f"{key} must be absent from generation_config.json"):
            config_keys.check_generation_keys({key: 2.0})
    with pytest.raises(ModelError, match="my_mask must be absent"):
        config_keys.check_generation_keys({"my_mask": True})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", '{"suppress_tokens": [7]}', "suppress_tokens must be absent"),
        ("tokenizer_config.json", '{"split_special_tokens": true}', "split_special_tokens must be false"),
        ("tokenizer_config.json", '{"split_digits_apart": true}', "split_digits_apart must be absent"),
    ],
)  # fmt: skip
def test_files_beside_a_tokenizer_are_judged_with_it(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=f"{re.escape(name)}: {message}"):
        load_tokenizer(tmp_path)
