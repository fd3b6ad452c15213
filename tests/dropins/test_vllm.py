"""vLLM's plug-in where vLLM is missing or older; what it does inside vLLM is shown by `make test-vllm`."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from torch_fdattn.dropins import vllm


def test_a_missing_vllm_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"needs vllm >= 0\.32: pip install -e '\.\[vllm\]'"):
        vllm.register()


@pytest.fixture
def older(monkeypatch):
    """The names that `register` imports, of a vLLM that asks backends for their cache's shape."""
    names = "vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"
    modules = {name: types.ModuleType(name) for name in names}
    backend = types.ModuleType("vllm.v1.attention.backend")
    backend.AttentionBackend = type("AttentionBackend", (), {"get_kv_cache_shape": None})
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = registry.register_backend = None
    for module in (*modules.values(), backend, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_an_older_vllm_is_refused(older):
    with pytest.raises(ImportError, match="got one that asks backends for their shape"):
        vllm.register()


def test_the_plugin_warns_and_lets_vllm_start(older, caplog):
    with caplog.at_level(logging.WARNING):
        vllm.plugin()
    assert "CUSTOM is not torch_fdattn's" in caplog.text


def test_a_name_is_a_string():
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        vllm.register(3)
