"""A model of ours as a Hugging Face folder, which peers read: weights, configuration, a tokenizer of numbers."""

from __future__ import annotations

import json
from pathlib import Path

from torch_fdattn.models import Transformer
from torch_fdattn.models.errors import require

_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def save_checkpoint(model: Transformer, folder: Path) -> None:
    """Writes the model into a folder.

    Raises:
        NotImplementedError: a family, or a form of rotary embedding, that peers would read otherwise.
    """
    config = model.config
    if config.architecture not in _CLASSES or config.rope.kind != "default":
        raise NotImplementedError(
            f"a peer's model must be of {', '.join(_CLASSES)} with plain rotary embeddings, got "
            f"{config.architecture} with {config.rope.kind}"
        )
    dtype = str(model.norm.weight.dtype).removeprefix("torch.")
    raw = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_embeddings,
        # nano-vllm asks for the old names.
        "rope_theta": config.rope.theta,
        "torch_dtype": dtype,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    weights = {
        name if name.startswith("lm_head.") else f"model.{name}": tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (config.tie_embeddings and name.startswith("lm_head."))
    }
    require("safetensors", "A peer's model")
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(folder, config.vocab_size)


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for each id but 0, which ends a text: a token without text has no event in a stream."""
    tokenizers = require("tokenizers", "A peer's model")
    vocabulary = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "eos_token": "w0",
        "pad_token": "w0",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
