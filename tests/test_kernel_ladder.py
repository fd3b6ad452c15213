"""The kernel ladder: every rung against the oracle, the command on a tiny model."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import triton

from benchmarks.__main__ import main
from benchmarks.results import META_KEYS, Results, Row
from benchmarks.timing import Timer
from examples.kernel_ladder import RUNGS, attend_of, report
from examples.kernel_ladder.model import (
    TIE,
    Generation,
    SlicedCache,
    copied_first,
    difference,
    generate,
    truncated,
)
from examples.kernel_ladder.run import model_path
from tests.tiny_model import save_tiny_model
from torch_fdattn.doctor.software import interpreter_trap
from torch_fdattn.models import load_model
from torch_fdattn.testing import AttentionCase, check_close, expected_attention, make_tensor

ROOT = Path(__file__).resolve().parents[1]
KERNELS = [rung for rung in RUNGS if rung != "reference"]
LAYOUTS = ("bhsd", "bshd", "slice", "slice", "packed", "every_other", "expanded")
DRAWS, QUICK = 6, 2  # of which every second decodes


def draw(seed: int, device: str) -> AttentionCase:
    """Half of the cases decode (T = 1); caches of several tiles, the last one ragged most often."""
    rng = random.Random(f"ladder {seed}")
    tile = 16 if device == "cpu" else 64  # fp32's, and that of 16 bits
    q_len = 1 if seed % 2 else rng.choice((2, 5, 16, 17, rng.randint(18, tile + 20)))
    kv_len = q_len + rng.choice((0, 1, tile, rng.randint(2, 4 * tile)))
    half = torch.float16 if device == "cpu" else torch.bfloat16
    dtype = rng.choice((half, torch.float32)) if kv_len >= 8 else half
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 5))
    layouts = tuple(rng.choice(LAYOUTS) for _ in range(3))
    head_dim, scale = rng.choice((16, 32, 64, 128)), rng.choice((None, None, 0.2))
    return AttentionCase(
        seed, rng.choice((1, 2)), kv_heads * group, kv_heads, q_len, kv_len, head_dim, dtype, tile,
        layouts, causal=True, scale=scale,
    )  # fmt: skip


def check(rung: str, case: AttentionCase, device: str) -> None:
    out = attend_of(rung)(*case.inputs(device), case.scale)
    exact, errors = expected_attention(case, device, backward=False).values["out"]
    check_close(f"{rung}'s out", out, exact, errors, case.dtype)


@pytest.mark.parametrize("seed", range(2 * DRAWS))
def test_reference(seed: int, device: str) -> None:
    check("reference", draw(seed, device), device)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "seed", [pytest.param(x, marks=pytest.mark.slow if x >= QUICK else ()) for x in range(DRAWS)]
)
@pytest.mark.parametrize("rung", KERNELS)
def test_rungs_against_the_oracle(
    rung: str, seed: int, kernel_device: str, poisoned_empty: None, record_drawn
) -> None:
    case = draw(seed + 100 * KERNELS.index(rung), kernel_device)
    record_drawn("ladder", case.features())
    check(rung, case, kernel_device)


@pytest.mark.interpreter
@pytest.mark.parametrize("rung", KERNELS)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (1, 64), (1, 65), (16, 16), (65, 65), (17, 128)]
)
def test_lengths_at_the_borders_of_tiles(
    rung: str, q_len: int, kv_len: int, kernel_device: str, poisoned_empty: None
) -> None:
    layouts = ("bshd", "slice", "slice")
    check(
        rung,
        AttentionCase(0, 1, 3, 1, q_len, kv_len, 16, torch.float16, 64, layouts, causal=True),
        kernel_device,
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("processors", [1, 3, 50])
@pytest.mark.parametrize("q_len", [1, 7, 40])
def test_flash_decode_splits(
    processors: int, q_len: int, kernel_device: str, poisoned_empty: None
) -> None:
    """No split, uneven shares, and more programs than tiles: shares and rows that see no key."""
    case = AttentionCase(3, 1, 3, 1, q_len, 200, 32, torch.float16, 64, causal=True)
    with mock.patch("examples.kernel_ladder.fdm._processors", return_value=processors):
        check("fdm", case, kernel_device)


@pytest.mark.parametrize("rung", KERNELS)
def test_rungs_say_what_they_cannot_do(rung: str) -> None:
    attend = attend_of(rung)
    with pytest.raises(ValueError, match="head_dim must be a power of two from 16 to 128, got 24"):
        attend(*torch.zeros(3, 1, 2, 4, 24))
    q, k, v = torch.zeros(3, 1, 3, 4, 16)
    for arguments in (
        (q, k[:, :2], v[:, :2]),  # 3 heads over 2
        (q, k[:, :, :2], v[:, :, :2]),  # more queries than keys
        (q, k, torch.zeros(1, 3, 16, 4).mT),
    ):
        with pytest.raises(ValueError, match="needs H a multiple of H_kv, T <= N and unit last"):
            attend(*arguments)


# ------------------------------------------------------------------------------------- in a model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    return save_tiny_model(folder)


def test_a_model_over_the_sliced_cache_writes_what_it_writes_without(
    tiny: Path, device: str
) -> None:
    model = load_model(tiny, dtype=torch.float32, device=device)
    prompt = torch.arange(20, device=device)[None] * 3 % 64
    for attend in (attend_of("reference"), copied_first(attend_of("reference"))):
        cache = SlicedCache(model.config, 2, 40, torch.float32, torch.device(device))
        cache.attention = attend
        made = [generate(model, cache, prompt, 6, Timer(torch.device(device))) for _ in range(2)]
        assert made[0].tokens == made[1].tokens  # the second finds the cache filled, and resets it
        assert cache.held == 25
        assert cache.lengths.tolist() == [25]
        whole = model(torch.cat((prompt, torch.tensor([made[0].tokens], device=device)), 1))[0]
        torch.testing.assert_close(torch.stack(made[0].logits), whole[19:25], atol=1e-5, rtol=0)


def test_truncated(tiny: Path) -> None:
    model = load_model(tiny)
    assert len(truncated(model, None).layers) == 2
    assert len(truncated(model, 5).layers) == 2
    assert len(truncated(model, 1).layers) == 1


def test_difference_knows_ties_from_faults() -> None:
    def generation(*logits: list[float]) -> Generation:
        rows = [torch.tensor(row) for row in logits]
        return Generation([int(row.argmax()) for row in rows], rows, 0.0, 0.0)

    expected = generation([1.0, 3.0], [16.0, 16.0 - 1e-5])
    assert difference(expected, expected) == (
        True, "the reference's 2 tokens, logits within 0.0e+00",
    )  # fmt: skip
    holds, text = difference(generation([1.0, 3.0], [16.0, 17.0]), expected)
    assert holds
    assert text.startswith(
        "tokens differ from number 2 on, where the reference gives 16 to its own"
    )
    assert text.endswith("a tie")
    holds, text = difference(generation([4.0, 3.0], [16.0, 15.0]), expected)
    assert not holds
    assert text.endswith("not a tie: WRONG")
    assert TIE * torch.finfo(torch.float32).eps * 16 > 1e-5


# ----------------------------------------------------------------------------------- the command


def ladder(tiny: Path, *words: str, device: str | None = None) -> list[str]:
    where = ["--device", device] if device else []
    small = ["--prompt-tokens", "19", "--new-tokens", "3", "--repeats", "1", "--dtype", "fp32"]
    return ["ladder", "--model", str(tiny), "--logs", str(tiny / "logs"), *where, *small, *words]


@pytest.mark.slow
@pytest.mark.interpreter
def test_the_whole_ladder(
    tiny: Path, kernel_device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny / "ladder.json"
    words = ladder(tiny, "--contiguous", "--json", str(file), device=kernel_device)
    assert main(words) == 0
    printed = capsys.readouterr().out
    (log,) = (tiny / "logs").iterdir()
    assert log.read_text(encoding="utf-8") == printed
    assert re.fullmatch(r"\d{8}T\d{6}Z_all\.log", log.name)
    assert "slices of shape (1, 2, 19, 16), strides (2720, 16, 32, 1)" in printed
    assert str(tiny.parent) not in Results.load(file).to_json()

    rows = Results.load(file).rows
    decode = "graph_us" if kernel_device == "cuda" else "eager_us"
    for rung in RUNGS:
        for impl in (rung, rung + report.COPIED):
            assert f"{impl}: the reference's 3 tokens" in printed
            found = {(row.metric, row.case.split()[4]) for row in rows if row.impl == impl}
            assert found >= {
                ("first_call_ms", "prefill"),
                ("latency_ms", "prefill"),
                ("latency_ms", "decode"),
                ("fwd_TFLOPs", "prefill"),
                (decode, "decode"),
                ("max_abs_err", "prefill"),
                ("max_abs_err", "decode"),
            }
        assert printed.count(f"| {rung} | ") == 2
    assert max(float(row.value) for row in rows if row.metric == "max_abs_err") < 1e-5
    assert {row.case for row in rows} == {
        "B1 H2/2 N19 D16 prefill fp32 tiny 2 of 2 layers",
        "B1 H2/2 N21 D16 decode fp32 tiny 2 of 2 layers",
    }


@pytest.mark.interpreter
def test_a_rung_that_fails_or_errs_fails_the_run(
    tiny: Path, kernel_device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(q, k, v):
        raise RuntimeError("no such tile")

    words = ladder(tiny, "--kernel", "minimal_v2", device=kernel_device)
    for attend, message in (
        (fails, "minimal-v2: FAILED: RuntimeError: no such tile"),
        (lambda q, k, v: q.flip(-1) * 9, "not a tie: WRONG"),
    ):
        with mock.patch("examples.kernel_ladder.minimal_v2.attend", attend):
            assert main([*words, "--json", str(tiny / "results.json")]) == 1
        printed = capsys.readouterr().out
        assert message in printed
        assert "reference: the reference's 3 tokens" in printed


def test_an_interpreter_that_breaks_on_numpy_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(np, "__version__", "2.4.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        main(["ladder", "--kernel", "fdm", "--device", "cpu"])
    assert "triton 3.6.0's interpreter breaks on numpy 2.4.0" in capsys.readouterr().err


@pytest.mark.slow
def test_debugging_from_the_shell(tiny: Path) -> None:
    """Triton is told to interpret by the command itself, and the model comes from the environment."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "ladder", "--kernel", "fdm", "--debug", "--logs",
         str(tiny / "logs")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=environment | {"OMP_NUM_THREADS": "1", "LLAMA_MODEL_PATH": str(tiny)},
    )  # fmt: skip
    why = interpreter_trap(triton.__version__, np.__version__)
    if why is not None:  # these two releases do not fit: said before anything runs
        assert done.returncode == 2
        assert why in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "times mean nothing" in done.stdout
    assert f"fdm in {tiny}, fp32 tiny 1 of 2 layers: 20 prompt tokens, 3 new" in done.stdout
    calls = re.findall(r"strides \(\d+, 16, 32, 1\): largest error (\S+)", done.stdout)
    assert len(calls) == 2 * (2 + 3)  # of reference and fdm: the first call's, then the round's
    assert max(map(float, calls)) < 1e-6
    (log,) = (tiny / "logs").iterdir()
    assert log.name.endswith("Z_fdm.log")


def test_where_the_model_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CHAT_MODEL_PATH", raising=False)
    monkeypatch.delenv("LLAMA_MODEL_PATH", raising=False)
    assert model_path(None) == "smollm2"
    monkeypatch.setenv("LLAMA_MODEL_PATH", "/plain")
    assert model_path(None) == "/plain"
    monkeypatch.setenv("LLAMA_CHAT_MODEL_PATH", "/chat")
    assert model_path(None) == "/chat"
    assert model_path("asked.gguf") == "asked.gguf"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kernel", "v3"], "must be all or one of reference, minimal, v1, minimal-v2, v2, fdm, got"),
        (["--debug", "--device", "cuda"], "--debug runs in Triton's interpreter"),
    ],
)  # fmt: skip
def test_wrong_commands(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["ladder", *words])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new-tokens", "1"], "--new-tokens must be at least 2, got 1"),
        (["--layers", "0"], "--layers must be at least 1, got 0"),
        (["--prompt-tokens", "200"], "must fit into the model's 128 positions, got 200 and 3"),
    ],
)
def test_wrong_sizes(
    words: list[str], message: str, tiny: Path, kernel_device: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        main(ladder(tiny, *words, device=kernel_device))
    assert message in capsys.readouterr().err


def test_the_interpreter_is_not_mistaken_for_a_gpu(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for words, message in (
        (["--dtype", "bf16"], "--dtype must be fp16 or fp32 in Triton's interpreter, got bf16"),
        (["--device", "cuda"], "--device cuda must be run without TRITON_INTERPRET=1, got both"),
    ):
        with pytest.raises(SystemExit):
            main(ladder(tiny, *words))
        assert message in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(sys.modules, "triton", sys)  # as if it were imported
    with pytest.raises(SystemExit):
        main(ladder(tiny, "--device", "cpu"))
    assert "start Python with TRITON_INTERPRET=1" in capsys.readouterr().err


def test_make_runs_the_command() -> None:
    for target, words in (
        ("ref", "--kernel reference --contiguous"),
        ("bench-minimal-v2", "--kernel minimal-v2 --contiguous"),
        ("debug-v2", "--kernel v2 --debug --contiguous"),
    ):
        done = subprocess.run(
            ["make", "--no-print-directory", "-n", target, "PYTHON=python3", "LADDER=--contiguous"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == f"python3 -m benchmarks ladder {words}"


# ------------------------------------------------------------------------------------ the report


def made_up(*rows: tuple[str, str, str, float]) -> Results:
    meta = dict.fromkeys(META_KEYS, "x") | {"count": 1, "date": "2026-01-02T03:04:05Z"}
    units = {"latency_ms": "ms", "graph_us": "us"}
    return Results(meta, [Row(f"B1 {kind}", i, m, v, units[m]) for kind, i, m, v in rows])


def test_tables_tell_steps_and_strides() -> None:
    results = made_up(
        ("prefill", "minimal", "latency_ms", 8.0),
        ("decode", "minimal", "graph_us", 30.0),
        ("decode", "minimal/contiguous", "graph_us", 60.0),
        ("prefill", "fdm", "latency_ms", 4.0),
        ("decode", "fdm", "graph_us", 10.0),
    )
    text = report.tables(results)
    assert "| minimal | – | 8.00 | – | – | 30.0 | – | – |" in text
    assert "| fdm | – | 4.00 (2.00×) | – | – | 10.0 (3.00×) | – | – |" in text
    assert "30.0 : 60.0 (2.00×) |" in text


def test_the_readme_is_made_from_the_results(tmp_path: Path) -> None:
    text = report.README.read_text(encoding="utf-8")
    assert report.updated(text) == text, "run python -m benchmarks ladder --readme"
    results = made_up(("decode", "fdm", "graph_us", 10.0))
    for day in (1, 2):
        results.save(tmp_path / f"2026010{day}T000000Z_H100x1_ladder.json")
    new = report.updated(text, tmp_path)
    assert "20260102T000000Z_H100x1_ladder.json" in new
    assert "20260101T000000Z_H100x1_ladder.json" not in new
    section = text[text.index("<!-- results -->") : text.index("<!-- end of results -->")]
    none = "<!-- results -->\nNot measured on a GPU yet.\n"
    assert report.updated(new, tmp_path / "none") == text.replace(section, none)


def test_every_layout_of_the_tests_is_a_view() -> None:
    """The drawn layouts are strided at all, or they would prove nothing."""
    for layout in set(LAYOUTS) - {"bhsd"}:
        assert not make_tensor((1, 2, 5, 16), layout).is_contiguous()
