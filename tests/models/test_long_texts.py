"""Long texts: encoded to the ids of short ones, while other threads run, and after a fork."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from torch_fdattn.models import encoding, load_tokenizer

SOURCES = ("bpe_folder", "bpe_gguf", "llama2_folder")


def _letters(count: int) -> str:
    draw = random.Random(count)
    return "".join(draw.choices("abcdefgh <|end|>\nß€😀", k=count))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("source", SOURCES[:2])
def test_the_ids_of_both_ways_are_the_same(source, special, request, monkeypatch):
    tokenizer = load_tokenizer(request.getfixturevalue(source))
    texts = [_letters(n) for n in (0, 1, 1023, 1024, 5000)] + ["<|end|>" * 300, " " * 2000]
    monkeypatch.setattr(encoding, "_LONG", 10**9)
    expected = [tokenizer.encode(text, special) for text in texts]
    monkeypatch.setattr(encoding, "_LONG", 0)
    assert [tokenizer.encode(text, special) for text in texts] == expected


@pytest.mark.parametrize("source", SOURCES)
def test_other_threads_run_meanwhile(source, request):
    tokenizer = load_tokenizer(request.getfixturevalue(source))
    text = "a1" * 100_000
    tokenizer.encode(text)  # the library's threads begin
    took = []

    def run() -> None:
        begin = time.monotonic()
        tokenizer.encode(text)
        took.append(time.monotonic() - begin)

    worker = threading.Thread(target=run)
    longest, last = 0.0, time.monotonic()
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    assert took[0] > 0.01, "too short a text to measure"
    assert longest < took[0] / 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_long_texts_after_a_fork(bpe_folder):
    tokenizer, text = load_tokenizer(bpe_folder), _letters(5000)
    expected = tokenizer.encode(text)
    if (child := os.fork()) == 0:
        os._exit(0 if tokenizer.encode(text) == expected else 1)
    end = time.monotonic() + 20
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child waits for threads that it does not have")
        time.sleep(0.01)
    assert done[1] == 0


def test_spaces_before_a_token_that_takes_them(sentencepiece_model):
    """In time proportional to their number; it was to its square, 0.4 seconds of 8,000."""
    added = {"<mask>": encoding.AddedToken(500, lstrip=True)}
    tokenizer = encoding.SentencePieceTokenizer(sentencepiece_model, "x", added)
    begin = time.thread_time()
    assert tokenizer.encode(" " * 100_000 + "<mask>", False) == [500]
    assert len(tokenizer.encode(" " * 100_000, False)) > 1
    assert time.thread_time() - begin < 5
