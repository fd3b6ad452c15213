"""The metrics a result row may carry: unit, direction, and how many digits are worth printing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One measured quantity; `higher`: whether more is better, None where it is no speed."""

    name: str
    unit: str
    title: str
    higher: bool | None

    def speedup(self, ours: float, theirs: float) -> float:
        """How many times faster `ours` is than `theirs`; above 1 means faster, for any metric."""
        if self.higher is None:
            raise ValueError(f"metric must be a speed or a time to form a ratio, got {self.name!r}")
        return ours / theirs if self.higher else theirs / ours

    def format(self, value: float) -> str:
        if self.higher is None:
            form = {
                "abs": ".1e",
                "nats": ".4f",
                "perplexity": ".2f",
                "registers": ".0f",
                "bytes": ".0f",
            }
            return f"{value:{form.get(self.unit, '.1f')}}"
        if abs(value) < 1:
            return f"{value:.3g}"
        digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
        return f"{value:.{digits}f}"


_SPEEDS = (
    Metric("fwd_TFLOPs", "TFLOP/s", "Forward, TFLOP/s", True),
    Metric("bwd_TFLOPs", "TFLOP/s", "Backward alone, TFLOP/s", True),
    Metric("fwd_us", "us", "Forward, µs", False),
    Metric("bwd_us", "us", "Backward alone, µs", False),
    Metric("TFLOPs_per_gpu", "TFLOP/s", "TFLOP/s per GPU", True),
    Metric("graph_us", "us", "Time in a CUDA graph, cold clean L2, µs", False),
    Metric("GBps", "GB/s", "K and V read, GB/s", True),
    Metric("eager_us", "us", "Eager call, µs", False),
    Metric("compiled_us", "us", "Compiled call, µs", False),
    Metric("host_us", "us", "Host time to issue one eager call, µs", False),
    Metric("latency_ms", "ms", "Latency, ms", False),
    Metric("tokens_per_s", "tokens/s", "Generated tokens per second", True),
    Metric("first_token_ms", "ms", "Time to first token, ms", False),
    Metric("next_token_ms", "ms", "Time of a token behind the first, ms", False),
    Metric("of_limit", "percent", "Of the rate that the memory allows, %", True),
    Metric("scaling", "x", "Times faster than on one rank", True),
    Metric("peak_MiB", "MiB", "Peak memory, MiB", False),
    Metric("step_ms", "ms", "Training step, ms", False),
    Metric("compile_ms", "ms", "Compiling anew, ms", False),
)
_OTHERS = (
    Metric("first_call_ms", "ms", "First call, compilation included, ms", None),
    Metric("max_abs_err", "abs", "Largest error of the output against fp64", None),
    Metric("rel_err", "abs", "Error over the norm of the exact output, fp64", None),
    Metric("grad_max_abs_err", "abs", "Largest error of a gradient against fp64", None),
    Metric("train_loss", "nats", "Training loss, mean since the line above, nats a byte", None),
    Metric("val_loss", "nats", "Validation loss after the last step, nats a byte", None),
    Metric("loss_gap", "abs", "Mean distance of the curve to that of sdpa, nats", None),
    Metric("kl_mean", "nats", "KL divergence of the next token's distribution, mean, nats", None),
    Metric("kl_max", "nats", "KL divergence of the next token's distribution, largest, nats", None),
    Metric("perplexity", "perplexity", "Perplexity", None),
    Metric("perplexity_change", "percent", "Change of the perplexity, %", None),
    Metric(
        "top1_agreement", "percent", "Tokens behind which the most likely one is the same, %", None
    ),
    Metric("registers", "registers", "Registers a thread", None),
    Metric("spill_bytes", "bytes", "Stack and spills a thread, bytes", None),
    Metric("shared_KiB", "KiB", "Shared memory a block, KiB", None),
    Metric("occupancy", "percent", "Occupancy, % of an SM's warps", None),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in (*_SPEEDS, *_OTHERS)}
SPREAD_SUFFIX = "_spread"  # (max − min) / median over the repeats, in percent
TEXT_METRICS = ("error", "not_measured")  # rows whose value is the reason, not a number


def metric_named(name: str) -> Metric:
    """The metric of that name; spreads are derived from the metric they belong to."""
    if name in METRICS:
        return METRICS[name]
    base = name.removesuffix(SPREAD_SUFFIX)
    if base != name and base in METRICS:
        return Metric(name, "percent", f"Spread of {base} over repeats, %", None)
    raise ValueError(f"metric must be one of {sorted(METRICS)}, got {name!r}")
