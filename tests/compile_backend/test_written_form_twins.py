"""Graphs that look like those of `test_written_forms.py` and mean something else: they stay as they were written."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F

from tests.compile_backend.harness import Recorder, check, ops, qkv
from tests.compile_backend.test_near_misses import left
from tests.compile_backend.test_written_forms import LEAST, _bart, _merged, _scores, hidden
from torch_fdattn.compile_backend.graph.functional import Functionalized


def _alias_read_later(q, k, v):
    """An older view of the scores is read once they were scaled."""
    scores = _scores(q, k)
    view = scores.transpose(1, 2)
    scores.mul_(0.25)
    return scores.softmax(-1) @ v, view + 1


def _written_through_a_view(q, k, v):
    scores = _scores(q, k)
    view = scores.view(2, 4, 8, 8)
    view.mul_(0.25)
    return scores.softmax(-1) @ v


def _part_of_what_is_read_later(q, k, v):
    both = q @ torch.cat([k, k * 2], 2).mT
    scores = both[..., :8]
    scores.mul_(0.25)
    return scores.softmax(-1) @ v + both[..., 8:].sum()


def _written_later(q, k, v):
    scores = _scores(q, k)
    weights = scores.softmax(-1)
    scores.mul_(2)
    return weights @ v, scores


def _no_grad_around_a_write(q, k, v):
    """Which scales the scores and not their gradient."""
    scores = _scores(q, k)
    with torch.no_grad():
        scores.mul_(0.25)
    return scores.softmax(-1) @ v


def _scores_without_gradients(q, k, v):
    """And a bias that wants one, which is added in place afterwards."""
    with torch.no_grad():
        scores = torch.bmm(q[0], k[0].mT)
    scores += v[0, ..., :8]
    return scores.softmax(-1) @ v[0]


def _mask_of_two_uses(q, k, v):
    """What is added to the scores is the scores' own other half."""
    scores = _scores(q, k)
    scores += scores.flip(-1)
    return scores.softmax(-1) @ v


def _temperature_written_later(q, k, v, t):
    t = t * 2
    scores = _scores(q, k) * t
    t.add_(1)
    return scores.softmax(-1) @ v + t


def _other_split(q, k, v):
    """Heads and batch in the other order: where merged heads are taken apart, they belong to other sequences."""
    scores = torch.bmm(_merged(q), _merged(k).mT).view(4, 2, 8, 8)
    scores = scores + torch.arange(2.0)[:, None, None] * torch.arange(8.0)
    return torch.bmm(scores.softmax(-1).view(8, 8, 8), _merged(v))


IN_PLACE = {
    "an alias that is read later": ("scores-used", _alias_read_later),
    "written through a view": ("scores-used", _written_through_a_view),
    "a part of what is read later": ("scores-unknown", _part_of_what_is_read_later),
    "written once softmax has read them": ("in-place", _written_later),
    "under no_grad": ("in-place", _no_grad_around_a_write),
    "scores without gradients": ("scores-unknown", _scores_without_gradients),
    "added to themselves": ("scores-used", _mask_of_two_uses),
    "an active dropout": ("dropout", lambda q, k, v: F.dropout(_scores(q, k).softmax(-1), 0.5, True, True) @ v),
    "weights that are filled": (
        "scores-used", lambda q, k, v: (w := _scores(q, k).softmax(-1), w.masked_fill_(hidden(), 0), w @ v)[-1],
    ),
}  # fmt: skip

OTHERS = {
    "merged, and softmax over heads": (
        "product",
        lambda q, k, v: torch.bmm(
            torch.bmm(_merged(q), _merged(k).mT).view(2, 4, 8, 8).softmax(1).view(8, 8, 8), _merged(v)
        ),
    ),
    "merged queries and batch": (
        "scores-unknown",
        lambda q, k, v: (q.flatten(0, 1) @ k.flatten(0, 1).mT).view(4, 16, 8).softmax(-1).view(8, 8, 8)
        @ v.flatten(0, 1),
    ),
    "queries and keys exchanged by a view": (
        "product", lambda q, k, v: _scores(q, k).softmax(-1).transpose(2, 3).reshape(2, 4, 8, 8) @ v,
    ),
    "k qᵀ, softmax over its queries": ("product", lambda q, k, v: (k @ q.mT).softmax(-1).mT @ v),
    "weights that are cut off": ("weights-unknown", lambda q, k, v: _scores(q, k).softmax(-1).detach() @ v),
    "clamped at -50": ("mask-value", lambda q, k, v: _scores(q, k).clamp(min=-50).softmax(-1) @ v),
    "clamped from above": ("scores-unknown", lambda q, k, v: _scores(q, k).clamp(LEAST, 5).softmax(-1) @ v),
    "maximum with data": ("scores-unknown", lambda q, k, v: torch.maximum(_scores(q, k), v[..., :8]).softmax(-1) @ v),
    "clamped before the mask": (
        "scores-unknown",
        lambda q, k, v: (_scores(q, k).clamp(min=LEAST).masked_fill(hidden(), -math.inf)).softmax(-1) @ v,
    ),
    "clamped, then scaled": ("scores-unknown", lambda q, k, v: (_scores(q, k).clamp(min=LEAST) * 2).softmax(-1) @ v),
    "a maximum of rows that may be hidden, whose ties have half a gradient": (
        "mask-value",
        lambda q, k, v: torch.max(
            _scores(q, k) + torch.where(v[:, :1, None, :, 0] > 0, 0.0, LEAST), torch.tensor(LEAST)
        ).softmax(-1) @ v,
    ),
    "a temperature of each key": ("scores-unknown", lambda q, k, v: (_scores(q, k) * v[:, :, None, :, 0]).softmax(-1) @ v),
    "a temperature behind a mask": (
        "scores-unknown", lambda q, k, v: ((_scores(q, k) + v[..., :8]) * q.sum()).softmax(-1) @ v,
    ),
    "a temperature of the weights": ("weights-unknown", lambda q, k, v: (_scores(q, k).softmax(-1) * q.sum()) @ v),
    "over the scores": ("scores-unknown", lambda q, k, v: (q.sum() / _scores(q, k)).softmax(-1) @ v),
    "baddbmm of the values": (
        "product", lambda q, k, v: torch.baddbmm(v[0], (q[0] @ k[0].mT).softmax(-1), v[0]),
    ),
    "einsum that sums over heads": (
        "product",
        lambda q, k, v: torch.einsum("...qd,g...kd->...qk", q[:, 0], k.transpose(0, 1)).softmax(-1) @ v[:, 0],
    ),
    "einsum with one head twice": (
        "product", lambda q, k, v: torch.einsum("bhqd,bgkd->bhqk", q, k).softmax(-1) @ v,
    ),
    "K of each head, for all groups": (
        "heads",
        lambda q, k, v: (q.view(2, 2, 2, 8, 16) @ k[:, None, :2].mT).softmax(-1) @ v[:, None, :2],
    ),
    "K and V for the whole batch": (
        "batch-broadcast",
        lambda q, k, v: torch.einsum("bhqk,hkd->bhqd", torch.einsum("bhqd,hkd->bhqk", q, k[0]).softmax(-1), v[0]),
    ),
    "weights summed over a group": (
        "product",
        lambda q, k, v: torch.einsum(
            "bgnqk,bgkd->bgqd", (q.view(2, 2, 2, 8, 16) @ k[:, :2, None].mT).softmax(-1), v[:, :2]
        ),
    ),
    "a number for a mask": ("scores-unknown", lambda q, k, v: (_scores(q, k) + True).softmax(-1) @ v),
    "integers for a mask": ("mask", lambda q, k, v: (_scores(q, k) + hidden().long()).softmax(-1) @ v),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    reason, fn = IN_PLACE[name]
    found = left(reason, fn, *qkv(grad="no_grad" in name or "gradients" in name))
    assert "mul(" not in found.graph.replace("mul_(", "")


@pytest.mark.parametrize("name", OTHERS)
def test_other_meaning(name):
    torch.manual_seed(0)
    reason, fn = OTHERS[name]
    left(reason, fn, *qkv())


def test_a_temperature_that_is_written_later():
    left("in-place", _temperature_written_later, *qkv(grad=False), torch.rand(4, 1, 1) + 0.5)


def test_a_scale_written_into_an_input():
    """The scores are the caller's tensor."""

    def fn(scores, q, k, v):
        torch.matmul(q, k.mT, out=scores)
        scores.mul_(0.25)
        return scores.softmax(-1) @ v

    q, k, v = qkv(grad=False)
    found = check(fn, torch.empty(2, 4, 8, 8), q, k, v, lower="eager")
    assert not found.report.rewritten


def test_merged_heads_of_another_split_are_other_heads():
    """The same numbers in another order: a site of its own meaning, whose bias is that of its own heads."""
    found = check(_other_split, *qkv(), lower="eager")
    assert ops(found) == ["attention"]


def test_a_graph_that_is_left_is_as_it_was_written():
    """In-place operations are out of place only while the graph is matched, and in what is rewritten."""

    def fn(q, k, v):
        scores = _scores(q, k)
        scores.mul_(0.25)
        scores += 1.0
        weights = F.dropout(scores.softmax(-1), 0.1, training=False, inplace=True)
        return weights.relu() @ v

    codes = []

    def backend(gm, inputs):
        before = gm.code
        recorder = Recorder("eager")
        compiled = recorder(gm, inputs)
        gm.recompile()
        codes.append((before, gm.code, recorder.found.report.reasons))
        return compiled

    q, k, v = qkv(grad=False)
    torch._dynamo.reset()
    found = torch.compile(fn, backend=backend, fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, fn(q, k, v), rtol=0, atol=0)
    ((before, after, reasons),) = codes
    assert reasons == ["unknown-op"]
    assert before == after
    assert "mul_" in after
    assert "iadd" in after or "+=" in after


def test_one_is_rewritten_and_its_neighbour_is_as_it_was_written():
    def fn(q, k, v):
        scores = _scores(q, k)
        scores.mul_(0.25)
        other = _scores(k, q)
        view = other.transpose(1, 2)
        other.mul_(0.5)
        return scores.softmax(-1) @ v, other.softmax(-1) @ v, view

    found = check(fn, *qkv(grad=False), lower="eager")
    assert ops(found) == ["attention", None]
    assert found.graph.count("mul_(0.5)") == 1
    assert "mul_(0.25)" not in found.graph


def test_a_result_that_is_another_softmaxs_scores_and_is_written_to():
    """In training ours keeps its output for the backward, where a product keeps only its operands."""

    def fn(q, k, v):
        scores = (_scores(q, k) / 4).softmax(-1) @ v
        scores.mul_(0.5)
        return scores.softmax(-1).relu() @ v

    found = check(fn, *qkv(16))
    assert ops(found) == ["attention"]
    assert "mul_(0.5)" in found.graph
    assert "clone" in found.graph


def test_one_mask_of_two_layouts():
    """A mask that merged heads and heads of their own share is read for each as it stands there."""

    def fn(q, k, v, bias):
        first = (_scores(q, k) + bias.view(2, 4, 8, 8)).softmax(-1) @ v
        second = _bart(q, k, v, bias.view(2, 4, 8, 8))
        merged = torch.bmm((torch.bmm(_merged(q), _merged(k).mT) + bias).softmax(-1), _merged(v))
        return first, second, merged

    found = check(fn, *qkv(), torch.randn(8, 8, 8, requires_grad=True), lower="eager")
    assert ops(found) == ["attention"] * 3


def test_what_is_read_as_it_was_before_a_write_is_kept():
    """Where a rewrite reads scores as they were, behind a write that stays, this goes into a copy."""

    def fn(q, k, v):
        scores = _scores(q, k)
        scores.mul_(0.5)
        return scores.softmax(-1).relu() @ v

    totals = []

    def backend(gm, inputs):
        twins = Functionalized(gm)
        product = next(x for x in gm.graph.nodes if x.target is operator.matmul)
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            total = gm.graph.call_function(torch.sum, (product,))
        output.args = ((*output.args[0], total),)
        twins.restore()
        assert "mul_" in [x.target for x in gm.graph.nodes]
        gm.recompile()

        def run(*args):
            *outputs, total = gm(*args)
            totals.append(total)
            return outputs

        return run

    q, k, v = qkv(grad=False)
    torch._dynamo.reset()
    found = torch.compile(fn, backend=backend, fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, fn(q, k, v))
    torch.testing.assert_close(totals, [_scores(q, k).sum()])
