"""torchtitan's override hook (`dropins/torchtitan.py`), in a process that has torchtitan."""

from __future__ import annotations

import pytest

from tests.overlays import overlay, run

#: torchtitan, and what importing its Llama 3 takes beyond the tests' own environment.
PACKAGES = (
    "torchtitan==0.3.0", "spmd_types==0.2.3", "tyro==1.0.17", "docstring_parser==0.18.0", "typeguard==4.6.1",
    "einops==0.8.2", "torchdata==0.11.0", "torch_checkpointing==0.1.1",
)  # fmt: skip


@pytest.mark.overlay
def test_llama_by_the_override() -> None:
    said = run("-m", "tests.dropins.torchtitan_program", over=overlay(*PACKAGES))
    assert said.endswith("torchtitan over FDATTN\n")
