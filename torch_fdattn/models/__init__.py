"""Dense decoders (Llama, Mistral, Qwen, SmolLM, Gemma): configuration, weights and tokenizers, for inference and training.

No transformers; parallel code only in parallelize.py, outside the model. The readers of weights and
tokenizers need the packages of the `models` extra; each is imported where it is used.
"""

from torch_fdattn.models.config import ModelConfig, RopeConfig
from torch_fdattn.models.encoding import Tokenizer
from torch_fdattn.models.errors import MissingExtra, ModelError
from torch_fdattn.models.inference import InferenceTransformer
from torch_fdattn.models.loading import load_model, load_tokenizer, resolve
from torch_fdattn.models.named_configs import CONFIG_NAMES, named_config, random_model
from torch_fdattn.models.parallel_loading import load_parallel
from torch_fdattn.models.parallelize import local_kv_heads, parallelize
from torch_fdattn.models.transformer import Transformer

__all__ = [
    "CONFIG_NAMES",
    "InferenceTransformer",
    "MissingExtra",
    "ModelConfig",
    "ModelError",
    "RopeConfig",
    "Tokenizer",
    "Transformer",
    "load_model",
    "load_parallel",
    "load_tokenizer",
    "local_kv_heads",
    "named_config",
    "parallelize",
    "random_model",
    "resolve",
]
