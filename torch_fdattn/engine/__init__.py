"""Text generation over torch_fdattn's models and caches."""

from torch_fdattn.engine.chat import Chat
from torch_fdattn.engine.engine import Engine
from torch_fdattn.engine.paged_kv_cache import PagedKVCache
from torch_fdattn.engine.prompts import PromptError
from torch_fdattn.engine.sampling import LogitsError, Sampling
from torch_fdattn.engine.stats import Stats

__all__ = ["Chat", "Engine", "LogitsError", "PagedKVCache", "PromptError", "Sampling", "Stats"]
