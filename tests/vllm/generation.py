"""Greedy texts compared: equal until the reference itself is undecided, and teacher-forced from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

#: A difference of the reference's two largest logits below which fp32 may choose either.
TIE = 1e-3


class Text(NamedTuple):
    """A prompt and its greedy continuation; gaps: at each token, the largest logit less the second one."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


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
