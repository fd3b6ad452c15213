"""What `/metrics` tells Prometheus, and the page: the engine's counts, and times as a client sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torch_fdattn.engine.outputs import EngineStats

_GAUGES = {
    "running": ("fdattn_requests_running", "Requests in the batch."),
    "waiting": ("fdattn_requests_waiting", "Requests that wait for the batch."),
    "pages_used": ("fdattn_kv_pages_used", "Pages of the KV cache that sequences hold."),
    "pages_total": ("fdattn_kv_pages", "Pages of the KV cache."),
}
_COUNTERS = {
    "prompt_tokens": ("fdattn_prompt_tokens", "Tokens of prompts."),
    "generated_tokens": ("fdattn_generated_tokens", "Tokens drawn."),
    "prefix_hit_tokens": ("fdattn_prefix_hit_tokens", "Prompt tokens that the prefix cache had."),
    "prefix_query_tokens": ("fdattn_prefix_query_tokens", "Prompt tokens that it was asked for."),
    "preemptions": ("fdattn_preemptions", "Sequences that lost their pages and began anew."),
    "proposed_tokens": ("fdattn_proposed_tokens", "Tokens that speculation proposed."),
    "accepted_tokens": ("fdattn_accepted_tokens", "Of them those that were taken."),
}
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)  # fmt: skip
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)  # fmt: skip


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.http_requests = Counter(
            "fdattn_http_requests", "Answers by path and status.", ["path", "status"],
            registry=self._registry,
        )  # fmt: skip
        self.first_token = self._histogram(
            "fdattn_time_to_first_token_seconds", "From a request to its first token.", _SECONDS
        )
        self.inter_token = self._histogram(
            "fdattn_inter_token_seconds", "From a token to the next one.", _TOKEN_SECONDS
        )
        self.request = self._histogram(
            "fdattn_request_seconds", "From a request to its last token.", _SECONDS
        )

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, buckets=buckets, registry=self._registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine when it is asked; nothing of a dead one."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        if (stats := self._stats()) is None:
            return
        for field, (name, help_text) in _GAUGES.items():
            yield GaugeMetricFamily(name, help_text, value=getattr(stats, field))
        for field, (name, help_text) in _COUNTERS.items():
            yield CounterMetricFamily(name, help_text, value=getattr(stats, field))
