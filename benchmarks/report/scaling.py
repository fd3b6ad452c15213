"""A model of how times fall with the number of GPUs: bytes read, FLOPs, latency, wires; beside what was measured.

Every constant is from results files or from a note, named where it is taken. Times are µs, rates bytes or FLOPs a µs. The
generated tables of docs/notes/scaling.md say how far the model is from what was measured, and what it predicts;
`scaling_figure.py` draws both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..metrics import METRICS
from ..results import RESULTS_DIR, Results
from .tables import markdown_table, values_of

#: GPUs of one host, and those beyond: an NVLink domain of a rack has 72.
HOST, RACK = (1, 2, 4, 8), (16, 32, 64, 72)
_LINK = "../../benchmarks/results"  # from docs/notes
_H100, _H200 = "H100-80GB-HBM3", "H200"
#: docs/notes/ring-attention.md, two H200, 128k tokens: K and V of 64k, by NCCL beside attention and by copy engines.
_KV_BYTES = 2 * 16 * 65536 * 128 * 2
NCCL_UNDER_ATTENTION, COPY_ENGINE = _KV_BYTES / 5019, _KV_BYTES / 1476
#: The same table: merges of fp32 states of 64k tokens, 16 heads of 128.
_MERGED = 65536 * 16 * 128 / 2450


class Line(NamedTuple):
    """µs of an amount: fixed + amount / rate."""

    fixed: float
    rate: float

    def __call__(self, amount: float) -> float:
        return self.fixed + amount / self.rate

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Line:
        """Through two measured (amount, µs)."""
        (x, y), (x2, y2) = first, second
        rate = (x2 - x) / (y2 - y)
        return cls(y - x / rate, rate)


@dataclass(frozen=True)
class Curve:
    """One case over numbers of GPUs.

    Attributes:
        predict: µs on so many GPUs.
        measured: µs by number of GPUs.
        fitted: the numbers of GPUs from whose times of this case constants were taken.
        largest: the most GPUs that the case can be spread over; 0: it stands for a run alone, without predictions.
        drawn: whether the figure has it.
    """

    name: str
    metric: str
    predict: Callable[[int], float]
    measured: dict[int, float] = field(default_factory=dict)
    fitted: tuple[int, ...] = ()
    largest: int = max(RACK)
    drawn: bool = True

    @property
    def us(self) -> float:
        """Of the metric's unit."""
        return _us(self.metric)

    def shown(self, us: float) -> str:
        """With its unit."""
        metric = METRICS[self.metric]
        return f"{metric.format(us / self.us)} {metric.unit.replace('us', 'µs')}"


def _us(metric: str) -> float:
    return 1e3 if METRICS[metric].unit == "ms" else 1.0


class Measured:
    """The newest times of a folder of results, in µs; `sources`: by the names of the files that were asked for, their dates."""

    def __init__(self, folder: Path = RESULTS_DIR) -> None:
        self._folder, self.sources = folder, dict[str, str]()

    def times(
        self, gpu: str, gpus: int, benchmark: str, metric: str
    ) -> dict[str, dict[str, float]]:
        """By case and implementation; nothing where it was not measured."""
        run = self._newest(gpu, gpus, benchmark)
        found = values_of(run, metric) if run else {}
        us = _us(metric)
        return {case: {impl: us * x for impl, x in by.items()} for case, by in found.items()}

    def commit(self, gpu: str, gpus: int, benchmark: str) -> object:
        run = self._newest(gpu, gpus, benchmark)
        return run.meta["commit"] if run else None

    def over_gpus(
        self, gpu: str, benchmark: str, metric: str, case: str, impl: str
    ) -> dict[int, float]:
        """By number of GPUs; `{gpus}` in the case's name is that number."""
        found = {}
        for gpus in HOST:
            by = self.times(gpu, gpus, benchmark, metric).get(case.format(gpus=gpus), {})
            found |= {gpus: by[impl]} if impl in by else {}
        return found

    def _newest(self, gpu: str, gpus: int, benchmark: str) -> Results | None:
        paths = sorted(self._folder.glob(f"*_{gpu}x{gpus}_{benchmark}.json"))
        if not paths:
            return None
        run = Results.load(paths[-1])
        self.sources[paths[-1].name] = str(run.meta["date"])
        return run


def exchange(measured: Measured) -> Line:
    """A one-sided message over the bytes that a rank sends: four GPUs, 4 B and 1 MiB to each of three."""
    times = measured.times(_H100, 4, "dist-decode-latency", "graph_us")
    sizes = (4, 2**20)
    return Line.through(*((3 * size, times[f"message {size} B"]["fdattn/one_sided"]) for size in sizes))  # fmt: skip


def decode_curves(measured: Measured) -> list[Curve]:
    """Sharded decode of one sequence, `auto`: its share of the cache is read, then rows of fp32 go to all others.

    The read is the line through the local decode of 128k and 1M tokens on two GPUs.
    """
    sends, dim, kv_heads = exchange(measured), 128, 8
    benchmark, cases = "dist-decode-compare", {32768: 32, 131072: 32, 1048576: 64}
    names = {length: f"B1 H{heads}/{kv_heads} N{length} D{dim} bf16" for length, heads in cases.items()}  # fmt: skip
    local = measured.times(_H100, 2, benchmark, "graph_us")

    def cache_bytes(length: int) -> int:
        return 2 * length * kv_heads * dim * 2

    fit = (131072, 1048576)
    reads = Line.through(*((cache_bytes(n) / 2, local[names[n]]["local"]) for n in fit))

    def curve(length: int, heads: int) -> Curve:
        def predict(gpus: int) -> float:
            sent = (gpus - 1) * heads * (dim + 1) * 4
            return reads(cache_bytes(length) / gpus) + (sends(sent) if gpus > 1 else 0.0)

        name, fitted = names[length], (2,) if length in fit else ()
        found = measured.over_gpus(_H100, benchmark, "graph_us", name, "fdattn/auto")
        alone = measured.times(_H100, 1, "decode", "graph_us").get(name, {})
        alone = {1: alone["fdattn"]} if "fdattn" in alone else {}
        return Curve(f"decode {name}", "graph_us", predict, alone | found, fitted)

    return [curve(*each) for each in cases.items()]


def ring_curves(measured: Measured) -> list[Curve]:
    """Ring attention, causal, 16 heads of 128, `ring`, forward, a call at a time.

    A step's attention hides the next step's K and V where it takes longer; every step but the first merges its rows; what a
    call takes besides, host and start, is what is left of 16k tokens on two GPUs.
    """
    heads, dim = 16, 128

    def name(length: int) -> str:
        return f"ring B1 H16/16 N{length} D128 causal bf16 forward"

    def times(gpus: int, length: int) -> dict[str, float]:
        found = measured.times(_H200, gpus, f"ring-{length}", "latency_ms")
        return found.get(name(length), {})

    def flops(length: int) -> float:
        return 4 * heads * length**2 * dim / 2

    def device(length: int, gpus: int, rate: float) -> float:
        step = flops(length) / rate / gpus**2
        wire = 2 * heads * length / gpus * dim * 2 / NCCL_UNDER_ATTENTION
        merges = (gpus - 1) * length / gpus * heads * dim / _MERGED
        return step + (gpus - 1) * max(step, wire) + merges

    short, long = 16384, 131072
    first = times(2, short)
    call = first["fdattn/ring"] - device(short, 2, flops(short) / first["single_device"])
    newest = flops(long) / times(2, long)["single_device"]

    def curve(length: int) -> Curve:
        """By the rate of its own session, since GPUs ran at other clocks in each."""
        found = times(2, length)
        measured = {1: found["single_device"], 2: found["fdattn/ring"]} if found else {}
        rate = flops(length) / found["single_device"] if found else newest

        def predict(gpus: int) -> float:
            return device(length, gpus, rate) + (call if gpus > 1 else 0.0)

        fitted = (1, 2) if length == short else (1,)
        return Curve(name(length), "latency_ms", predict, measured, fitted, drawn=length > short)

    def apart(length: int, gpus: int) -> Curve:
        """A run of another day and commit, by the rate of one GPU at 16k tokens in it, where that was measured."""
        alone = times(gpus, short).get("single_device")
        rate = flops(short) / alone if alone else newest
        return Curve(
            f"{name(length)}, commit {measured.commit(_H200, gpus, f'ring-{length}')}", "latency_ms",
            lambda gpus: device(length, gpus, rate) + call, {gpus: times(gpus, length)["fdattn/ring"]},
            largest=0, drawn=length > short,
        )  # fmt: skip

    lengths = (short, 65536, long, 2**20)
    others = [apart(x, gpus) for x in lengths for gpus in HOST[2:] if "fdattn/ring" in times(gpus, x)]  # fmt: skip
    return [*map(curve, lengths), *others]


class ModelSizes(NamedTuple):
    """Of Qwen3-32B, in which tests compare them with the model's configuration; in bf16."""

    layers: int = 64
    hidden: int = 5120
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 25600
    vocab: int = 151936

    @property
    def layer_weights(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.inner

    def step_bytes(self, gpus: int, batch: int, length: int) -> float:
        """What a GPU reads in a decode step: its weights, its part of the head, its KV heads."""
        weights = (self.layers * self.layer_weights + self.vocab * self.hidden) / gpus
        kv = 2 * self.layers * batch * max(1, self.kv_heads / gpus) * length * self.head_dim
        return 2 * (weights + kv)


def model_curves(measured: Measured) -> list[Curve]:
    """Qwen3-32B, tensor-parallel: decode steps, which read weights, and a prefill, which multiplies.

    A decode step is the line through one and two GPUs at few sequences, and two all-reduces a layer, in one shot or two. A
    prefill scales one GPU's; gathers hide behind products, scatters do not (docs/notes/tensor-parallelism.md).
    """
    model, sends = ModelSizes(), exchange(measured)
    few, few_length = 8, 256

    def reduced(gpus: int, rows: int) -> float:
        """All all-reduces of a step."""
        if gpus == 1:
            return 0.0
        size = rows * model.hidden * 2
        one_shot = sends((gpus - 1) * size)
        two_shot = 2 * sends((gpus - 1) / gpus * size)
        return 2 * model.layers * min(one_shot, two_shot)

    def decode_times(batch: int, length: int) -> dict[int, float]:
        case = f"e2e bsz{batch} N{length} Qwen/Qwen3-32B L64 bf16 x{{gpus}} decode"
        found = measured.over_gpus(
            _H100, f"e2e-all-reduce-auto-decode-bsz{batch}", "latency_ms", case, "fdattn/all_reduce-auto"
        )  # fmt: skip
        return found

    plain = measured.times(_H100, 1, "e2e-plain-qwen3-32b-bsz1", "latency_ms")
    alone = "e2e bsz1 N512 Qwen/Qwen3-32B L64 bf16 x1 {}"
    steps = Line.through(
        (model.step_bytes(1, 1, 512), plain[alone.format("decode")]["fdattn"]),
        (model.step_bytes(2, few, few_length), decode_times(few, few_length)[2] - reduced(2, few)),
    )
    token = plain[alone.format("prefill")]["fdattn"] / 512

    def decode(batch: int, length: int, fitted: tuple[int, ...] = (), drawn: bool = True) -> Curve:
        def predict(gpus: int) -> float:
            return steps(model.step_bytes(gpus, batch, length)) + reduced(gpus, batch)

        name = f"Qwen3-32B decode step, {batch} sequences of {length}"
        found = decode_times(batch, length)
        return Curve(name, "latency_ms", predict, found, fitted, model.heads, drawn)

    def prefill(batch: int, length: int, drawn: bool = True) -> Curve:
        def predict(gpus: int) -> float:
            rows = batch * length
            scattered = (gpus - 1) / gpus * rows * model.hidden * 2 / COPY_ENGINE
            return rows * token / gpus + 2 * model.layers * scattered

        case = f"e2e bsz{batch} N{length} Qwen/Qwen3-32B L64 bf16 x{{gpus}} prefill"
        found = measured.over_gpus(_H100, f"e2e-ag-rs-prefill-bsz{batch}", "latency_ms", case, "fdattn/ag_rs")  # fmt: skip
        name = f"Qwen3-32B prefill, {batch} prompts of {length}"
        return Curve(name, "latency_ms", predict, found, (), model.heads, drawn)

    return [
        decode(few, few_length, (2,)), decode(128, 256), decode(128, 128, drawn=False),
        prefill(8, 256), prefill(32, 512, drawn=False), prefill(32, 128, drawn=False),
    ]  # fmt: skip


def panels(measured: Measured) -> dict[str, list[Curve]]:
    """The curves by subject.

    Raises:
        KeyError: a run that a constant is from is missing.
    """
    return {
        "Decode over a sharded cache, H100": decode_curves(measured),
        "Ring attention, H200": ring_curves(measured),
        "Tensor parallelism, H100": model_curves(measured),
    }


def section(folder: Path = RESULTS_DIR) -> str:
    """The model beside what was measured, and its predictions, as Markdown."""
    measured = Measured(folder)
    try:
        curves = [curve for each in panels(measured).values() for curve in each]
    except KeyError:
        return "Not measured yet.\n"
    compared = [line for curve in curves for line in _compared(curve)]
    ahead = [max(HOST), *RACK]
    predicted = [
        [curve.name, *(curve.shown(curve.predict(n)) if n <= curve.largest else "–" for n in ahead)]
        for curve in curves
        if curve.largest
    ]
    columns = ["prediction", *(f"{n} GPUs" for n in ahead)]
    head = ["case", "GPUs", "measured", "model", "error"]
    links = ", ".join(f"[`{name}`]({_LINK}/{name})" for name in sorted(measured.sources))
    tables = markdown_table(head, compared), markdown_table(columns, predicted)
    return "\n\n".join([*tables, f"From {links}."]) + "\n"


def _compared(curve: Curve) -> list[list[str]]:
    lines = []
    for gpus, us in curve.measured.items():
        predicted = curve.predict(gpus)
        error = f"{100 * (predicted / us - 1):+.1f} %"
        if gpus in curve.fitted:
            error = "fitted" if error[1:] == "0.0 %" else f"{error} (fitted)"
        lines.append([curve.name, str(gpus), curve.shown(us), curve.shown(predicted), error])
    return lines
