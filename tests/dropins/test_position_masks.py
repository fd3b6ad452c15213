"""Masks by layer type that are made of position_ids. (Over ranks: `tests/dist/test_compiled_transformers.py`.)"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torch_fdattn.dropins.transformers import masks_of_positions

masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is the reference here")  # fmt: skip

by_position = pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"),
    reason="transformers before 5.23 compares indices of local tokens",
)
IDS = torch.zeros(2, 8, dtype=torch.int64)


def model_of(**config):
    return SimpleNamespace(
        config=SimpleNamespace(_attn_implementation="eager", is_causal=True, **config),
        dtype=torch.float16,
    )


@by_position
def test_masks_of_every_layer_type() -> None:
    """Numbers in the model's dtype; positions in place of indices: the second half begins again."""
    kinds = ["sliding_attention", "full_attention", "chunked_attention", "full_attention"]
    model = model_of(layer_types=kinds, sliding_window=3, attention_chunk_size=2)
    masks = masks_of_positions(model, IDS, torch.arange(8)[None] % 4)
    index = torch.arange(8)
    q, k = (index % 4)[:, None], index % 4
    causal = (k <= q) & (index[:, None] // 4 == index // 4)
    expected = {
        "full_attention": causal,
        "sliding_attention": causal & (k > q - 3),
        "chunked_attention": causal & (k // 2 == q // 2),
    }
    assert masks.keys() == expected.keys()
    for kind, mask in masks.items():
        assert mask.dtype == torch.float16
        assert torch.equal(mask == 0, expected[kind].expand(2, 1, 8, 8))


@by_position
@pytest.mark.parametrize(
    ("config", "said"), [({}, "got none in layer_types"), (dict(layer_types=["full_attention", "conv"]), "got conv")]
)  # fmt: skip
def test_other_layers_are_refused(config, said) -> None:
    with pytest.raises(NotImplementedError, match=f"model must have layers of full_attention.*{said}"):  # fmt: skip
        masks_of_positions(model_of(**config), IDS, torch.arange(8)[None])


def test_transformers_that_compares_indices_is_refused(monkeypatch) -> None:
    monkeypatch.delattr(masking_utils, "remap_positions_for_packed_sequence", raising=False)
    with pytest.raises(NotImplementedError, match=r"needs transformers >= 5\.23"):
        masks_of_positions(model_of(layer_types=["full_attention"]), IDS, torch.arange(8)[None])
