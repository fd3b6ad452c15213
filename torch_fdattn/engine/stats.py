"""What a run of the engine took."""

from __future__ import annotations

from dataclasses import dataclass

from torch_fdattn.models import InferenceTransformer, Transformer


@dataclass
class Stats:
    """What a run of `Engine.generate` or `stream_text` took, on this rank; filled in anew as it goes.

    Tokens are counted over the whole batch; sequences that have ended count no more.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> engine = torch_fdattn.engine.Engine(torch_fdattn.models.Transformer(config), capacity=64)
        >>> stats = torch_fdattn.engine.Stats()
        >>> tokens = list(engine.generate([[5, 9, 33]], 8, stats=stats))
        >>> stats.tokens_per_s > 0
        True
    """

    prompt_tokens: int = 0
    first_tokens: int = 0  # those that the prefill gives: one for each sequence
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
