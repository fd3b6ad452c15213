"""What tests of tiles share: the tiles that a kernel is launched with, and small inputs."""

from __future__ import annotations

from unittest import mock

import torch

from torch_fdattn.launch import prepared
from torch_fdattn.testing import make_tensor


class Watched:
    """The tiles that a kernel is launched with."""

    def __init__(self, kernel) -> None:
        self.kernel, self.sides = kernel, set()

    def __enter__(self) -> Watched:
        prepared.forget()
        real = type(self.kernel).__getitem__

        def getitem(kernel, grid):
            call = real(kernel, grid)
            if kernel is not self.kernel:
                return call

            def watched(*args, **kwargs):
                self.sides.add((kwargs["BLOCK_M"], kwargs["BLOCK_N"]))
                return call(*args, **kwargs)

            return watched

        self.patch = mock.patch.object(type(self.kernel), "__getitem__", getitem)
        self.patch.start()
        return self

    def __exit__(self, *_) -> None:
        self.patch.stop()


def small(device, requires_grad=False, dtype=torch.float16):
    shapes = (1, 2, 24, 16), (1, 1, 24, 16), (1, 1, 24, 16)
    return [make_tensor(x, dtype=dtype, device=device).requires_grad_(requires_grad) for x in shapes]  # fmt: skip
