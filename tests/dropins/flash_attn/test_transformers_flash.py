"""transformers' flash_attention_2 and _3 paths through `install()`: tiny models against eager, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.dropins.flash_attn.under_transformers import NEW, SMALL

pytest.importorskip("transformers", reason="transformers is the reference here")
LAYERS = SMALL["num_hidden_layers"]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def results(request) -> dict:
    command = [sys.executable, "-m", "tests.dropins.flash_attn.under_transformers"]
    done = subprocess.run([*command, str(request.param)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_logits_and_gradients(results: dict, name: str, kind: str) -> None:
    found = results[name][kind]
    assert found["logits"] < 1e-5
    assert found["gradients"] < 1e-5
    op = "attention" if kind == "plain" else "varlen_attention"
    assert found["launches"] == {f"{op}_forward/cpu": LAYERS, f"{op}_backward/cpu": LAYERS}


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_generated_text(results: dict, name: str) -> None:
    """Every step of every layer is a launch of ours: layers × steps."""
    found = results[name]["generated"]
    assert found["equal"]
    assert sum(found["launches"].values()) == LAYERS * NEW
