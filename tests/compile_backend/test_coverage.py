"""A dozen cases of the coverage table: all sites rewritten, with the masks that they have, and the same numbers."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.compile_backend.coverage import MODELS, Case

PADDED = "causal and explicit padding (mask-data)"
QUICK = [("Llama", "sdpa", "padded", {PADDED: 2}), ("Llama", "eager", "decode", {"lengths": 2})]
SLOW = [
    ("Llama", "eager", "training, padded", {PADDED: 2}),
    ("Llama", "sdpa", "decode, padded", {"lengths and explicit padding (mask-data)": 2}),
    ("Qwen3", "sdpa", "prefill", {"causal": 2}),
    (
        "Mistral",
        "eager",
        "padded",
        {"causal and window (5, 0) and explicit padding (mask-data)": 2},
    ),
    ("Gemma2", "eager", "prefill", {"causal and window (5, 0)": 1, "causal": 1}),
    ("GptOss", "eager", "prefill", {"causal and window (5, 0)": 1, "causal": 1}),
    ("Llama4", "eager", "prefill", {"causal and chunks of 6": 3, "causal": 1}),
    ("Llama4", "eager", "decode", {"window (2, all)": 3, "lengths": 1}),
    ("GPT2", "eager", "training, padded", {PADDED: 2}),
    ("Bert", "sdpa", "padded", {"explicit padding (mask-data)": 2}),
    ("ViT", "eager", "prefill", {}),
    ("Whisper", "sdpa", "prefill", {"causal": 1}),
]


@pytest.mark.parametrize(
    ("name", "attention", "use", "masks"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_models(name, attention, use, masks):
    (model,) = (model for model in MODELS if model.name == name)
    result = Case(model, attention, use).run()
    assert not result.report.left, str(result.report)
    assert len(result.report) >= 2
    if name == "ViT" and seems_exported():
        masks = {"full": 2}  # made all the same, and found to hide nothing
    assert result.masks == masks
    assert result.error < 1e-5
    assert not result.repeated


def seems_exported() -> bool:
    """Whether a model that is compiled is told that it is exported, as by Dynamo of torch 2.11.

    Then transformers doesn't leave out masks that hide nothing.
    """
    torch._dynamo.reset()
    told = torch.compile(lambda x: x + int(torch.compiler.is_exporting()), backend="eager")
    return bool(told(torch.zeros(())))
