"""Text generation over torch_fdattn's models and caches."""

from torch_fdattn.engine.generate import PromptError, Sampling, Stats, generate

__all__ = ["PromptError", "Sampling", "Stats", "generate"]
