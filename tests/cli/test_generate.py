"""The command line: text on stdout, the rest on stderr, one line for what the user can mend."""

from __future__ import annotations

import os
import re

import pytest
from torch.distributed import distributed_c10d

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")

from tests.cli.commands import (
    PARIS,
    TOKYO,
    invoke,
    needs_smollm2,
    refused,
    run,
    tiny_options,
)
from torch_fdattn.extras import install_command
from torch_fdattn.models import InferenceTransformer
from torch_fdattn.version import __version__


@needs_smollm2
def test_generate_continues_a_prompt():
    result = invoke(*PARIS)
    assert result.exit_code == 0, result.output
    assert result.stdout == " Paris.\n"
    assert re.search(r"5 prompt tokens, 2 new; first token after [\d.]+ s;", result.stderr)
    assert re.search(r"[\d.]+ tokens/s, [\d.]+ GB/s of weights and KV cache read", result.stderr)
    assert re.search(
        r"rank 0: KV cache of [\d,]+ bytes in 1 pages of 16 positions, 1 in use", result.stderr
    )


@pytest.mark.slow  # test_demo.py asks the same
@needs_smollm2
def test_chat_answers_and_stops():
    result = invoke(*TOKYO)
    assert result.stdout == "The capital of Japan is Tokyo.\n", result.output


def test_sampling_follows_the_seed(tiny):
    def text(seed):
        options = "--temperature", "1.2", "--top-p", "0.95", "--seed", seed
        return invoke(*tiny_options(tiny, *options)).stdout

    assert text("1") == text("1") != text("2")


def test_a_prompt_too_long_is_refused(tiny):
    refused(
        r"fdattn: prompt and --max-new-tokens take 137 positions, the model has 128",
        *tiny_options(tiny, "--max-new-tokens", "129"),
    )
    refused("fdattn: prompt must have at least one token", *tiny_options(tiny, "--prompt", ""))


def test_what_the_user_can_mend_is_one_line(tmp_path):
    def generate(model, *options):
        return "generate", "--model", str(model), "--prompt", "x", *options

    refused("fdattn: .*nowhere: no such file or folder", *generate(tmp_path / "nowhere"))
    (tmp_path / "consolidated.00.pth").touch()
    refused(r"fdattn: .*convert_llama_weights_to_hf\.py", *generate(tmp_path))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    refused(r"fdattn: .*cut\.gguf: truncated or corrupt", *generate(tmp_path / "cut.gguf"))
    refused("fdattn: --top-p must be above 0 and at most 1", *generate("smollm2", "--top-p", "0"))
    for device in ("tpu", "meta", "cuda:77"):
        refused("fdattn: --device", *generate("smollm2", "--device", device))


@pytest.mark.parametrize("options", [["--seed", str(2**63)], ["--temperature", "inf"]])
def test_sampling_out_of_range_is_one_line(options, tiny):
    refused(f"fdattn: {options[0]} must be ", *tiny_options(tiny, *options))


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_logits_that_cannot_be_drawn_from_are_one_line(temperature, tiny, monkeypatch):
    logits = InferenceTransformer.logits
    monkeypatch.setattr(
        InferenceTransformer, "logits", lambda *given: logits(*given) * float("nan")
    )
    refused("fdattn: logits must be finite", *tiny_options(tiny, "--temperature", temperature))


@pytest.mark.parametrize("name", ["", "~nobody-of-this-name/x", "x" * 5000])
def test_model_names_that_are_no_paths(name):
    refused("fdattn: ", "generate", "--model", name, "--prompt", "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE must be an integer of at least 1, got 'abc'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer of at least 1, got '0'"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE must be an integer of at least 1, got '²'"),
        ({"WORLD_SIZE": "٢"}, "WORLD_SIZE must be an integer of at least 1, got '٢'"),
        ({"WORLD_SIZE": "1_0"}, "WORLD_SIZE must be an integer of at least 1, got '1_0'"),
        ({"WORLD_SIZE": "2"}, "RANK must be an integer of at least 0, got None"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be below WORLD_SIZE 2, got 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "no process group .*MASTER_ADDR"),
    ],
)
def test_wrong_environments_are_one_line(changes, message, monkeypatch, tiny):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    # A process group that could not be made has taken a name, which graphs of later tests would show.
    monkeypatch.setattr(distributed_c10d._world, "group_count", 0)
    refused(message, *tiny_options(tiny))


def test_an_empty_environment_variable_is_unset(monkeypatch, tiny):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    assert invoke(*tiny_options(tiny)).exit_code == 0


def test_max_batch_tokens_is_respected(tiny, monkeypatch):
    widths, hidden = [], InferenceTransformer.hidden

    def counted(self, tokens, *arguments, **options):
        widths.append(len(tokens))
        return hidden(self, tokens, *arguments, **options)

    monkeypatch.setattr(InferenceTransformer, "hidden", counted)
    assert invoke(*tiny_options(tiny, "--max-batch-tokens", "3")).exit_code == 0
    assert widths == [3, 3, 2] + [1] * 7
    assert invoke(*tiny_options(tiny, "--max-batch-tokens", str(10**30))).exit_code == 0


def test_a_prompt_of_lone_surrogates_is_replaced(tiny):
    result = invoke(*tiny_options(tiny, "--prompt", "\udcff\ud800a"))
    assert result.exit_code == 0, result.output
    assert "3 prompt tokens" in result.stderr


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"fdattn {__version__}\n")


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


def test_an_encoding_without_the_text_replaces_it(tiny):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = run("-m", "torch_fdattn", *tiny_options(tiny), env=environment)
    assert result.returncode == 0, result.stderr
    assert "?" in result.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tiny):
    with open("/dev/full", "w") as full:
        result = run("-m", "torch_fdattn", *tiny_options(tiny), stdout=full)
    assert result.returncode == 1
    assert result.stderr == "fdattn: cannot write the text (No space left on device)\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command",
    [
        "torch_fdattn generate --help",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (
                "torch_fdattn",
                "torch_fdattn --help",
                "torch_fdattn doctor --json",
                "torch_fdattn.doctor",
            )
        ),
    ],
)
def test_a_full_disk_is_one_line_in_every_command(command):
    with open("/dev/full", "w") as full:
        result = run("-m", *command.split(), stdout=full)
    assert result.returncode == 1
    assert result.stderr == "fdattn: cannot write the text (No space left on device)\n"


def test_a_process_of_its_own_prints_no_traceback():
    result = run("-m", "torch_fdattn", "generate", "--model", "no-such-model", "--prompt", "x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "fdattn: no-such-model: no such file or folder; "
        "a model is a folder, a .gguf file, a hub id (owner/name), or smollm2\n"
    )


def test_without_the_extra_it_says_so():
    code = (
        "import sys; from torch_fdattn.__main__ import main\n"
        "for package in ('typer', 'rich'):\n"
        "    sys.modules[package] = None\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code)\n"
        "    del sys.modules[package]\n"
    )
    result = run("-c", code)
    assert result.stdout == "2\n2\n"
    assert result.stderr == "".join(
        f"fdattn: the command line needs the package {package}: {install_command('cli')}\n"
        for package in ("typer", "rich")
    )
