"""What tests of decode call it with: queries, caches, lengths, and the caches' pages."""

import torch

from torch_fdattn.testing import make_tensor

OPS = torch.ops.fdattn


LENS = (130, 7, 0, 61)


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def caches(device, dtype=torch.float32, lens=LENS, capacity=160):
    q = make_tensor((len(lens), 6, 1, 32), device=device, dtype=dtype)
    k, v = (make_tensor((len(lens), 2, capacity, 32), device=device, dtype=dtype) for _ in range(2))
    return q, k, v, int32(*lens, device=device)


def in_pages(x, page):
    """Pages of x (B, H, N, D) in order, and their table."""
    batch, heads, length, dim = x.shape
    pages = x.view(batch, heads, length // page, page, dim).transpose(1, 2).flatten(0, 1)
    table = torch.arange(pages.shape[0], dtype=torch.int32, device=x.device).view(batch, -1)
    return pages.contiguous(), table
