"""What `python -m benchmarks ladder` measures, in order: first calls, rounds, attention alone."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from benchmarks.results import Recorder, describe
from benchmarks.runner import DTYPES
from benchmarks.timing import RotatedGraph, Sample, Timer, copies_needed, interleave
from torch_fdattn.models import Transformer, load_model, load_tokenizer

from . import RUNGS, attend_of, reference
from .model import (
    Attend,
    Generation,
    SlicedCache,
    copied_first,
    difference,
    generate,
    shown,
    slices,
    truncated,
)
from .report import COPIED, tables

#: Repeated to the length asked for: the model then goes on repeating it, hardly ever near a tie.
TEXT = (
    "A model that writes text attends to everything it has read. For each new token it reads the keys "
    "and values of all the tokens before, which lie in a cache, and the longer the text, the more it "
    "reads. The time of a token is therefore the time of reading memory. "
)
SPARE = 64  # tokens of the cache that are never used: the slices end before the array does
MOST_CALLS = 512  # of decode's graph

Arguments = tuple[Tensor, Tensor, Tensor]


@torch.inference_mode()
def climb(
    options: argparse.Namespace, path: str, device: torch.device, recorder: Recorder,
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    """Runs the rungs that `options` names; whether all ran and wrote the reference's tokens."""
    ladder = Ladder(options, path, device, recorder, say)
    ladder.first_calls()
    ladder.rounds()
    recorder.save()  # a run that is stopped keeps what it measured
    if not options.debug:
        ladder.attention_alone()
        say("\n" + tables(recorder.results) + "\n")
    return not any(row.metric == "error" for row in recorder.results.rows)


class Ladder:
    """A model, its prompt and its cache, and the kernels that are tried in it."""

    def __init__(
        self, options: argparse.Namespace, path: str, device: torch.device, recorder: Recorder,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.options, self.recorder, self.say = options, recorder, say
        self.timer = Timer(device)
        dtype, length = DTYPES[options.dtype], options.prompt_tokens
        self.tokenizer = load_tokenizer(path)
        model = load_model(path, dtype=dtype, device=device)
        config, of, used = model.config, len(model.layers), length + options.new_tokens - 1
        if used > config.max_positions:
            raise ValueError(
                f"--prompt-tokens and --new-tokens must fit into the model's {config.max_positions} "
                f"positions, got {length} and {options.new_tokens}"
            )
        self.model: Transformer = truncated(model, options.layers)
        layers = len(self.model.layers)
        words = self.tokenizer.encode(TEXT)
        prompt = (words * -(-length // len(words)))[:length]
        self.prompt = torch.tensor([prompt], device=device)
        self.cache = SlicedCache(config, layers, used + SPARE, dtype, device)
        self.attends = self._attends()

        shape = f"B1 H{config.num_heads}/{config.num_kv_heads}"
        about = f"{options.dtype} {Path(path).name.replace(' ', '-')} {layers} of {of} layers"
        self.cases = {}
        say(
            f"{options.kernel} in {path}, {about}: {length} prompt tokens, {options.new_tokens} new"
        )
        for kind, keys in (("prefill", length), ("decode", used)):
            self.cases[kind] = f"{shape} N{keys} D{config.head_dim} {kind} {about}"
            k, _ = slices(self.cache.k[0], self.cache.v[0], keys)
            say(f"{kind}: K and V are slices of shape {tuple(k.shape)}, strides {k.stride()}")

    def _attends(self) -> dict[str, Attend]:
        """What runs, by its name in the results; the reference always: all are held against it."""
        chosen = RUNGS if self.options.kernel == "all" else ("reference", self.options.kernel)
        attends: dict[str, Attend] = {}
        for rung in dict.fromkeys(chosen):
            attend = attend_of(rung)
            attends[rung] = shown(attend, self.say) if self.options.debug else attend
            if self.options.contiguous:
                attends[rung + COPIED] = copied_first(attends[rung])
        return attends

    def first_calls(self) -> None:
        """A prompt and one decode step, everything that is compiled included."""
        for name in list(self.attends):
            with triton.knobs.compilation.scope():
                triton.knobs.compilation.always_compile = True  # Triton's cache on disk is left out
                first = self._generate(name, 2)
            if first is not None:
                taken = first.prefill_ms + first.token_ms
                self.recorder.add(self.cases["prefill"], name, "first_call_ms", taken)
                self.say(f"{name}: first call {taken:.0f} ms")

    def rounds(self) -> None:
        """Prefill and decode, all kernels in turns; what each writes is held against the reference."""
        runs: dict[str, list[Generation]] = {name: [] for name in self.attends}
        for _ in range(self.options.repeats):
            for name in list(self.attends):
                if (made := self._generate(name, self.options.new_tokens)) is not None:
                    runs[name].append(made)
        if "reference" not in self.attends:
            return
        expected = runs["reference"][0]
        self.say(f"reference writes {self.tokenizer.decode(expected.tokens)!r}")
        for name in self.attends:
            times = {
                "prefill": tuple(made.prefill_ms for made in runs[name]),
                "decode": tuple(made.token_ms for made in runs[name]),
            }
            for kind, values in times.items():
                self._add(kind, name, "latency_ms", Sample(values))
            verdicts = [difference(made, expected) for made in runs[name]]
            holds, text = min(verdicts, key=lambda verdict: verdict[0])
            self.say(f"{name}: {text}")
            if not holds:
                self.recorder.error(self.cases["decode"], name, text)

    def attention_alone(self) -> None:
        """Single calls on the queries and the cache that the reference leaves: error and speed."""
        if "reference" not in self.attends:
            return
        prefill = self._arguments(1)
        decode = self._arguments(self.options.new_tokens)
        for kind, (q, k, v) in (("prefill", prefill[0]), ("decode", decode[-1])):
            exact = reference.attend(q.double(), k.double(), v.double())
            for name, attend in self.attends.items():
                error = (attend(q, k, v).double() - exact).abs().max().item()
                self.recorder.add(self.cases[kind], name, "max_abs_err", error)

        heads, length, dim = prefill[0][0].shape[1:]
        flops = 4 * heads * length * length * dim / 2
        on_gpu = self.timer.device.type == "cuda"
        for name, sample in self._samples("prefill", self._prefill_sampler, prefill).items():
            rates = Sample(tuple(flops / us / 1e6 for us in sample.repeats))
            self._add("prefill", name, "fwd_TFLOPs", rates)
        rotated = self._rotated(decode) if on_gpu else decode
        for name, sample in self._samples("decode", self._decode_sampler, rotated).items():
            self._add("decode", name, "graph_us" if on_gpu else "eager_us", sample)

    def _generate(self, name: str, tokens: int) -> Generation | None:
        """One generation by one kernel; a kernel that fails leaves the race."""
        self.cache.attention = self.attends[name]
        if self.options.debug:
            self.say(f"{name}:")
        try:
            return generate(self.model, self.cache, self.prompt, tokens, self.timer)
        except Exception as failure:
            del self.attends[name]
            self.recorder.error(self.cases["prefill"], name, describe(failure))
            self.say(f"{name}: FAILED: {describe(failure)}")
            self.timer.check_device(failure)
            return None

    def _arguments(self, tokens: int) -> list[Arguments]:
        """What attention was given in the last step of a generation, layer by layer."""
        self.cache.attention = self.attends["reference"]
        generate(self.model, self.cache, self.prompt, tokens, self.timer)
        return [
            (q, *slices(k, v, self.cache.held))
            for q, k, v in zip(self.cache.queries, self.cache.k, self.cache.v, strict=True)
        ]

    def _rotated(self, calls: list[Arguments]) -> list[Arguments]:
        """The calls on as many copies of the cache as keep the L2 cold, their strides kept."""
        keys = self.cache.held
        size = sum(k.numel() + v.numel() for _, k, v in calls) * self.cache.k.element_size()
        most = max(2, MOST_CALLS // len(calls))  # a smaller cache stays in the L2
        copies = [
            (self.cache.k.clone(), self.cache.v.clone())
            for _ in range(min(copies_needed(size, self.timer.l2_bytes), most))
        ]
        return [
            (q, *slices(ks[layer], vs[layer], keys))
            for ks, vs in copies
            for layer, (q, _, _) in enumerate(calls)
        ]

    def _samples(
        self, kind: str, sampler: Callable[[Attend, list[Arguments]], Callable[[], float]],
        calls: list[Arguments],
    ) -> dict[str, Sample]:  # fmt: skip
        """µs a call of every kernel, in turns."""
        samplers = {}
        for name, attend in self.attends.items():
            with self.recorder.guard(
                self.cases[kind], name, "attention alone", self.timer.check_device
            ):
                samplers[name] = sampler(attend, calls)
        samples, failures = interleave(samplers, self.options.repeats)
        for name, failure in failures.items():
            self.recorder.error(self.cases[kind], name, f"attention alone: {describe(failure)}")
            self.timer.check_device(failure)
        return samples

    def _prefill_sampler(self, attend: Attend, calls: list[Arguments]) -> Callable[[], float]:
        call = functools.partial(attend, *calls[0])
        if self.timer.device.type == "cpu":
            return lambda: self.timer.eager_us([call], 1)
        return self.timer.sampler(call)

    def _decode_sampler(self, attend: Attend, calls: list[Arguments]) -> Callable[[], float]:
        partials = [functools.partial(attend, *arguments) for arguments in calls]
        if self.timer.device.type == "cpu":
            return lambda: self.timer.eager_us(partials, len(partials))
        return RotatedGraph(self.timer, partials).sample

    def _add(self, kind: str, name: str, metric: str, sample: Sample) -> None:
        self.recorder.add_sample(self.cases[kind], name, metric, sample.median, sample.spread)
