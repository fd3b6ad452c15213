"""A small random model, and the definition of greedy generation, for the engine's tests."""

from __future__ import annotations

import torch

from torch_fdattn.models import ModelConfig, Transformer

PROMPT = [5, 9, 33, 2, 17, 60, 1]
PROMPTS = [PROMPT, [44], [7, 7, 3], list(range(20, 40))]  # of several lengths
POSITION = 2 * 2 * 2 * 16 * 4  # bytes: K and V, layers, KV heads, head_dim, fp32


def config(architecture: str = "qwen3", heads: int = 4) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=2,
        head_dim=16,
        max_positions=128,
    )


def random_model(device, architecture: str = "qwen3", heads: int = 4) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config(architecture, heads)).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.no_grad()
def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """The definition: the whole sequence scored anew for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens], device=model.norm.weight.device))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]
