"""Timing with a clock that only moves when a call says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from benchmarks.ranks import Ranks
from benchmarks.timing import (
    GRAPH,
    RotatedGraph,
    Rounds,
    Sample,
    Timer,
    calls_within,
    copies_needed,
    interleave,
)

CPU = torch.device("cpu")


class Clock:
    """Seconds; each call of `takes` moves it by its own time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[object] = []

    def __call__(self) -> float:
        return self.now

    def takes(self, *microseconds: float, name: object = None):
        """A call that takes these times in turn, the last for ever."""
        left = list(microseconds)

        def call() -> None:
            self.order.append(name)
            self.now += 1e-6 * (left.pop(0) if len(left) > 1 else left[0])

        return call


def test_median_and_spread() -> None:
    sample = Sample((10.0, 12.0, 11.0))
    assert sample.median == 11.0
    assert sample.spread == pytest.approx(2 / 11)
    assert Sample((5.0,)).spread == 0.0


def test_each_call_is_timed_by_itself() -> None:
    clock = Clock()
    times = Timer(CPU, clock).each_us(clock.takes(7, 5, 5, 100), 4)
    assert times == pytest.approx([7, 5, 5, 100])


def test_sampler_warms_up_and_gives_the_median() -> None:
    clock = Clock()
    # Two warm-up calls, three to estimate (20 µs), then 5 calls fill 100 µs; one of them is disturbed.
    call = clock.takes(9000, 9000, 20, 20, 20, 20, 500, 20, 21, 20)
    sample = Timer(CPU, clock).sampler(call, target_us=100)
    assert len(clock.order) == 5
    assert sample() == pytest.approx(20)
    assert len(clock.order) == 10


def test_host_time_excludes_what_the_device_does_later() -> None:
    class Queued(Timer):
        """A device on which each synchronize takes a millisecond."""

        def synchronize(self) -> None:
            clock.now += 1e-3

    clock = Clock()
    timer = Queued(CPU, clock)
    assert timer.host_us([clock.takes(40)], 10) == pytest.approx(40)
    assert timer.eager_us([clock.takes(40)], 10) == pytest.approx(40 + 100)


def test_calls_rotate() -> None:
    clock = Clock()
    calls = [clock.takes(1, name=name) for name in "abc"]
    Timer(CPU, clock).eager_us(calls, 7)
    assert "".join(clock.order) == "abcabca"


def test_a_graph_rotates_its_inputs_and_divides_by_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's graphs and events in Python, on the fake clock: a replay repeats what was captured."""
    clock = Clock()

    class Graph:
        def replay(self) -> None:
            for name in captured:
                clock.takes(3, name=name)()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    @contextlib.contextmanager
    def capture(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        # Another thread, as NCCL's watchdog, may meanwhile do what a capture forbids.
        assert capture_error_mode == "thread_local"
        before = len(clock.order)
        yield
        captured.extend(clock.order[before:])

    captured: list[object] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: mock.Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    calls = [clock.takes(10, name=name) for name in "abc"]
    graph = RotatedGraph(Timer(CPU, clock), calls, target_us=70)
    # Eagerly 10 µs a call: seven fill the target, rounded up to whole rotations.
    assert "".join(captured) == "abcabcabc"
    assert graph.sample() == pytest.approx(3)
    replayed = len(clock.order)
    assert graph.next() == pytest.approx(3)
    assert len(clock.order) - replayed == 2 * len(captured)


def test_turns_come_in_orders_of_their_own() -> None:
    """So that none always comes behind the same one, whose heat it would have."""
    order, rows = [], []
    recorder = mock.Mock(add_sample=lambda *row: rows.append(row))
    ranks = Ranks(0, 1, CPU, "alone")
    rounds = Rounds("case", ranks, recorder)

    def sampler(name: str):
        def sample() -> float:
            order.append(name)
            return float(order.count(name))

        return sample

    with (
        mock.patch("benchmarks.timing.barrier"),
        mock.patch("benchmarks.timing.slowest", lambda _, times: list(times)),
    ):
        for name in "abcd":
            rounds.add(name, GRAPH, sampler(name))
        medians = rounds.sample(2)
    turns = ["".join(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert all(sorted(turn) == list("abcd") for turn in turns)
    assert len(set(turns)) > 2
    # Of 1, 2, …, without the first.
    assert set(medians[GRAPH].values()) == {(2 + len(turns)) / 2}
    assert [row[1] for row in rows] == list("abcd")


def test_interleaving_takes_turns_and_leaves_out_what_fails() -> None:
    order = []

    def sampler(name: str, values: list[float], fails_at: int | None = None):
        def sample() -> float:
            order.append(name)
            if order.count(name) == fails_at:
                raise RuntimeError("gone")
            return values[order.count(name) - 1]

        return sample

    samples, failures = interleave(
        {
            "a": sampler("a", [1, 3, 2]),
            "b": sampler("b", [5, 5, 5], 2),
            "c": sampler("c", [7, 7, 7]),
        },
        repeats=3,
    )
    rounds = "".join(order[:3]), "".join(order[3:6]), "".join(order[6:])
    assert [sorted(names) for names in rounds] == [list("abc"), list("abc"), list("ac")]
    assert len(set(rounds)) > 1
    assert samples == {"a": Sample((1, 3, 2)), "c": Sample((7, 7, 7))}
    assert list(failures) == ["b"]
    assert str(failures["b"]) == "gone"


def test_calls_within() -> None:
    assert calls_within(100, 10_000, 3, 1000) == 100
    assert calls_within(1, 10_000, 3, 1000) == 1000
    assert calls_within(1e6, 10_000, 3, 1000) == 3
    assert calls_within(0, 10_000, 3, 1000) == 1000


def test_copies_hold_four_times_the_l2() -> None:
    mib = 2**20
    assert copies_needed(4 * mib, 50 * mib) == 50
    assert copies_needed(3 * mib, 50 * mib) == 67
    assert copies_needed(200 * mib, 50 * mib) == 2
    assert copies_needed(4096 * mib, 50 * mib) == 2
