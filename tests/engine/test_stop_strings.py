"""Text as it comes: stop strings across the borders of tokens, and what is held back for them."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.engine.tiny import random_model
from tests.tiny_model import save_tiny_model
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.engine.detokenizer import TextStream, held_back
from torch_fdattn.models import load_tokenizer


class Pieces:
    """A tokenizer whose token i is the i-th of some texts; bytes of characters in two tokens come with the second one."""

    def __init__(self, texts):
        self._texts = texts

    def stream(self, prompt):
        return self

    def push(self, token):
        return self._texts[token]

    def flush(self):
        return ""


def run(texts, stop, min_tokens=0):
    """(texts shown after each token, the last with what was held back; whether it came to a stop string)."""
    stream, shown = TextStream(Pieces(texts), [], stop), []
    for i in range(len(texts)):
        if stream.push(i, i + 1 >= min_tokens):
            return [*shown, stream.text], True
        shown.append(stream.text)
    stopped = stream.flush()
    return [*shown, stream.text], stopped


@pytest.mark.parametrize(
    ("texts", "stop", "shown", "stopped"),
    [
        (["ab", "cd"], (), ["ab", "abcd", "abcd"], False),
        (["ab", "cd"], ("bc",), ["a", "a"], True),
        (["a", "b", "c"], ("abc",), ["", "", ""], True),
        (["a", "b", "d"], ("abc",), ["", "", "abd", "abd"], False),
        (["a", "b"], ("abc",), ["", "", "ab"], False),
        (["xaab"], ("ab", "aab"), ["x"], True),
        (["ba", "bab", "c"], ("babc",), ["", "ba", "ba"], True),
        (["one. ", "two\n", "\nthree"], ("\n\n",), ["one. ", "one. two", "one. two"], True),
        (["", "", "x"], ("x",), ["", "", ""], True),
    ],
)
def test_what_is_shown(texts, stop, shown, stopped):
    assert run(texts, stop) == (shown, stopped)


def test_text_of_the_first_tokens_is_no_part_of_a_stop_string():
    assert run(["a", "b", "c", "b"], ("b",), min_tokens=3) == (["a", "ab", "abc", "abc"], True)
    assert run(["a", "b", "c"], ("bc",), min_tokens=3) == (["a", "ab", "abc", "abc"], False)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_texts_stop_where_the_whole_text_does(seed):
    draw = random.Random(seed)
    texts = ["".join(draw.choices("ab", k=draw.randrange(4))) for _ in range(30)]
    stop = tuple("".join(draw.choices("ab", k=draw.randrange(4, 9))) for _ in range(3))
    shown, stopped = run(texts, stop)
    text = "".join(texts[: len(shown)])
    # The first token at which any string is there ends it; of those that are, the first in the text.
    places = [at for x in stop if (at := text.find(x)) >= 0]
    assert stopped == bool(places)
    assert shown[-1] == (text[: min(places)] if places else text)
    for short, long in itertools.pairwise(shown):
        assert long.startswith(short)  # nothing that was shown is taken back


def test_what_is_held_back():
    assert held_back("xa", ("ab", "aab")) == 1
    assert held_back("xaa", ("ab", "aab")) == 2
    assert held_back("xab", ("ab",)) == 0  # not the whole of one: that would have ended it
    assert held_back("abc", ()) == 0


@pytest.fixture
def tokenizer(tmp_path):
    """A space and a character a token."""
    return load_tokenizer(str(save_tiny_model(tmp_path)))


def test_the_engine_stops_at_strings(device, tokenizer):
    llm = LLM(random_model(device), tokenizer, max_model_len=64, pages=32, cuda_graph=False)
    greedy = SamplingParams(temperature=0, max_tokens=20)
    (plain,) = llm.generate(["aĀā"], greedy)
    text, tokens = plain.outputs[0].text, plain.outputs[0].token_ids
    assert text == " " + tokenizer.decode(tokens)  # which drops the first one's space
    assert len(text) == 40
    stop = text[5:10]  # of three tokens
    at = text.index(stop)
    llm.add_request("a", "aĀā", SamplingParams(temperature=0, max_tokens=20, stop=(stop, "zzz")))
    shown = []
    while llm.has_unfinished:
        shown += [x.outputs[0] for x in llm.step()]
    assert shown[-1].text == text[:at]
    assert shown[-1].token_ids == tokens[: (at + len(stop) + 1) // 2]
    assert shown[-1].finish_reason == "stop"
    for output in shown:
        assert text[:at].startswith(output.text)
    # A stop token's text is not shown, the token is.
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(tokens[4],))
    (output,) = llm.generate(["aĀā"], params)
    first = tokens.index(tokens[4])
    assert output.outputs[0].text == text[: 2 * first]
    assert output.outputs[0].token_ids == tokens[: first + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_abort_hands_out_what_was_held_back(device, tokenizer):
    llm = LLM(random_model(device), tokenizer, max_model_len=64, pages=32, cuda_graph=False)
    (plain,) = llm.generate(["aĀā"], SamplingParams(temperature=0, max_tokens=20))
    text = plain.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=20, stop=(text[:10] + "zzz",))
    llm.add_request("a", "aĀā", params)
    for _ in range(4):
        outputs = llm.step()
    assert outputs[0].outputs[0].text == ""  # all of it may yet become the stop string
    completion = llm.abort("a").outputs[0]
    tokens = completion.token_ids
    assert 0 < len(tokens) < 20
    assert completion.text == " " + tokenizer.decode(tokens)
    assert completion.finish_reason == "abort"
    # A stop string that only the end completes, by an incomplete character, is cut off; the reason stays.
    stream = TextStream(Ends(), [], ("b\N{REPLACEMENT CHARACTER}",))
    assert not stream.push(0)
    assert stream.flush()
    assert stream.text == "a"


class Ends(Pieces):
    """ "ab", and the beginning of a character."""

    def __init__(self):
        super().__init__(["ab"])

    def flush(self):
        return "\N{REPLACEMENT CHARACTER}"


def test_logprobs_have_texts(device, tokenizer):
    llm = LLM(random_model(device), tokenizer, max_model_len=64, pages=32, cuda_graph=False)
    (output,) = llm.generate(["aĀ"], SamplingParams(max_tokens=3, logprobs=1))
    for listed in output.outputs[0].logprobs:
        assert {token: tokenizer.decode([token]) for token in listed} == {
            token: entry.text for token, entry in listed.items()
        }
