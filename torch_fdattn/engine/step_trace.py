"""Where the time of an `LLM`'s steps goes, by layer and part, and a trace that ui.perfetto.dev opens.

Nothing of it is in an engine that is not traced: the ranges are hooks that stand in the model's modules while the
context is open.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from torch_fdattn.engine.runner import ModelRunner

#: Parts of a layer, in their order. norm: norms and additions; rotate: the heads' norms and rotary positions; append: K
#: and V into their pages; attend: attention; output: the product behind it.
PARTS = ("norm", "qkv", "rotate", "append", "attend", "output", "mlp")


class StepTrace:
    """The steps within a `with`, which `LLM.trace` makes. They must be taken on the thread that opens it.

    Steps are not replayed from CUDA graphs meanwhile, K and V are stored in a launch of their own, and the profiler costs
    time of the host: times on a GPU are the device's, from a part's first kernel to its last one; on a CPU they are the host's.

    Attributes:
        seconds: by (layer, part), over all passes; parts are norm, qkv, rotate, append, attend, output and mlp.
        passes: of the model.
        elapsed: seconds from begin to end.

    Raises:
        OSError: the file cannot be written.
        NotImplementedError: a model over several ranks, or with layers that are none of ours.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 2, 4, 2, 16, 128)
        >>> llm = torch_fdattn.engine.LLM(torch_fdattn.models.Transformer(config), pages=32)
        >>> with llm.trace() as trace:
        ...     _ = llm.generate([[5, 9, 33]], torch_fdattn.engine.SamplingParams(max_tokens=4))
        >>> trace.passes, len(trace.seconds), min(trace.seconds.values()) > 0
        (4, 14, True)
        >>> print(trace.table().splitlines()[1])
        layer       norm      qkv   rotate   append   attend   output      mlp      all
    """

    def __init__(self, runner: ModelRunner, path: str | Path | None = None) -> None:
        if runner.num_ranks > 1:
            raise NotImplementedError(
                "trace needs an LLM on one process, got one over ranks: torch.profiler shows its kernels"
            )
        for i, block in enumerate(runner.model.layers):
            if not all(hasattr(block, name) for name in ("self_attn", "mlp")):
                raise NotImplementedError(
                    f"trace needs layers with self_attn and mlp, got {type(block).__name__} for layer {i}"
                )
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._path.write_bytes(
                b""
            )  # the profiler would say nothing of one that it cannot write
        self._runner, self._ranges = runner, _Ranges()
        self._hooks: list[Any] = []
        self.seconds: dict[tuple[int, str], float] = {}
        self.passes, self.elapsed = 0, 0.0

    def __enter__(self) -> StepTrace:
        if self.elapsed:
            raise RuntimeError("trace must be opened once, got a second time: LLM.trace() makes another one")  # fmt: skip
        activities = [ProfilerActivity.CPU]
        if self._runner.rows.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.__enter__()
        for i, block in enumerate(self._runner.model.layers):
            self._hooks += _hooks_of(block, i, self._ranges)
        self._runner.replays_graphs = False
        self.passes, self._start = -self._runner.passes, time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._ranges.end_layer()  # where a pass has failed
        if self._runner.rows.device.type == "cuda":
            torch.cuda.synchronize(self._runner.rows.device)
        self.elapsed = time.perf_counter() - self._start
        self.passes += self._runner.passes
        self._runner.replays_graphs = True
        for hook in self._hooks:
            hook.remove()
        self._profiler.__exit__(*error)
        self.seconds = self._sums()
        if self._path is not None:
            self._profiler.export_chrome_trace(str(self._path))

    def table(self) -> str:
        """Milliseconds of a pass, a line a layer and a column a part, and each part's share."""
        rows = {str(i): [self.seconds.get((i, part), 0.0) for part in PARTS] for i in self._layers}
        rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)] or [0.0]
        total = sum(rows["all"])
        device = self._runner.rows.device
        clock = f" on {device}, not from CUDA graphs" if device.type == "cuda" else ""
        lines = [
            f"{self.passes} passes of the model in {self.elapsed:.3f} s, {total:.3f} s of it in the layers; "
            f"ms of a pass{clock}:",
            _line("layer", [*PARTS, "all"]),
        ]
        scale = 1e3 / max(self.passes, 1)
        lines += [
            _line(name, [f"{x * scale:.3f}" for x in (*row, sum(row))])
            for name, row in rows.items()
        ]
        shares = [100 * x / total if total else 0.0 for x in (*rows["all"], total)]
        return "\n".join([*lines, _line("%", [f"{x:.1f}" for x in shares])])

    @property
    def _layers(self) -> range:
        return range(len(self._runner.model.layers))

    def _sums(self) -> dict[tuple[int, str], float]:
        places = {_range_name(i, part): (i, part) for i in self._layers for part in PARTS}
        on_cuda = self._runner.rows.device.type == "cuda"
        # A range stands twice where there is a GPU: as the host went through it, and as its kernels ran.
        kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
        sums: dict[tuple[int, str], float] = {}
        # Its own list of events would take a minute to be made.
        for event in self._profiler.profiler.kineto_results.events():
            if event.device_type() == kind and (place := places.get(event.name())) is not None:
                sums[place] = sums.get(place, 0.0) + event.duration_ns() / 1e9
        return sums


class _Ranges:
    """One part of one layer after the other, each a range of the profiler's."""

    def __init__(self) -> None:
        self._layer = 0
        self._open: list[record_function] = []  # the layer's range, and its part's

    def begin_layer(self, layer: int) -> None:
        self._layer = layer
        self._push(f"layer {layer}")
        self.begin("norm")

    def begin(self, part: str) -> None:
        if len(self._open) > 1:
            self._pop()
        self._push(_range_name(self._layer, part))

    def end_layer(self) -> None:
        while self._open:
            self._pop()

    def _push(self, name: str) -> None:
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def _pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


class _TracedCache:
    """A pass's cache, as a block asks it."""

    def __init__(self, cache: Any, ranges: _Ranges) -> None:
        self._cache, self._ranges, self.lengths = cache, ranges, cache.lengths

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._ranges.begin("append")
        self._cache.append(layer, k, v)

    def attend(self, layer: int, q: Tensor, **options: Any) -> Tensor:
        self._ranges.begin("attend")
        out = self._cache.attend(layer, q, **options)
        self._ranges.begin("output")
        return out


def _hooks_of(block: nn.Module, layer: int, ranges: _Ranges) -> list[Any]:
    """What is in none of the others is the layer's norm, before, between and behind."""

    def begin_layer(module: nn.Module, inputs: tuple) -> tuple:
        ranges.begin_layer(layer)
        x, cos, sin, cache, *rest = inputs
        return x, cos, sin, _TracedCache(cache, ranges), *rest

    def before(module: nn.Module, part: str) -> Any:
        return module.register_forward_pre_hook(lambda *_: ranges.begin(part))

    def after(module: nn.Module, part: str) -> Any:
        return module.register_forward_hook(lambda *_: ranges.begin(part))

    attention = block.self_attn
    last = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.v_proj
    return [
        block.register_forward_pre_hook(begin_layer),
        before(attention, "qkv"),
        after(last, "rotate"),
        after(attention, "norm"),
        before(block.mlp, "mlp"),
        after(block.mlp, "norm"),
        block.register_forward_hook(lambda *_: ranges.end_layer()),
    ]


def _range_name(layer: int, part: str) -> str:
    return f"layer {layer} {part}"


def _line(name: str, cells: list[str]) -> str:
    return f"{name:<7}" + "".join(f"{cell:>9}" for cell in cells)
