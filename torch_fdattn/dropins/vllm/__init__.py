"""vLLM's attention by our ops: an out-of-tree backend under the name CUSTOM.

vLLM calls `register` itself: it is the entry point `fdattn` of `vllm.general_plugins`. The backend is then taken by
whoever asks for it, with `--attention-backend CUSTOM` or `LLM(..., attention_backend="CUSTOM")`. `backend.py` has it.
"""

from __future__ import annotations

from torch_fdattn.extras import install_command

__all__ = ["register"]


def register(name: str = "CUSTOM") -> None:
    """Makes our backend the one that vLLM loads for this name of its `AttentionBackendEnum`; any number of times.

    Args:
        name: CUSTOM, which vLLM leaves to plug-ins. On a CPU, whose platform takes no other name, CPU_ATTN.

    Raises:
        ImportError: vLLM is not installed, or its caches are laid out as they were before 0.32.
        ValueError: vLLM has no backend of this name.

    Source: https://docs.vllm.ai/en/latest/design/plugin_system.html

    Examples:
        >>> torch_fdattn.dropins.vllm.register()  # doctest: +SKIP
        >>> vllm.LLM("Qwen/Qwen3-0.6B", attention_backend="CUSTOM")  # doctest: +SKIP
    """
    if type(name) is not str:
        raise TypeError(f"name must be a str, got {name!r}")
    try:
        from vllm.v1.attention.backend import AttentionBackend
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(
            f"the backend for vLLM needs vllm >= 0.32: {install_command('vllm')} ({error})"
        ) from error
    # Before, a backend chose the shape itself, with keys and values as a dimension of its own.
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        raise ImportError(
            "the backend for vLLM needs vllm >= 0.32, whose caches are (blocks, KV heads, block, 2 · head size), got one "
            f"that asks backends for their shape: {install_command('vllm')}"
        )
    register_backend(AttentionBackendEnum[name], f"{__name__}.backend.FdattnBackend")
