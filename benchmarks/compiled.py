"""Layers of transformers' models under `torch.compile`: `backend="fdattn"` beside Inductor's default, and eager.

Random weights, a few layers, the sizes of the real models; the model code is transformers' own, its attention "sdpa":

    prefill         Llama-3-8B, a 2-D padding mask of which an eighth is padding in every second sequence
    prefill-causal  the same without padding; Inductor also with cuDNN's causal attention, with grouped heads and with
                    keys and values repeated for each query head: transformers 5 gives compiled models a mask of all
                    pairs under torch before 2.14, and repeats keys and values for it
    decode          Llama-3-8B, one token against a full static cache (its length is set back in every call)
    train           T5-large's encoder, forward and backward: its relative positions are an additive bias with gradient
    train-llama     a Llama of hidden size 2048, forward and backward, beside what prefill-causal has

Forward and step by event timing behind a flushed L2, decode in a CUDA graph, and what an eager decode step costs the
host. `compile_ms` is a first call after `torch._dynamo.reset()` with empty caches on disk, where our own kernels
(which do not depend on the model) are loaded; `first_call_ms` the very first one. Outputs, and in training the
bias's gradient, must be those of the eager model within 3 %, or there is an error in place of figures.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .peers import Implementation
from .peers.base import missing
from .ranks import Ranks
from .results import Recorder
from .runner import DTYPES, Run, chosen_cases, generator
from .shapes import CompileCase
from .timing import RotatedGraph

TOLERANCE = 0.03
#: Calls of a host timing: those of the eager model must not fill the launch queue.
HOST_CALLS = 5

Step = Callable[[], Tensor]


class Backend(Implementation):
    """A backend of torch.compile, or the eager model."""

    options: dict[str, object] | None = None  # the backend's

    def __init__(self, name: str, attention: str = "sdpa", by_cudnn: bool = False) -> None:
        """attention: the model's, of transformers' or `_CAUSAL`; by_cudnn: SDPA takes cuDNN's kernels or fails."""
        self.name, self.attention, self.by_cudnn = name, attention, by_cudnn

    def available(self, device: torch.device) -> str | None:
        if self.by_cudnn and device.type != "cuda":
            return "needs a CUDA device"
        return missing("transformers")

    def uses(self, case: CompileCase) -> bool:
        return not self.by_cudnn or case.use in ("train-llama", "prefill-causal")

    def apply(self, fn: Callable) -> Callable:
        from torch_fdattn.compile_backend import fdattn  # by itself: a checkout has no entry points

        if self.name == "eager":
            return fn
        backend = fdattn if self.name == "fdattn" else "inductor"
        compiled = torch.compile(fn, backend=backend, fullgraph=True, options=self.options)
        return functools.partial(_by_cudnn, compiled) if self.by_cudnn else compiled


def _by_cudnn(fn: Callable, *inputs: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return fn(*inputs)


#: The eager model first: the others are compared with what it gives.
BACKENDS = (
    Backend("eager"), Backend("fdattn"), Backend("inductor"),
    Backend("inductor-cudnn", "grouped", by_cudnn=True), Backend("inductor-cudnn-repeated", "repeated", by_cudnn=True),
)  # fmt: skip


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    run = Run.of(options, ranks, recorder, BACKENDS)
    measure(run, chosen_cases(options), options.compile_times)
    return True


def measure(run: Run, cases: Sequence[CompileCase], compile_times: bool = True) -> None:
    run.cases(
        cases, lambda case, backends: _Measurement(run, case, backends).measure(compile_times)
    )


class _Measurement:
    def __init__(self, run: Run, case: CompileCase, backends: Sequence[Implementation]) -> None:
        self.run, self.case = run, case
        self.backends = [backend for backend in backends if backend.uses(case)]
        self.device = run.timer.device
        self.guard = functools.partial(run.guard, case.name)
        #: (function, step) of each kind of attention: models of the same weights.
        self.made: dict[str, tuple[Callable, Callable]] = {}
        for attention in {backend.attention for backend in self.backends}:
            torch.manual_seed(0)
            self.made[attention] = _USES[case.use](case, self.device, attention)

    def measure(self, compile_times: bool) -> None:
        expected: Tensor | None = None
        steps: dict[str, Step] = {}
        for backend in self.backends:
            with self.guard(backend.name, "first call"):
                torch._dynamo.reset()
                begin = time.perf_counter()
                step = self._made(backend)
                found = self._result(step)
                if backend.name != "eager":
                    taken = 1e3 * (time.perf_counter() - begin)
                    self.run.recorder.add(self.case.name, backend.name, "first_call_ms", taken)
                expected = found if expected is None else expected
                error = ((found - expected).norm() / expected.norm()).item()
                if not error < TOLERANCE:
                    raise ValueError(f"differs from the eager model by {error:.3g} of its norm")
                steps[backend.name] = step
        self._times(
            {
                backend.name: steps[backend.name]
                for backend in self.backends
                if backend.name in steps
            }
        )
        if compile_times:
            self._compile_times([backend for backend in self.backends if backend.name in steps])

    def _made(self, backend: Backend) -> Step:
        fn, step = self.made[backend.attention]
        return functools.partial(step, backend.apply(fn))

    def _result(self, step: Step) -> Tensor:
        found = step().float()
        self.run.timer.synchronize()
        return found

    def _times(self, steps: dict[str, Step]) -> None:
        timer, use = self.run.timer, self.case.use
        metric = {"prefill": "fwd_us", "prefill-causal": "fwd_us", "decode": "graph_us"}.get(
            use, "step_ms"
        )
        scale = 1e-3 if metric == "step_ms" else 1.0
        samplers = {}
        for name, step in steps.items():
            with self.guard(name, metric):
                if metric == "graph_us" and self.device.type == "cuda":
                    with torch.no_grad():
                        samplers[name] = RotatedGraph(timer, [step]).sample
                else:
                    samplers[name] = timer.sampler(step, target_us=200e3)
        self.run.record(self.case.name, metric, samplers, lambda us: us * scale)
        if use == "decode":
            samplers = {
                name: lambda step=step: timer.host_us([step], HOST_CALLS)
                for name, step in steps.items()
            }
            self.run.record(self.case.name, "host_us", samplers)

    def _compile_times(self, backends: Sequence[Backend]) -> None:
        from torch._inductor.utils import fresh_cache

        def sampler(backend: Backend) -> Callable[[], float]:
            def sample() -> float:
                torch._dynamo.reset()
                with fresh_cache():
                    begin = time.perf_counter()
                    self._result(self._made(backend))
                    return 1e3 * (time.perf_counter() - begin)

            return sample

        samplers = {
            backend.name: sampler(backend) for backend in backends if backend.name != "eager"
        }
        self.run.record(self.case.name, "compile_ms", samplers)


def _grouped(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask, dropout=0.0, scaling=None, **_
):
    """Causal attention of transformers' models without their mask; keys and values as they are."""
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _repeated(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask, **options):
    """The same with keys and values repeated for each query head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return _grouped(module, q, k, v, mask, **options)


_CAUSAL = {"grouped": _grouped, "repeated": _repeated}


def _llama(case: CompileCase, device: torch.device, attention: str) -> nn.Module:
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, causal in _CAUSAL.items():
        ALL_ATTENTION_FUNCTIONS.register(name, causal)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    hidden = case.heads * case.head_dim
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=case.layers, vocab_size=1024,
        num_attention_heads=case.heads, num_key_value_heads=case.kv_heads, head_dim=case.head_dim,
        max_position_embeddings=case.kv_len, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation=attention,
    )  # fmt: skip
    return _built(transformers.LlamaModel, config, case, device)


def _built(kind: type, config: object, case: CompileCase, device: torch.device) -> nn.Module:
    with torch.device(device):
        return kind(config).to(DTYPES[case.dtype])


def _causal(
    case: CompileCase, device: torch.device, attention: str
) -> tuple[Callable, Tensor, nn.Module]:
    """(function of tokens, tokens, model) of sequences without padding."""
    model = _llama(case, device, attention)

    def fn(tokens: Tensor) -> Tensor:
        return model(tokens, use_cache=False)[0]

    return fn, _tokens(case, case.kv_len, device), model


def _tokens(case: CompileCase, length: int, device: torch.device) -> Tensor:
    made = generator(device, 1)
    return torch.randint(1024, (case.batch, length), generator=made, device=device)


def _prefill(case: CompileCase, device: torch.device, attention: str) -> tuple[Callable, Callable]:
    model, tokens = _llama(case, device, attention), _tokens(case, case.kv_len, device)
    padding = torch.ones_like(tokens)
    padding[::2, : case.kv_len // 8] = 0

    def fn(tokens: Tensor, padding: Tensor) -> Tensor:
        return model(tokens, attention_mask=padding, use_cache=False)[0]

    def step(fn: Callable) -> Tensor:
        with torch.no_grad():
            # What stands where there is no token is nobody's, and models differ in it.
            return fn(tokens, padding)[:, case.kv_len // 8 :]

    return fn, step


def _prefill_causal(
    case: CompileCase, device: torch.device, attention: str
) -> tuple[Callable, Callable]:
    fn, tokens, _ = _causal(case, device, attention)

    def step(fn: Callable) -> Tensor:
        with torch.no_grad():
            return fn(tokens)

    return fn, step


def _decode(case: CompileCase, device: torch.device, attention: str) -> tuple[Callable, Callable]:
    import transformers

    model, tokens = _llama(case, device, attention), _tokens(case, 1, device)
    cache = transformers.StaticCache(config=model.config, max_cache_len=case.kv_len)
    cache.early_initialization(case.batch, case.kv_heads, case.head_dim, DTYPES[case.dtype], device)
    made = generator(device, 2)
    for layer in cache.layers:
        for x in (layer.keys, layer.values):
            x.normal_(generator=made)
    padding = tokens.new_ones(case.batch, case.kv_len)

    def fn(tokens: Tensor, padding: Tensor) -> Tensor:
        return model(tokens, attention_mask=padding, past_key_values=cache, use_cache=True)[0]

    def step(fn: Callable) -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(case.kv_len - 1)
        with torch.no_grad():
            return fn(tokens, padding)

    return fn, step


def _train_llama(
    case: CompileCase, device: torch.device, attention: str
) -> tuple[Callable, Callable]:
    fn, tokens, model = _causal(case, device, attention)

    def step(fn: Callable) -> Tensor:
        model.zero_grad(set_to_none=True)
        fn(tokens).float().sin().mean().backward()
        return model.layers[0].self_attn.q_proj.weight.grad

    return fn, step


def _train(case: CompileCase, device: torch.device, attention: str) -> tuple[Callable, Callable]:
    import transformers

    config = transformers.T5Config(
        d_model=case.heads * case.head_dim, d_kv=case.head_dim, d_ff=4 * case.heads * case.head_dim, vocab_size=1024,
        num_layers=case.layers, num_heads=case.heads, dropout_rate=0.0, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    model = _built(transformers.T5EncoderModel, config, case, device)
    tokens = _tokens(case, case.kv_len, device)

    def fn(tokens: Tensor) -> Tensor:
        return model(tokens)[0]

    def step(fn: Callable) -> Tensor:
        model.zero_grad(set_to_none=True)
        out = fn(tokens)
        out.float().sin().mean().backward()  # squares are the same for all: the last layer normalises
        return model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad

    return fn, step


_USES = {
    "prefill": _prefill, "prefill-causal": _prefill_causal, "decode": _decode, "train": _train, "train-llama": _train_llama,
}  # fmt: skip
