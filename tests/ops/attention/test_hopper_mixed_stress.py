"""Ten thousand launches of Hopper's kernels of mixed shapes, on two streams and in two graphs at once, on an sm_90."""

import itertools
import random

import pytest
import torch

from tests.ops.attention.counting import ON_HOPPER, Checked, in_time
from tests.ops.attention.exact_inputs import FP8, Form, backward_of, call_of, in_order, normal
from torch_fdattn.ops.library import launches

pytestmark = ON_HOPPER

#: At least 10,000; of 24 calls on two streams as many each.
LAUNCHES = 48 * 209
#: What each second call is; between them stand backward calls, of which each second one is ordered.
LAYOUTS = ("dense", "packed", "lengths", "fp8", "pages")
BACKWARD_LAYOUTS = ("dense", "lengths", "packed")
KERNELS = {
    "attention_forward/hopper",
    "varlen_attention_forward/hopper",
    "attention_fp8/hopper",
    "attention_backward/hopper",
    "varlen_attention_backward/hopper",
}
LENGTHS = 1, 64, 130, 257, 1000
#: ‖dQ - dQ of the first run‖ / ‖dQ‖: another order of float32 sums, which rounding to bfloat16 shows rarely.
ERROR_OF_DQ = 2e-3


class Backward(Checked):
    """In any order: dK and dV to the bit; dQ, whose sums have none, nearly."""

    def errors(self):
        (dq, *found), (first, *expected) = self.call(), self.expected
        apart = (dq.float() - first.float()).norm()
        wrong = ~(apart <= ERROR_OF_DQ * first.float().norm())  # of NaN, too
        return wrong + sum((x != right).sum() for x, right in zip(found, expected, strict=True))


def drawn_calls() -> list[Checked]:
    """Twenty-four, forward and backward by turns, with the results of a first run, one after the other."""
    rng, calls = random.Random(0), []
    for i in range(24):
        layouts = LAYOUTS if i % 2 == 0 else BACKWARD_LAYOUTS
        layout = layouts[i // 2 % len(layouts)]
        # Of many short sequences two heads share a tile.
        many = i % 8 == 2
        count, heads = (12, 16) if many else (rng.choice((1, 2, 3)), rng.choice((2, 8, 16)))
        # Of dense calls all sequences are equally long, of lengths the queries.
        many_queries, many_keys = (
            [rng.choice(lengths) for _ in range(count)]
            for lengths in ((1, 17, 64) if many else LENGTHS, LENGTHS)
        )
        if layout not in ("packed", "pages"):
            many_queries = many_queries[:1] * count
        if layout in ("dense", "fp8"):
            many_keys = many_keys[:1] * count
        # A causal call's queries are no more than its keys, and each has a key.
        many_keys = [max(x, y) for x, y in zip(many_queries, many_keys, strict=True)]
        if layout == "lengths" and count > 1:
            many_keys[-1] = 0
        form = Form(
            tuple(many_queries), tuple(many_keys), rng.choice(((-1, -1), (-1, 0))),
            "dense" if layout == "fp8" else layout,
        )  # fmt: skip
        head_dim = rng.choice((64, 128) if i % 2 and layout == "packed" else (64, 128, 256))
        sequences = normal(form, head_dim, heads, heads // 2, "cuda")
        if i % 2 == 0:
            call = call_of(form, sequences, FP8 if layout == "fp8" else torch.bfloat16)
            calls.append(Checked(call, call()))
        else:
            douts = [torch.randn_like(q) for q, _, _ in sequences]
            call = backward_of(form, sequences, douts, torch.bfloat16)
            if i // 2 % 2:
                call = in_order(call)
            has_order = i // 2 % 2 or head_dim == 256
            calls.append((Checked if has_order else Backward)(call, call()))
    for call in calls:
        call.call()  # bound, so that a capture finds it so
    torch.cuda.synchronize()
    return calls


@pytest.fixture(scope="module")
def calls():
    torch.manual_seed(0)
    launches.clear()
    drawn = drawn_calls()
    assert set(launches) == KERNELS
    return drawn


def counters(count: int) -> list[torch.Tensor]:
    """Of wrong entries: of each stream or graph its own."""
    return [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(count)]


def test_one_after_the_other(calls):
    (errors,) = counters(1)
    launches.clear()

    def work():
        for call in calls * (LAUNCHES // len(calls)):
            errors.add_(call.errors())
        torch.cuda.synchronize()

    in_time(work)
    assert errors.item() == 0
    assert set(launches) == KERNELS
    assert sum(launches.values()) == LAUNCHES


def test_eager_calls_on_two_streams_at_once(calls):
    """In another order on each."""
    streams, errors = [torch.cuda.Stream() for _ in range(2)], counters(2)
    torch.cuda.synchronize()
    orders = [random.Random(seed).sample(calls, len(calls)) for seed in range(2)]
    launches.clear()

    def work():
        for _ in range(LAUNCHES // 2 // len(calls)):
            for pair in zip(*orders, strict=True):
                for stream, error, call in zip(streams, errors, pair, strict=True):
                    with torch.cuda.stream(stream):
                        error.add_(call.errors())
        torch.cuda.synchronize()

    in_time(work)
    assert [x.item() for x in errors] == [0, 0]
    assert set(launches) == KERNELS
    assert sum(launches.values()) == LAUNCHES


def test_graphs_on_two_streams_at_once(calls):
    """Each of all calls, in another order; and eager calls on a third stream beside them."""
    streams, errors = [torch.cuda.Stream() for _ in range(3)], counters(3)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    launches.clear()
    for seed, (graph, error) in enumerate(zip(graphs, errors, strict=False)):
        with torch.cuda.graph(graph):
            for call in random.Random(seed).sample(calls, len(calls)):
                error.add_(call.errors())
    assert set(launches) == KERNELS
    assert sum(launches.values()) == 2 * len(calls)
    torch.cuda.synchronize()
    eager = itertools.cycle(calls)

    def work():
        for _ in range(LAUNCHES // 2 // len(calls)):
            for stream, graph in zip(streams, graphs, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
            with torch.cuda.stream(streams[2]):
                errors[2].add_(next(eager).errors())
        torch.cuda.synchronize()

    in_time(work)
    assert [x.item() for x in errors] == [0, 0, 0]
