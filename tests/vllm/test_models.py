"""Tiny random models of transformers in vLLM, for what SmolLM2 has not: windows, softcap, ALiBi as vLLM hands them on."""

from __future__ import annotations

import pytest
import torch

from tests.vllm.generation import Counted, Text, check_texts, greedy
from torch_fdattn.ops.library import launches

pytest.importorskip("vllm", reason="make test-vllm")

SIZES = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
DENSE = dict(
    **SIZES, num_key_value_heads=2, head_dim=32, intermediate_size=96, max_position_embeddings=128,
    initializer_range=0.2,
)  # fmt: skip
#: A model's class, and its configuration's arguments.
MODELS = {
    "Mistral, windows": ("Mistral", dict(DENSE, sliding_window=7)),
    "Gemma 2, windows in every other layer, softcap": (
        "Gemma2",
        dict(DENSE, sliding_window=7, attn_logit_softcapping=2.0, query_pre_attn_scalar=32),
    ),
    "Bloom, ALiBi": (
        "Bloom",
        dict(vocab_size=128, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2),
    ),
}
TOKENS = 12


@pytest.mark.parametrize("name", MODELS)
def test_texts_equal_transformers(name, registered, tmp_path):
    import transformers
    from vllm import LLM

    kind, arguments = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**arguments)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval().save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in (1, 20, 45)]
    texts: list[Text] = greedy(model, prompts, TOKENS)
    llm = LLM(
        str(tmp_path), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64,
        max_num_seqs=4, max_num_batched_tokens=32, block_size=16, enable_prefix_caching=False,
    )  # fmt: skip
    counted = Counted(llm)
    launches.clear()
    check_texts(texts, counted.generate)
    attended = launches["varlen_attention_forward/cpu"] + launches["decode_forward/cpu"]
    assert attended == launches["append_kv/cpu"] == 2 * counted.steps
