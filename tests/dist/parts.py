"""What a tensor-parallel rank holds of a dense layer's parameters, and how close results must be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads


def assert_near(
    ours: Tensor, expected: Tensor, tolerance: float = 1e-5, whole: Tensor | None = None
) -> None:
    """Within `tolerance` of the largest value expected, or of the `whole` that expected is a part of."""
    assert ours.shape == expected.shape
    if expected.numel():
        error = (ours.double() - expected.double()).abs().max().item()
        largest = (expected if whole is None else whole).double().abs().max().item()
        assert error <= tolerance * max(largest, 1e-6), (error, largest)


def hf_model(name: str) -> nn.Module:
    """A family's small model of transformers, which skips where ranks outnumber its heads."""
    from tests.models.hf_models import reference

    model = reference(name)
    heads = model.config.get_text_config().num_attention_heads
    if heads < dist.get_world_size():
        pytest.skip(f"needs at most {heads} ranks")
    return model


def rank_part(x: Tensor, dim: int = 0) -> Tensor:
    """This rank's part of an even split, the remainder on the first ranks."""
    return x.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def parameter_part(name: str, whole: Tensor, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """This rank's part of a parameter, or of its gradient, by the parameter's name."""
    shard = shard_heads(heads, kv_heads, dist.get_rank(), dist.get_world_size())
    projection = name.split(".")[-2] if "." in name else name
    by_head = whole.unflatten
    if projection == "q_proj":
        return by_head(0, (heads, head_dim)).narrow(0, shard.q_start, shard.q_heads).flatten(0, 1)
    if projection in ("k_proj", "v_proj"):
        kv = by_head(0, (kv_heads, head_dim))
        return kv.narrow(0, shard.kv_start, shard.kv_heads).flatten(0, 1)
    if projection == "o_proj" and name.endswith("weight"):
        return by_head(1, (heads, head_dim)).narrow(1, shard.q_start, shard.q_heads).flatten(1)
    if projection in ("gate_proj", "up_proj", "lm_head"):
        return rank_part(whole)
    if projection == "down_proj" and name.endswith("weight"):
        return rank_part(whole, 1)
    return whole


def assert_same_gradients(ours: nn.Module, dense: nn.Module, *heads: int) -> None:
    """Every gradient of the parallel module is the dense module's, or the rank's part of it."""
    expected = dict(dense.named_parameters())
    assert {name for name, _ in ours.named_parameters()} == set(expected)
    for name, parameter in ours.named_parameters():
        part = parameter_part(name, expected[name].grad, *heads)
        assert not part.numel() or part.any()
        assert_near(parameter.grad, part, whole=expected[name].grad)


def randomise(module: nn.Module, seed: int = 7) -> nn.Module:
    """Random parameters, none at its default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            if parameter.dim() == 2:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise + ("norm" in name))
    return module
