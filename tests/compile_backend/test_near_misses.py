"""Near-misses: they look like attention that we have, and are not. They stay as they are, for a named reason.

Each is run against eager too, bit for bit: nothing of it may have been changed.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.compile_backend.harness import check, ops, qkv

sdpa = F.scaled_dot_product_attention


def weights(q, k, scale=0.25):
    return (q @ k.transpose(-2, -1) * scale).softmax(-1)


def left(reason, fn, *args, **options):
    """fn has exactly one attention, and it is left for this reason."""
    torch.manual_seed(0)
    found = check(fn, *args, lower="eager", exact=True, **options)
    assert found.report.reasons == [reason], str(found.report)
    assert not found.report.rewritten
    assert "fdattn" not in found.graph
    return found


def test_sdpa_with_dropout():
    left("dropout", lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), *qkv())


UNFUSED = {
    "softmax over queries": (
        "softmax-dim",
        lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-2) @ v,
    ),
    "weights returned": ("scores-used", lambda q, k, v: ((w := weights(q, k)) @ v, w)),
    "scores returned": (
        "scores-used",
        lambda q, k, v: ((s := q @ k.transpose(-2, -1)).softmax(-1) @ v, s),
    ),
    "scores summed": (
        "scores-used",
        lambda q, k, v: (s := q @ k.transpose(-2, -1)).softmax(-1) @ v + s.sum(),
    ),
    "weights used twice": ("scores-used", lambda q, k, v: (w := weights(q, k)) @ v + w @ (2 * v)),
    "dropout in training": (
        "dropout",
        lambda q, k, v: F.dropout(weights(q, k), 0.5, training=True) @ v,
    ),
    "a head mask": (
        "weights-unknown",
        lambda q, k, v: (weights(q, k) * torch.arange(4)[:, None, None]) @ v,
    ),
    "weights transposed": (
        "product",
        lambda q, k, v: weights(q, k).transpose(-2, -1) @ v,
    ),
    "weights on the right": (
        "product",
        lambda q, k, v: v.transpose(-2, -1) @ weights(q, k),
    ),
    "a negative scale": ("scale", lambda q, k, v: weights(q, k, -0.25) @ v),
    "filled with -100": (
        "mask-value",
        lambda q, k, v: (
            (q @ k.transpose(-2, -1)).masked_fill(torch.ones(8, 8).triu(1) > 0, -100.0).softmax(-1)
            @ v
        ),
    ),
    "k broadcast over the batch": (
        "batch-broadcast",
        lambda q, k, v: weights(q, k[:1]) @ v,
    ),
    "v broadcast over the batch": (
        "batch-broadcast",
        lambda q, k, v: weights(q, k) @ v[:1],
    ),
    "q broadcast over the heads": ("batch-broadcast", lambda q, k, v: weights(q[:, :1], k) @ v),
    "heads summed": (
        "product",
        lambda q, k, v: torch.einsum("bhqd,bgkd->bhqk", q, k).softmax(-1) @ v,
    ),
    "values summed over heads": (
        "product",
        lambda q, k, v: torch.einsum("bhqk,bhkd->bqd", weights(q, k), v),
    ),
    "a negative cap": (
        "scores-unknown",
        lambda q, k, v: (-20 * torch.tanh(q @ k.transpose(-2, -1) / 20)).softmax(-1) @ v,
    ),
    "capped twice": (
        "scores-unknown",
        lambda q, k, v: (q @ k.transpose(-2, -1)).tanh().mul(2).tanh().softmax(-1) @ v,
    ),
    "masked, then capped": (
        "scores-unknown",
        lambda q, k, v: (q @ k.transpose(-2, -1) + q[..., :8]).tanh().softmax(-1) @ v,
    ),
    "a cap from data": (
        "scores-unknown",
        lambda q, k, v: ((q @ k.transpose(-2, -1)).tanh() * q.sum()).softmax(-1) @ v,
    ),
    "filled with -1e9": (
        "mask-value",
        lambda q, k, v: (
            (q @ k.transpose(-2, -1)).masked_fill(torch.ones(8, 8).triu(1) > 0, -1e9).softmax(-1)
            @ v
        ),
    ),
    "filled with data": (
        "mask",
        lambda q, k, v: (
            torch.where(torch.ones(8, 8).tril() > 0, q @ k.transpose(-2, -1), q[..., :8]).softmax(
                -1
            )
            @ v
        ),
    ),
    "a mask of integers": (
        "mask",
        lambda q, k, v: (q @ k.transpose(-2, -1) - torch.arange(8)).softmax(-1) @ v,
    ),
    "a bias subtracted from": (
        "scores-unknown",
        lambda q, k, v: (q[..., :8] - q @ k.transpose(-2, -1)).softmax(-1) @ v,
    ),
    "a bias that is added twofold": (
        "scores-unknown",
        lambda q, k, v: torch.add(q @ k.transpose(-2, -1), q[..., :8], alpha=2).softmax(-1) @ v,
    ),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_unfused_attention(name):
    reason, fn = UNFUSED[name]
    left(reason, fn, *qkv())


# Square tensors, so that the wrong product has a valid shape.
_SQUARE = {
    "k in place of kᵀ": lambda q, k, v: (q @ k).softmax(-1) @ v,
    "weights times vᵀ": lambda q, k, v: weights(q, k) @ v.transpose(-2, -1),
}


@pytest.mark.parametrize("name", _SQUARE)
def test_products_without_transposition_keep_their_meaning(name):
    """(q k) is q times the transposed of kᵀ: another attention, over the columns of k, and still one of ours."""
    found = check(_SQUARE[name], *qkv(16), lower="eager")
    assert ops(found) == ["attention"]
    assert "transpose" in found.graph


NOT_ATTENTION = {
    "a classifier": lambda x, w: F.softmax(F.linear(x, w), dim=-1),
    "a router": lambda x, w: (x[:, 0, 0] @ w.T).softmax(-1),
    "pooling by a parameter": lambda x, w: x.sum(-1).softmax(-1),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_other_softmaxes_are_no_sites(name):
    x, w = torch.randn(2, 4, 8, 16), torch.randn(32, 16)
    found = check(NOT_ATTENTION[name], x, w, lower="eager", exact=True)
    assert len(found.report) == 0


def test_a_function_of_the_users_named_softmax():
    """Functions are known by identity."""

    @torch._dynamo.allow_in_graph
    def softmax(x, dim):
        return x.relu()

    left_over = check(
        lambda q, k, v: softmax(q @ k.transpose(-2, -1), dim=-1) @ v,
        *qkv(),
        lower="eager",
        exact=True,
    )
    assert len(left_over.report) == 0
