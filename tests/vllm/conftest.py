"""vLLM on the CPU, in this process, with our backend in the place of the only one that its CPU platform takes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Read when vLLM is imported; the engine must count its launches in this process.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def registered() -> Iterator[None]:
    """CPU_ATTN is ours."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from torch_fdattn.dropins.vllm import register

    register("CPU_ATTN")
    yield
    AttentionBackendEnum.CPU_ATTN.clear_override()
