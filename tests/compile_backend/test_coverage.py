"""A dozen cases of the coverage table: all sites rewritten, with the masks that they have, and the same numbers."""

import pytest

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
    assert result.masks == masks
    assert result.error < 1e-5
