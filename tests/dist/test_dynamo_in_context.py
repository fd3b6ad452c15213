"""Functions that `torch.compile` made, called inside the eager `context_parallel`: attention in them is refused by name, and
nothing else is. Dynamo goes on after an exception of its trace, and then gave wrong numbers.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torch_fdattn
from torch_fdattn.dist import SequenceShards, context_parallel

LENGTH = 8


def zigzag() -> SequenceShards:
    world = dist.get_world_size()
    return SequenceShards.zigzag(LENGTH * world, world)


def by_sdpa(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def by_op(x):
    return torch_fdattn.attention(x, x, x, causal=True)[0]


def after_a_graph_break(x):
    torch._dynamo.graph_break()
    return by_sdpa(x * 2)


def by_method(x):
    return (x @ x.mT).softmax(-1) @ x


def by_function(x):
    return F.softmax(x @ x.mT, dim=-1) @ x


def by_bmm(x):
    heads = x.flatten(0, 1)
    return torch.bmm(torch.bmm(heads, heads.mT).log_softmax(-1).exp(), heads)


def by_kernel(x):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(x, x, x)[0]


WAYS = by_sdpa, by_op, by_method, by_function, by_bmm, by_kernel


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("attend", "fullgraph"),
    [(after_a_graph_break, False), *((x, whole) for x in WAYS for whole in (False, True))],
)
def test_attention_is_refused(group, rank_device, attend, fullgraph, dynamic) -> None:
    x = torch.randn(1, 2, LENGTH, 16, device=rank_device)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=fullgraph, dynamic=dynamic)
    if not fullgraph and attend is not by_kernel:
        torch.testing.assert_close(compiled(x), attend(x))  # which leaves a graph behind
    message = (
        r"inside context_parallel .*call the compiled model outside of context_parallel, made by"
    )
    for _ in range(2):
        with context_parallel(group, shards=zigzag()), pytest.raises(RuntimeError, match=message):
            compiled(x)


class Block(nn.Module):
    """Of which all but attention may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def mlp(self, x):
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden * hidden.softmax(-1))

    def forward(self, x, attend=by_sdpa):
        return self.mlp(attend(x))


@pytest.mark.parametrize("way", ["mlp", "disable"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_has_no_attention_is_compiled(group, rank_device, way, backend) -> None:
    torch.manual_seed(0)
    block, x = Block().to(rank_device), torch.randn(1, 2, LENGTH, 16, device=rank_device)
    torch._dynamo.reset()
    with context_parallel(group, shards=zigzag()):
        expected = block(x)
        wanted = torch.autograd.grad(expected.square().sum(), list(block.parameters()))
        if way == "mlp":
            found = torch.compile(block.mlp, backend=backend, fullgraph=True)(by_sdpa(x))
        else:
            found = torch.compile(block, backend=backend)(x, torch.compiler.disable(by_sdpa))
        gradients = torch.autograd.grad(found.square().sum(), list(block.parameters()))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("attention", ["fdattn", "sdpa", "eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_models_of_transformers(group, rank_device, attention, fullgraph) -> None:
    transformers = pytest.importorskip("transformers")
    torch_fdattn.dropins.transformers.register()
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)
    shards = SequenceShards.contiguous(LENGTH * dist.get_world_size(), dist.get_world_size())
    positions = shards.positions(dist.get_rank(), rank_device)[None]
    torch._dynamo.reset()
    compiled = torch.compile(model.to(rank_device), backend="eager", fullgraph=fullgraph)
    with (
        context_parallel(group, shards=shards),
        pytest.raises(RuntimeError, match="call the compiled model outside of context_parallel"),
    ):
        compiled(positions % 32, position_ids=positions, use_cache=False)
