"""Greedy texts compared: equal until the reference itself is undecided, and teacher-forced from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

#: A difference of the reference's two largest logits below which fp32 may choose either.
TIE = 1e-3


class Text(NamedTuple):
    """A prompt and its greedy continuation; gaps: at each token, the largest logit less the second one."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


def greedy(model: torch.nn.Module, prompts: Sequence[list[int]], tokens: int) -> list[Text]:
    """By a model of transformers, a prompt at a time."""
    texts = []
    for prompt in prompts:
        answer = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        top = torch.cat(answer.logits).topk(2).values
        written = answer.sequences[0, len(prompt) :].tolist()
        texts.append(Text(prompt, written, (top[:, 0] - top[:, 1]).tolist()))
    return texts


class Counted:
    """vLLM's engine step by step: the texts, and the steps that it took."""

    def __init__(self, llm) -> None:
        self.engine, self.steps, self.requests = llm.llm_engine, 0, 0

    def generate(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        names = []
        for prompt, count in zip(prompts, counts, strict=True):
            names.append(f"request {self.requests}")
            self.requests += 1
            sampling = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            self.engine.add_request(names[-1], {"prompt_token_ids": prompt}, sampling)
        answers = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            self.steps += 1
        return [answers[name] for name in names]


def check_texts(
    texts: Sequence[Text], generate: Callable[[list[list[int]], list[int]], list[list[int]]]
) -> int:
    """Raises where another token comes than the reference's, which was no tie; returns how many ties differed.

    generate(prompts, counts): the counts[i] tokens that continue prompts[i], of all prompts in one batch.
    """
    left, ties = [(text, 0) for text in texts], 0
    while left:
        prompts = [text.prompt + text.tokens[:start] for text, start in left]
        answers = generate(prompts, [len(text.tokens) - start for text, start in left])
        rest = []
        for (text, start), answer in zip(left, answers, strict=True):
            expected = text.tokens[start:]
            assert len(answer) == len(expected)
            at = next((i for i, x in enumerate(answer) if x != expected[i]), None)
            if at is None:
                continue
            place = start + at
            assert text.gaps[place] < TIE, (
                f"token {place} must be {expected[at]}, got {answer[at]}; the reference's logits differ by "
                f"{text.gaps[place]}: {text.prompt}"
            )
            ties += 1
            if place + 1 < len(text.tokens):
                rest.append((text, place + 1))
        left = rest
    return ties
