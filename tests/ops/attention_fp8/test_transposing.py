"""The kernel that turns values round for Hopper's products: its order of keys, and zeros beyond lengths."""

import pytest
import torch

from tests.interpreting import needs_interpret


@pytest.mark.interpreter
@needs_interpret
@pytest.mark.parametrize("lens", [None, [200, 0, -3], [130, 129, 1000]])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_transposing(head_dim, lens):
    from torch_fdattn.launch.launches import run
    from torch_fdattn.ops.attention.hopper.fp8 import _transposing_launch

    v = torch.randint(0, 127, (3, 200, 2, head_dim), dtype=torch.uint8).transpose(1, 2)
    turned = torch.full((3, 2, head_dim, 256), 99, dtype=torch.uint8)
    kv_lens = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    run((_transposing_launch(v, kv_lens, turned),))
    expected = torch.zeros(3, 2, 256, head_dim, dtype=torch.uint8)
    for b, n in enumerate([200] * 3 if lens is None else lens):
        kept = min(max(n, 0), 200)
        expected[b, :, :kept] = v[b, :, :kept]
    # Of 16 keys 8 i + 2 j + l come at 4 j + 2 i + l.
    expected = (
        expected.view(3, 2, 16, 2, 4, 2, head_dim).transpose(3, 4).reshape(3, 2, 256, head_dim)
    )
    assert torch.equal(turned, expected.mT)
