"""vLLM's attention by our ops: an out-of-tree backend under the name CUSTOM.

vLLM calls `plugin` itself: it is the entry point `fdattn` of `vllm.general_plugins`. The backend is then taken by
whoever asks for it, with `--attention-backend CUSTOM` or `LLM(..., attention_backend="CUSTOM")`. `backend.py` has it.
"""

from __future__ import annotations

import logging

from torch_fdattn.extras import install_command

__all__ = ["plugin", "register"]

_log = logging.getLogger(__name__)
_CLASS = f"{__name__}.backend.FdattnBackend"


def register(name: str = "CUSTOM") -> None:
    """Makes our backend the one that vLLM loads for this name of its `AttentionBackendEnum`; any number of times.

    Args:
        name: CUSTOM, which vLLM leaves to plug-ins. On a CPU, whose platform takes no other name, CPU_ATTN.

    Raises:
        ImportError: vLLM is not installed, or its caches are laid out as they were before 0.32.
        RuntimeError: somebody else has registered a backend under this name.
        ValueError: vLLM has no backend of this name.

    Source: https://docs.vllm.ai/en/latest/design/plugin_system.html

    Examples:
        >>> import importlib.util
        >>> if importlib.util.find_spec("vllm") is not None:
        ...     torch_fdattn.dropins.vllm.register()  # then vllm.LLM(..., attention_backend="CUSTOM")
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
    member = AttentionBackendEnum[name]
    if member.is_overridden() and member.get_path() != _CLASS:
        raise RuntimeError(
            f"{name} must be free for our backend, got {member.get_path()}: leave that plug-in out (VLLM_PLUGINS)"
        )
    register_backend(member, _CLASS)


def plugin() -> None:
    """`register`, as vLLM's loader calls it: a refusal is a warning, for it would end vLLM for who never asked for CUSTOM.

    Examples:
        >>> torch_fdattn.dropins.vllm.plugin()  # where vLLM is not installed, a warning in the log
    """
    try:
        register()
    except (ImportError, RuntimeError) as error:
        _log.warning("vLLM's backend CUSTOM is not torch_fdattn's: %s", error)
