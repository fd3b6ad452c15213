"""Text generation over torch_fdattn's models and caches."""

from torch_fdattn.engine.async_llm import AsyncLLM, EngineDead
from torch_fdattn.engine.chat import Chat
from torch_fdattn.engine.followers import Follower
from torch_fdattn.engine.heap import frozen_heap
from torch_fdattn.engine.llm import LLM
from torch_fdattn.engine.ngram_speculation import NgramSpeculation
from torch_fdattn.engine.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput
from torch_fdattn.engine.paged_kv_cache import PagedKVCache
from torch_fdattn.engine.prompts import PromptError
from torch_fdattn.engine.rank_messages import RankLost
from torch_fdattn.engine.sampling_params import LogitsError, SamplingParams
from torch_fdattn.engine.stats import Stats
from torch_fdattn.engine.step_trace import StepTrace
from torch_fdattn.engine.streaming import stream_text

__all__ = [
    "LLM", "AsyncLLM", "Chat", "CompletionOutput", "EngineDead", "EngineStats", "Follower", "LogitsError", "Logprob",
    "NgramSpeculation", "PagedKVCache", "PromptError", "RankLost", "RequestOutput", "SamplingParams", "Stats", "StepTrace",
    "frozen_heap", "stream_text",
]  # fmt: skip
