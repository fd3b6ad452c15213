"""What launchers and `auto` take with a tuned table and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_fdattn
from tests.ops.attention.tile_cases import Watched, small
from tests.tables.records import LINEAR, SPLITS, TILE, read_from, record, save
from torch_fdattn import tables
from torch_fdattn.dist.decode.auto import FUSED_ROWS, choose
from torch_fdattn.dist.tensor_parallel import auto
from torch_fdattn.ops.attention import backward, forward, tuned_tiles
from torch_fdattn.ops.attention.configs import BackwardConfig, TileConfig
from torch_fdattn.ops.attention.tuned_tiles import mask_class, with_tuned_tiles
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.decode.launch import DecodeLaunchPlan
from torch_fdattn.ops.decode.tuned_splits import tuned_target_splits
from torch_fdattn.ops.options import AttentionOptions, DecodeOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores


@pytest.fixture
def planted(tmp_path: Path):
    """Called as planted(section=[entry, …]) it makes these this machine's entries for a with block."""

    def plant(device="cpu", **sections):
        return read_from(save(tmp_path / "tables.json", record(device, **sections)))

    return plant


BUILT_IN = TileConfig(16, 16, 1, 1)
TUNED = TileConfig(64, 32, 1, 1)
CAUSAL = AttentionOptions(Mask(window_right=0), 1.0)


def tile_of(dtype=torch.float16, dim=16, options=CAUSAL, keys=128, packed=False):
    q = torch.empty(1, 2, 24, dim, dtype=dtype)
    return with_tuned_tiles("forward", BUILT_IN, q, q, options, keys, packed)


class TestAttentionTiles:
    def test_without_a_file_the_config_itself(self) -> None:
        assert tile_of() is BUILT_IN

    def test_an_entry_speaks_for_its_kind_of_call(self, planted) -> None:
        with planted():
            assert tile_of() == TUNED
            assert tile_of(dim=9) == TUNED  # padded to 16
            assert (
                tile_of(keys=100, options=AttentionOptions(Mask(), 1.0)) == TUNED
            )  # the keys end within a tile
            assert tile_of(options=AttentionOptions(Mask(), 1.0), packed=True) == TUNED
            for other in (
                dict(dtype=torch.float32), dict(dim=17), dict(options=AttentionOptions(Mask(), 1.0)),
                dict(options=CAUSAL._replace(scores=Scores(softcap=5.0))),
                dict(options=AttentionOptions(Mask(window_left=20, window_right=0), 1.0)),
            ):  # fmt: skip
                assert tile_of(**other) == BUILT_IN, other

    def test_float16_takes_what_bfloat16_has(self, planted) -> None:
        wide, narrow = (TILE | {"dtype": d, "tile": t} for d, t in (("bfloat16", "32x16w1s1"), ("float16", "16x32w1s1")))  # fmt: skip
        with planted(attention_tiles=[wide]):
            assert tile_of() == tile_of(torch.bfloat16) == TileConfig(32, 16, 1, 1)
        with planted(attention_tiles=[wide, narrow]):
            assert tile_of() == TileConfig(16, 32, 1, 1)

    def test_fp32_entries_are_of_exact_dots(self, planted, monkeypatch) -> None:
        with planted(attention_tiles=[TILE | {"dtype": "float32"}]):
            assert tile_of(torch.float32) == TUNED
            monkeypatch.setattr(tuned_tiles, "dot_precision", lambda _: "tf32")
            assert tile_of(torch.float32) == BUILT_IN

    def test_each_sweep_of_the_backward_by_itself(self, planted) -> None:
        q = torch.empty(1, 2, 24, 16, dtype=torch.float16)
        both = BackwardConfig(BUILT_IN, BUILT_IN)
        with planted(attention_tiles=[TILE, TILE | {"kernel": "dq"}]):
            found = with_tuned_tiles("backward", both, q, q, CAUSAL, 128, False)
        assert found == BackwardConfig(dkdv=BUILT_IN, dq=TUNED)

    def test_a_tile_that_no_kernel_can_have_is_named(self, planted) -> None:
        wrong = [TILE | {"tile": "48x32w1s1"}]
        says = r"tables\.json has the tile '48x32w1s1'.*block_m"
        with planted(attention_tiles=wrong), pytest.raises(ValueError, match=says):
            tile_of()

    @pytest.mark.parametrize(
        ("mask", "name"),
        [
            (Mask(), "unmasked"),
            (Mask(window_right=0), "masked"),
            (Mask(window_left=100, window_right=0), "short_window"),
            (Mask(window_left=5000, window_right=0), "masked"),
        ],
    )
    def test_classes_of_masks(self, mask: Mask, name: str) -> None:
        assert mask_class(mask, 8192) == name

    @pytest.mark.interpreter
    def test_kernels_are_launched_with_them(self, kernel_device, planted) -> None:
        inputs = small(kernel_device, requires_grad=True)
        plain, _ = torch_fdattn.attention(*inputs, causal=True)
        tiles = [TILE, TILE | {"kernel": "dkdv", "tile": "32x16w1s1"}]
        with planted(kernel_device, attention_tiles=tiles):
            with Watched(forward._attention_forward_kernel) as seen:
                out, _ = torch_fdattn.attention(*inputs, causal=True)
            assert seen.sides == {(64, 32)}
            with Watched(backward._dkdv_kernel) as seen:
                out.float().sum().backward()
            assert seen.sides == {(32, 16)}
            with torch_fdattn.tiles("forward", block_m=16), Watched(forward._attention_forward_kernel) as seen:  # fmt: skip
                torch_fdattn.attention(*inputs, causal=True)
            assert seen.sides == {(16, 32)}
        torch.testing.assert_close(out, plain, rtol=2e-3, atol=1e-3)
        with Watched(forward._attention_forward_kernel) as seen:
            again, _ = torch_fdattn.attention(*inputs, causal=True)
        assert (64, 32) not in seen.sides
        assert torch.equal(again, plain)


class TestDecodeSplits:
    def target(self, work_tiles=2, keys=256, dtype=torch.float16, cache_dtype=None, paged=False):
        q = torch.empty(1, 2, 1, 16, dtype=dtype)
        k = torch.empty(1, 2, 8, 16, dtype=cache_dtype or dtype)
        return tuned_target_splits(q, k, k, paged, work_tiles, keys, num_sms=10)

    def test_the_nearest_within_an_octave_speaks(self, planted) -> None:
        few = SPLITS | {"work_tiles": 16, "splits_per_sm": 0.5}
        assert self.target() is None
        with planted(decode_splits=[SPLITS, few]):
            assert self.target() == self.target(4) == self.target(keys=512) == 40
            assert self.target(8) == self.target(32) == 5
            for other in (
                dict(work_tiles=64), dict(keys=1024), dict(paged=True), dict(dtype=torch.float32),
                dict(cache_dtype=torch.int8),
            ):  # fmt: skip
                assert self.target(**other) is None, other

    @pytest.mark.interpreter
    def test_plans_take_them_but_for_the_batch_invariant_mode(self, kernel_device, planted) -> None:
        q = torch.randn(1, 2, 1, 16, dtype=torch.float16, device=kernel_device)
        k = torch.randn(1, 2, 256, 16, dtype=torch.float16, device=kernel_device)

        def splits(invariant=False) -> int:
            options = DecodeOptions(Mask(), 1.0, batch_invariant=invariant)
            plan = DecodeLaunchPlan(DecodeCall(q, Cache(k, k), options), q)
            return plan.floats

        before, invariant = splits(), splits(True)
        plain = torch_fdattn.decode(q, k, k)[0]
        # A GPU's 256 keys are already in as many splits as they have blocks.
        splits_per_sm = 4.0 if torch.device(kernel_device).type == "cpu" else 0.01
        with planted(kernel_device, decode_splits=[SPLITS | {"splits_per_sm": splits_per_sm}]):
            assert splits() != before
            assert splits(True) == invariant
            torch.testing.assert_close(torch_fdattn.decode(q, k, k)[0], plain, rtol=2e-3, atol=1e-3)


def test_dist_decode_takes_the_measured_crossover() -> None:
    assert choose(FUSED_ROWS, 2, True, False) == "fused"
    assert choose(9, 2, True, False, fused_rows=8) == "two_shot"
    assert choose(9, 2, True, True, fused_rows=8) == "fused"
    assert choose(0, 2, True, False, fused_rows=0) == "fused"  # the batch-invariant mode


class TestTensorParallel:
    SHIPPED = (
        dict(op="matmul_all_reduce", gpu="cpu", architecture="cpu", ranks=2, dtype="float32", columns=6, features=8, choices=[[4, "nccl"]]),
        dict(op="matmul_all_reduce", gpu="cpu", architecture="cpu", ranks=4, dtype="float32", columns=6, features=8, choices=[[4, "nccl"]]),
        dict(op="layer", gpu="cpu", architecture="cpu", ranks=2, dtype="float32", columns=6, features=8, choices=[[4, "ag_rs"]]),
    )  # fmt: skip

    def test_entries_replace_those_of_the_same_op_gpu_and_ranks(self, planted) -> None:
        device = tables.Device("cpu", "cpu")
        assert auto.with_tuned_entries(self.SHIPPED, device) == self.SHIPPED
        with planted():
            merged = auto.with_tuned_entries(self.SHIPPED, device)
        assert merged == (LINEAR | device._asdict(), *self.SHIPPED[1:])

    def test_without_a_file_the_shipped_table_byte_for_byte(self) -> None:
        device = tables.Device("NVIDIA H100 80GB HBM3", "sm_90")
        assert auto.with_tuned_entries(auto.table(), device) == auto.table()
