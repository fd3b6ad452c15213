"""torch.compile(backend="fdattn"): a model that calls PyTorch's SDPA gets our attention, and a report says where.

    python examples/compile_sdpa.py
    fdattn explain examples/compile_sdpa.py:make

The model is not changed. `explain` runs it once and says what becomes of each attention, with its source line.
"""

import torch
import torch.nn.functional as F
from torch import nn

import torch_fdattn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head dim)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def make():
    """What `fdattn explain` takes: a function or module, and its arguments as a tuple, also one alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(Block(64, 4), Block(64, 4)).to(device)
    return model, (torch.randn(2, 96, 64, device=device),)


def main() -> None:
    model, (x,) = make()
    print(torch_fdattn.explain(model)(x))

    # With "require_all" attention that stays as it was is an error. mode and other options are Inductor's.
    compiled = torch.compile(model, backend="fdattn", options={"require_all": True})
    gradients = []
    for function in (model, compiled):
        model.zero_grad()
        out = function(x)
        out.square().mean().backward()
        gradients.append(model[0].qkv.weight.grad.clone())
    difference = (gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()
    print(f"gradients, relative difference from eager: {difference:.1e}")


if __name__ == "__main__":
    main()
