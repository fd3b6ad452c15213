"""What becomes of the attention in transformers' models: `make coverage`, a table of every model and way of use.

    python -m tests.compile_backend.coverage [MODEL …]

Models are tiny and random. Each is compiled with the backend, lowered with aot_eager, and compared with itself
uncompiled: its outputs, and in training its gradients.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers

from tests.compile_backend.harness import Recorder
from torch_fdattn.compile_backend.report import Report

SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
#: Positions that a prompt of 20 tokens pads, on the left of its first sequence.
LENGTH, PADDED = 20, 5


@dataclass(frozen=True)
class Model:
    name: str
    config: dict
    head: str = "ForCausalLM"
    config_name: str = ""
    inputs: str = "tokens"  #: or "text to text", "audio", "pixels"
    caches: bool = False  #: whether it decodes with a static cache

    def make(self, attention: str) -> torch.nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.config_name or self.name}Config")
        config = config(**self.config, attn_implementation=attention)
        return getattr(transformers, self.name + self.head)(config).eval()


_HEADS = dict(head_dim=16)
_SEQ2SEQ = dict(
    vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
MODELS = (
    Model("Llama", GROUPED, caches=True),
    Model("Qwen3", {**GROUPED, **_HEADS}, caches=True),
    Model("Mistral", {**GROUPED, "sliding_window": 6}, caches=True),
    Model("Gemma2", {**GROUPED, **_HEADS, "sliding_window": 6}, caches=True),
    Model("Gemma3", {**GROUPED, **_HEADS, "sliding_window": 6}, config_name="Gemma3Text", caches=True),
    Model("GPT2", dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64), "LMHeadModel"),
    Model("GPTNeoX", SMALL, caches=True),
    Model("Phi3", {**GROUPED, "pad_token_id": 0}, caches=True),
    Model("Olmo", GROUPED, caches=True),
    Model("SmolLM3", {**GROUPED, "pad_token_id": 0}, caches=True),
    Model("GptOss", {**GROUPED, **_HEADS, "sliding_window": 6, "num_local_experts": 2,
                     "num_experts_per_tok": 1}, caches=True),
    Model("Llama4", {**GROUPED, **_HEADS, "intermediate_size_mlp": 64, "num_local_experts": 2,
                     "num_experts_per_tok": 1, "attention_chunk_size": 6, "num_hidden_layers": 4,
                     "pad_token_id": 0}, config_name="Llama4Text", caches=True),
    Model("Mpt", dict(d_model=64, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=64)),
    Model("Bloom", dict(vocab_size=64, hidden_size=64, n_layer=2, n_head=4)),
    Model("Bert", SMALL, "Model"),
    Model("Roberta", SMALL, "Model"),
    Model("T5", dict(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4,
                     decoder_start_token_id=0), "ForConditionalGeneration", inputs="text to text"),
    Model("Bart", _SEQ2SEQ, "ForConditionalGeneration", inputs="text to text"),
    Model("Whisper", {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20},
          "ForConditionalGeneration", inputs="audio"),
    Model("ViT", dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32,
                      patch_size=8, intermediate_size=64), "Model", inputs="pixels"),
    Model("CLIPText", SMALL, "Model"),
    Model("CLIPVision", dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32,
                             patch_size=8, intermediate_size=64), "Model", inputs="pixels"),
)  # fmt: skip
USES = ("prefill", "padded", "training, padded", "decode", "decode, padded")
#: What a model says of an implementation that it has not.
MISSING = "does not support an attention implementation"


@dataclass
class Result:
    report: Report
    error: float  #: the largest difference, of outputs or gradients
    failure: str = ""
    repeated: int = 0  #: ops that are given copies of heads

    @property
    def masks(self) -> Counter:
        notes = (note for site in self.report.rewritten for note in site.notes)
        return Counter(note.removeprefix("mask: ") for note in notes if note.startswith("mask: "))


@dataclass
class Case:
    model: Model
    attention: str
    use: str
    inputs: dict = field(default_factory=dict)

    def run(self) -> Result:
        model = self.model.make(self.attention)
        inputs, kept = self._inputs()
        step = self._decoding if self.use.startswith("decode") else self._forward
        torch._dynamo.reset()
        backend = Recorder("aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = step(model, inputs, kept, lambda fn: fn)
            found = step(model, inputs, kept, lambda fn: torch.compile(fn, backend=backend))
        error = max(
            ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
            for a, b in zip(found, expected, strict=True)
        )
        heads = self.model.config.get("num_key_value_heads", 0)
        repeated = sum(heads and n != heads for n in backend.kv_heads)
        return Result(backend.found.report, error, repeated=repeated)

    def _inputs(self) -> tuple[dict, torch.Tensor]:
        """(the model's arguments, which outputs count)."""
        torch.manual_seed(1)
        padding = torch.ones(2, LENGTH, dtype=torch.long)
        if "padded" in self.use:
            padding[0, :PADDED] = 0
        if self.model.inputs == "pixels":
            return {"pixel_values": torch.randn(2, 3, 32, 32)}, torch.ones(1)
        tokens = torch.randint(3, 64, (2, LENGTH))
        masks = {"attention_mask": padding} if "padded" in self.use else {}
        if self.model.inputs == "audio":
            features = torch.randn(2, 8, 2 * LENGTH)
            return {"input_features": features, "decoder_input_ids": tokens}, torch.ones(1)
        if self.model.inputs == "text to text":
            return {"input_ids": tokens, "decoder_input_ids": tokens[:, 3:], **masks}, torch.ones(1)
        return {"input_ids": tokens, **masks}, padding[..., None]

    def _forward(self, model, inputs: dict, kept: torch.Tensor, compiled: Callable) -> list:
        training = self.use.startswith("training")
        caches = (
            {}
            if self.model.inputs == "pixels" or self.model.head == "Model"
            else {"use_cache": False}
        )
        model.zero_grad()

        def fn(**inputs):
            return model(**inputs, **caches)[0]

        with torch.set_grad_enabled(training):
            out = compiled(fn)(**inputs)
        if not training:
            return [out]
        (out * kept).sin().sum().backward()
        return [x.grad for x in model.parameters() if x.grad is not None]

    def _decoding(self, model, inputs: dict, kept: torch.Tensor, compiled: Callable) -> list:
        """One token after a prompt, with a static cache."""
        tokens, padding = inputs["input_ids"], inputs.get("attention_mask")
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)

        def fn(tokens, padding):
            return model(tokens, attention_mask=padding, past_key_values=cache, use_cache=True)[0]

        with torch.no_grad():
            fn(tokens, padding)
            grown = None if padding is None else torch.cat((padding, padding.new_ones(2, 1)), 1)
            return [compiled(fn)(tokens[:, :1], grown)]


def cases(names: list[str]) -> list[Case]:
    found = []
    for model in MODELS:
        for attention in ("sdpa", "eager"):
            for use in USES:
                if names and model.name not in names:
                    continue
                if use.startswith("decode") and not model.caches:
                    continue
                if use == "padded" and model.inputs in ("pixels", "audio"):
                    continue
                found.append(Case(model, attention, use))
    return found


def row(case: Case, result: Result) -> str:
    report = result.report
    left = Counter(f"{site.reason}: {site.detail}" for site in report.left)
    what = [f"{n} {name}" for name, n in (result.masks + left).items()]
    done = f"{len(report.rewritten)}/{len(report)}"
    error = result.failure or f"{result.error:.0e}"
    return f"| {case.model.name} | {case.attention} | {case.use} | {done} | {'; '.join(what)} | {error} |"


#: Of all models' sites, what is to be rewritten.
LEAST_SHARE = 0.8


def main(names: list[str]) -> int:
    sites = rewritten = bare = failed = repeated = 0
    print("| model | attention | use | rewritten | masks, or why left | largest error |")
    print("|---|---|---|---|---|---|")
    for case in cases(names):
        try:
            result = case.run()
        except Exception as error:  # the table is to be complete
            text = str(error).strip().splitlines() or [""]
            if MISSING in text[0]:
                continue
            result = Result(Report([]), math.nan, f"{type(error).__name__}: {text[0][:120]}")
        failed += bool(result.failure) or not result.error < 1e-3
        sites += len(result.report)
        repeated += result.repeated
        rewritten += len(result.report.rewritten)
        bare += sum("explicit" not in "".join(site.notes) for site in result.report.rewritten)
        print(row(case, result), flush=True)
    print(
        f"\n{rewritten} of {sites} attention sites rewritten, {bare} of them without an explicit mask, "
        f"{repeated} with heads of K and V repeated; {failed} cases failed"
    )
    return int(failed > 0 or (not names and rewritten < LEAST_SHARE * sites))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
