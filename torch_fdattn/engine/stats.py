"""What one completion took."""

from __future__ import annotations

from dataclasses import dataclass

from torch_fdattn.models import InferenceTransformer, Transformer


@dataclass
class Stats:
    """What a run of `stream_text` took, on this rank; filled in anew as it goes.

    Examples:
        >>> model = torch_fdattn.models.load_model("smollm2")
        >>> llm = torch_fdattn.engine.LLM(model, torch_fdattn.models.load_tokenizer("smollm2"), pages=4)
        >>> stats, params = torch_fdattn.engine.Stats(), torch_fdattn.engine.SamplingParams(max_tokens=4)
        >>> text = "".join(torch_fdattn.engine.stream_text(llm, "Water boils", params, stats=stats))
        >>> stats.tokens_per_s > 0
        True
    """

    prompt_tokens: int = 0
    first_tokens: int = 0  # those that the prefill gives
    new_tokens: int = 0  # the first ones included
    first_token_s: float = 0.0
    decode_s: float = 0.0  # all tokens after the first ones
    decode_bytes: int = 0  # weights and cache read for them

    def first(self, tokens: int, seconds: float) -> None:
        self.first_tokens = self.new_tokens = tokens
        self.first_token_s = seconds
        self.decode_s, self.decode_bytes = 0.0, 0

    def next(self, tokens: int, seconds: float, nbytes: int) -> None:
        self.new_tokens += tokens
        self.decode_s += seconds
        self.decode_bytes += nbytes

    @property
    def tokens_per_s(self) -> float:
        """Decode rate: the first tokens belong to the prefill."""
        return (self.new_tokens - self.first_tokens) / self.decode_s if self.decode_s else 0.0

    @property
    def gb_per_s(self) -> float:
        return self.decode_bytes / self.decode_s / 1e9 if self.decode_s else 0.0


def weight_bytes(model: Transformer | InferenceTransformer) -> int:
    """A pass reads every weight once; of an input embedding of its own, only rows."""
    read = sum(parameter.nbytes for parameter in model.parameters())
    return read if model.config.tie_embeddings else read - model.embed_tokens.weight.nbytes
