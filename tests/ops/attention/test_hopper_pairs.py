"""Hopper's forward of few queries, where two heads share a tile, against the oracle, on an sm_90."""

import pytest
import torch

from tests.ops.attention.test_hopper import check, check_op, normal
from torch_fdattn.ops.positions import Mask

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("queries", "heads"), [(17, 8), (64, 8), (65, 8), (64, 6), (33, 4)])
def test_few_queries_of_many_heads(queries, heads, head_dim, causal):
    """More tiles than SMs, so that two heads of two, three or four share one."""
    q = normal(70, heads, queries, head_dim)
    k, v = (normal(70, 2, 300, head_dim) for _ in range(2))
    check(q, k, v, Mask(window_right=0 if causal else -1))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("feature", ["lengths", "positions", "window", "softcap", "slopes of sequences", "sinks"])  # fmt: skip
def test_few_queries_of_many_heads_with(feature, head_dim):
    """Each head of a pair has its own slopes and sinks; lengths and positions are both heads'. Some rows see no key."""
    q = normal(40, 8, 33, head_dim)
    k, v = (normal(40, 2, 300, head_dim) for _ in range(2))
    options, lens = dict(causal=True), None
    match feature:
        case "lengths":
            lens = [0, 5, 129, 300] * 10
        case "positions":
            options["q_start"] = [-20, 0, 100, 1000] * 10
        case "window":
            options = dict(window=(70, 20))
        case "softcap":
            options["softcap"] = 1.5
        case "slopes of sequences":
            options["alibi_slopes"] = torch.rand(8, 40, device="cuda").mT / 8
        case "sinks":
            options["sinks"] = torch.linspace(-3, 9, 8, device="cuda")
    check_op(q, k, v, lens, options)
