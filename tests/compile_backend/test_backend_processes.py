"""The backend as other processes and torch's caches find it: by entry point, in logs, by keys."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from tests import checkout
from tests.compile_backend.harness import qkv
from tests.compile_backend.test_backend import (  # noqa: F401
    ROOT,
    _fresh,
    agree,
    attend,
)
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.ops.library import launches


def python(code, *paths, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=checkout.environment(*paths, **environment),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def entry_points():
    """What pyproject declares for the group, as entry_points.txt has it."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.entry-points.torch_dynamo_backends]\n")[1].split("\n[")[0]
    return section.replace('"', "").strip()


def test_the_entry_point_is_declared_once():
    assert entry_points() == "fdattn = torch_fdattn.compile_backend:fdattn"
    sources = (ROOT / "torch_fdattn").rglob("*.py")
    vllm = ROOT / "torch_fdattn/dropins/vllm"  # whose function of this name is vLLM's
    found = [path for path in sources if "register_backend" in path.read_text()]
    assert not [path for path in found if vllm not in path.parents]


def test_the_entry_point_works_by_name(monkeypatch):
    """As torch reads it; which distribution brought it does not matter."""
    from torch._dynamo.backends import registry

    registry.list_backends()  # what is installed is read once, before
    name, target = entry_points().split(" = ")
    point = EntryPoint(name, target, "torch_dynamo_backends")
    monkeypatch.setitem(registry._BACKENDS, name, point)
    monkeypatch.delitem(registry._COMPILER_FNS, name, raising=False)
    compiled = torch.compile(attend, backend="fdattn", options={"lower": "aot_eager"})
    agree(attend, compiled, qkv(24))
    assert launches["attention_forward/cpu"] == 1
    assert registry._COMPILER_FNS.pop(name) is fdattn


@pytest.mark.slow
def test_found_by_name_with_no_import(tmp_path):
    """As installed: torch alone is imported, and the entry point names the backend."""
    info = tmp_path / "torch_fdattn_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-fdattn-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{entry_points()}\n")
    code = (
        "import torch, sys; assert 'torch_fdattn' not in sys.modules;"
        "f = torch.nn.functional.scaled_dot_product_attention;"
        "q = torch.randn(1, 2, 8, 16);"
        "g = torch.compile(f, backend='fdattn', options={'lower': 'aot_eager', 'require_all': True});"
        "torch.testing.assert_close(g(q, q, q), f(q, q, q));"
        "print('fdattn' in torch._dynamo.list_backends(), 'torch_fdattn' in sys.modules)"
    )
    assert python(code, tmp_path)[0].split() == ["True", "True"]


@pytest.mark.slow
def test_torch_logs():
    code = (
        "import torch; from torch_fdattn.compile_backend import fdattn;"
        "f = torch.nn.functional.scaled_dot_product_attention; q = torch.randn(1, 2, 8, 16);"
        "g = torch.compile(lambda q: (f(q, q, q), f(q, q, q, dropout_p=0.5)), backend=fdattn,"
        " options={'lower': 'eager'}); g(q)"
    )
    _, err = python(code, TORCH_LOGS="+torch_fdattn")
    assert "-> fdattn.attention" in err
    assert "left as it was, dropout: dropout_p is 0.5" in err
    assert "-> fdattn" not in python(code)[1]


CACHED = """
import torch
from torch._dynamo.utils import counters
from torch_fdattn.compile_backend import cache_key, fdattn
{change}
def attend(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

args = [torch.ones(2, 4, 8, 16, requires_grad=True) for _ in range(3)]
torch.compile(attend, backend=fdattn, options={options})(*args).sum().backward()
found = counters["aot_autograd"]
print(*(found["autograd_cache_" + what] for what in ("hit", "miss", "bypass")))
"""


@pytest.mark.slow
def test_the_caches_know_us(tmp_path):
    """A second process finds what the first compiled; with other sources or options of ours it does not."""

    def hits(change="", options="{}"):
        code = CACHED.format(change=change, options=options)
        out, _ = python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        return [int(x) for x in out.split()]

    assert hits() == [0, 1, 0]
    assert hits() == [1, 0, 0]
    assert hits("cache_key.source_hash = lambda: 'other'") == [0, 1, 0]
    assert hits(options="{'require_all': True}") == [0, 1, 0]


def test_the_users_own_joint_pass_is_kept():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from torch_fdattn.compile_backend.cache_key import CacheKey

    seen = []

    class Own(CustomGraphPass):
        def __call__(self, graph):
            seen.append(len(graph.nodes))

        def uuid(self):
            return "own"

    options = {"joint_custom_pre_pass": Own()}
    with torch._inductor.config.patch(force_disable_caches=True):  # a hit would run no pass
        agree(attend, torch.compile(attend, backend=fdattn, options=options), qkv(24, dim=32))
    assert seen
    assert CacheKey((), Own()).uuid()[-1] == "own"
    assert CacheKey((), lambda graph: None).uuid() is None  # what has no id cannot be cached
