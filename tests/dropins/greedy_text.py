"""Greedy text by generate and by generate_batch within `continuous_batching`, compared; also a program of its own.

python -m tests.dropins.greedy_text     tiny models, by the transformers that comes first on the path
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from torch_fdattn.dropins import transformers as dropin
from torch_fdattn.dropins.continuous_batching import forgets_keys, is_prefixed
from torch_fdattn.ops.library import launches

#: The next token is that of rounding where the reference's two best logits are nearer than this.
TIE = 1e-3
VARLEN = "varlen_attention_forward/cpu"
#: Of the 48 tokens that are asked for, how many no rounding and no end of text may take.
ENOUGH = 32
SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
WINDOW = {"head_dim": 16, "sliding_window": 6}
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {**WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "GptOss": {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}
#: One of them longer than a batch of tokens, so that its prompt goes in by chunks.
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [3 + i % 60 for i in range(45)], [11] * 17]


def tiny(name: str) -> torch.nn.Module:
    """A random model whose weights make attention matter; its attention is eager's."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **SMALL, **MODELS[name], attn_implementation="eager"
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if not name.endswith("bias"):  # gpt-oss would say what its biases do
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def settings(tokens: int) -> GenerationConfig:
    # 1 is drawn by no prompt: all requests run to the end unless the model says it.
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=1, pad_token_id=0)


def reference(model: torch.nn.Module, prompt: list[int], tokens: int) -> tuple[list[int], int]:
    """generate's tokens, and how many of them no rounding decides."""
    ids = torch.tensor([prompt], device=model.device)
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=settings(tokens), output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(said.logits)[:, 0].topk(2).values
    ties = (best[:, 0] - best[:, 1] < TIE).tolist()
    return said.sequences[0, len(prompt) :].tolist(), [*ties, True].index(True)


def check(
    model: torch.nn.Module, prompts: list[list[int]], tokens: int, path: str, **pages: int
) -> int:
    """Compares the texts, counts launches by `path` of ours; returns how many tokens were compared."""
    wanted = [reference(model, prompt, tokens) for prompt in prompts]
    # Texts that say one token for ever would agree whatever they attended to.
    assert len({token for text, _ in wanted for token in text}) >= 2 * len(prompts), wanted
    before, steps = model.config._attn_implementation, []
    hook = model.register_forward_pre_hook(lambda *_: steps.append(1))
    launches.clear()
    with dropin.continuous_batching(model):
        done = model.generate_batch(
            prompts, generation_config=settings(tokens),
            continuous_batching_config=ContinuousBatchingConfig(**pages),
        )  # fmt: skip
    hook.remove()
    assert model.config._attn_implementation == before
    compared = 0
    for (text, sure), request in zip(wanted, done.values(), strict=True):
        assert request.error is None, request.error
        assert request.generated_tokens[:sure] == text[:sure], (
            request.generated_tokens,
            text,
            sure,
        )
        compared += sure
    # Every attention of every step was ours.
    attentions = {name: count for name, count in launches.items() if "append" not in name}
    assert sum(attentions.values()) == model.config.num_hidden_layers * len(steps) > 0, launches
    assert launches[path] > 0, launches
    return compared


def pages() -> dict[str, int]:
    """A cache of small pages, of which a request takes several."""
    page_size = "block_size" if is_prefixed() else "page_size"
    return {"num_blocks": 64, "max_batch_tokens": 32, page_size: 8}


def tables_of_pages():
    """transformers decodes over tables of pages, as on CUDA, where it is asked about another accelerator."""
    place = "transformers.generation.continuous_batching.initialization.is_torch_xpu_available"
    return mock.patch(place, return_value=True)


def main() -> None:
    dropin.register()
    for name in MODELS:
        if forgets_keys() and name != "Llama":
            with pytest.raises(NotImplementedError, match=r"needs transformers >= 5\.16"):
                check(tiny(name), PROMPTS, 12, VARLEN, **pages())
            print(f"transformers {transformers.__version__}: {name} refused")
            continue
        compared = check(tiny(name), PROMPTS, 12, VARLEN, **pages())
        assert compared >= ENOUGH
        print(f"transformers {transformers.__version__}: {name}, {compared} tokens")
    if not is_prefixed():
        with tables_of_pages():
            compared = check(tiny("Llama"), PROMPTS, 12, "append_kv/cpu", **pages())
        assert compared >= ENOUGH
        print(
            f"transformers {transformers.__version__}: Llama over tables of pages, {compared} tokens"
        )


if __name__ == "__main__":
    main()
