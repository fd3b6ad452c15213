"""The resource report, and occupancy from the limits of each generation."""

from __future__ import annotations

import re

import pytest

from benchmarks.__main__ import main
from benchmarks.results import NO_GPU, Results
from tests.compile_only.targets import ARCHS, occupancy
from torch_fdattn.ops.library import INTERPRET

compiles = pytest.mark.skipif(INTERPRET, reason="compiles kernels, which the interpreter replaces")


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "blocks", "limit"),
    [
        # 65,536 registers: 255, handed out as 256, of 256 threads.
        ("sm_90", 8, 255, 0, 1, "registers"),
        ("sm_90", 8, 128, 0, 2, "registers"),
        ("sm_90", 4, 64, 0, 8, "registers"),
        # 40 a thread are 12 warps in each of the four partitions, not 51 in all.
        ("sm_90", 1, 40, 0, 32, "blocks"),
        ("sm_90", 4, 40, 0, 12, "registers"),
        ("sm_90", 4, 32, 0, 16, "warps"),
        # 228 KiB, of which each block loses one; 164 on Ampere.
        ("sm_90", 4, 32, 100 * 1024, 2, "shared memory"),
        ("sm_100", 4, 32, 113 * 1024, 2, "shared memory"),
        ("sm_80", 4, 32, 100 * 1024, 1, "shared memory"),
        # More than a block may have at all.
        ("sm_80", 4, 32, 200 * 1024, 0, "shared memory"),
        ("gfx942", 4, 128, 20 * 1024, 3, "shared memory"),
        ("gfx950", 4, 128, 20 * 1024, 4, "registers"),
        ("gfx942", 1, 24, 0, 32, "blocks"),
        ("gfx942", 2, 24, 0, 16, "blocks"),
        ("gfx942", 8, 512, 0, 0, "registers"),
    ],
)
def test_occupancy(arch, warps, registers, shared, blocks, limit) -> None:
    found = occupancy(ARCHS[arch], warps, registers, shared)
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.percent == 100 * blocks * warps / found.max_warps


@compiles
def test_report(tmp_path, capsys) -> None:
    """One small configuration on three targets, as a table and as a file that the other commands read."""
    words = "--head-dim 64 --op forward --tile 16x16w1s1 --target sm_80 sm_90 gfx942"
    assert main(["resources", *words.split(), "--json", str(tmp_path / "r.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Compiled only, torch")
    rows = re.findall(r"^\| attention_forward \| bf16 hd64 causal \| (\w+) \| 16x16 \| 1 \| 1 \| (\d+)", shown, re.M)  # fmt: skip
    assert [target for target, _ in rows] == ["sm_80", "sm_90", "gfx942"]
    results = Results.load(tmp_path / "r.json")
    assert results.meta["gpu"] == NO_GPU
    registers = {x.impl: x.value for x in results.rows if x.metric == "registers"}
    assert registers == {target: int(count) for target, count in rows}
    assert all(0 < x.value <= 100 for x in results.rows if x.metric == "occupancy")
    assert main(["table", str(tmp_path / "r.json")]) == 0
    assert "### Registers a thread" in capsys.readouterr().out


@compiles
def test_a_refusal_is_a_row(capsys) -> None:
    assert (
        main(
            [
                "resources",
                "--op",
                "forward",
                "--head-dim",
                "64",
                "--tile",
                "64x64w3s1",
                "--target",
                "sm_90",
            ]
        )
        == 0
    )
    assert "forward: AssertionError: num_warps must be a power of 2" in capsys.readouterr().out


@compiles
def test_registers_and_occupancy_are_what_llvm_says() -> None:
    """The assembly of AMD kernels says how many waves of it a SIMD holds by its registers."""
    from tests.compile_only.compiled import compile_launch
    from tests.compile_only.launches import Case, record
    from torch_fdattn.ops.attention.configs import TileConfig

    for arch in ("gfx942", "gfx950"):
        case = Case("forward", arch, "fp16", 64, "full", tile=TileConfig(32, 32, 4, 1))
        text = compile_launch(record(case)[0], ARCHS[arch]).asm["amdgcn"]
        said = int(re.search(r"; Occupancy: (\d+)", text)[1])
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        assert occupancy(ARCHS[arch], 4, registers, 0).warps == 4 * said


@compiles
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--target sm_70", r"--target must be of sm_80, sm_90, .*, got sm_70"),
        ("--op forwards", r"--op must be of forward, backward, .*, got forwards"),
        ("--tile 64x64", r"config must look like 128x64w8s3, got '64x64'"),
    ],
)
def test_wrong_words_are_named(words, message, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["resources", *words.split()])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.interpreter
def test_the_interpreter_is_refused(capsys) -> None:
    if not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    with pytest.raises(SystemExit):
        main(["resources"])
    assert "TRITON_INTERPRET must be unset" in capsys.readouterr().err


def test_capabilities_are_those_of_the_targets() -> None:
    for arch in ARCHS.values():
        nvidia = arch.target.backend == "cuda"
        assert arch.capability == ((arch.target.arch // 10, 0) if nvidia else (0, 0))
        assert arch.shared_limit <= arch.shared_size
