"""Conversations on a small random model: the prefix cache's reuse, dropped turns, seeds."""

from __future__ import annotations

import pytest

from tests.engine.tiny import greedy, random_model
from torch_fdattn.engine import LLM, Chat, NgramSpeculation, PromptError, SamplingParams
from torch_fdattn.models import Tokenizer

ROLES = {"system": 60, "user": 61, "assistant": 62}


class Numbers(Tokenizer):
    """Texts are numbers with a space after each; a message is its role's token and its numbers."""

    def encode(self, text, add_special_tokens=True):
        return [int(number) for number in text.split()]

    def decode(self, ids):
        return "".join(f"{i} " for i in ids)

    def id_of(self, token):
        return None

    def chat(self, messages):
        ids = []
        for message in messages:
            ids += [ROLES[message["role"]], *self.encode(message["content"])]
        return [*ids, ROLES["assistant"]]


@pytest.fixture
def model(device):
    return random_model(device)


def chat_of(model, capacity=64, temperature=0, seed=None, **options):
    """Over pages of a token, so that hits of the prefix cache can be counted."""
    llm = LLM(
        model, Numbers(), max_num_seqs=1, max_model_len=capacity, pages=capacity - 1, page_size=1,
        cuda_graph=False, run_ahead=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=4, temperature=temperature, seed=seed)
    return Chat(llm, params=params, **options)


def say(chat, text) -> list[int]:
    return Numbers().encode("".join(chat.reply(text)))


def hits(chat) -> int:
    """Tokens that the prefix cache has given so far."""
    return chat._llm.stats().prefix_hit_tokens


def test_each_turn_follows_from_the_whole_history(model):
    chat = chat_of(model, system="7 7")
    first = say(chat, "1 2 3")
    assert first == greedy(model, [60, 7, 7, 61, 1, 2, 3, 62], 4)
    history = [60, 7, 7, 61, 1, 2, 3, 62, *first, 61, 4, 62]
    assert say(chat, "4") == greedy(model, history, 4)
    assert [message["role"] for message in chat.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip


def test_pieces_come_as_they_are_made(model):
    chat = chat_of(model)
    pieces = chat.reply("1 2 3")
    assert next(pieces).endswith(" ")
    assert chat._llm.stats().generated_tokens == 1
    assert len(list(pieces)) == 3


def test_only_what_is_new_is_computed(model):
    chat = chat_of(model)
    say(chat, "1 2 3")
    assert hits(chat) == 0
    say(chat, "4")
    # 61 1 2 3 62 and three tokens of the reply: its last one was not stored
    assert hits(chat) == 8


def test_reset_keeps_a_beginning_that_comes_again(model):
    chat = chat_of(model, system="7 7 7")
    first = say(chat, "1 2 3")
    say(chat, "4")
    chat.reset()
    assert [message["role"] for message in chat.messages] == ["system"]
    before = hits(chat)
    assert say(chat, "1 2 3") == first
    assert (
        hits(chat) - before == 8
    )  # even the question was the same: its last token is computed anew
    chat.reset()
    before = hits(chat)
    say(chat, "9")
    assert hits(chat) - before == 5  # 60 7 7 7 61, before 9 62


def test_a_reply_cut_short_is_forgotten(model):
    chat = chat_of(model)
    pieces = chat.reply("1 2 3")
    next(pieces), next(pieces)
    pieces.close()
    assert chat.messages == []
    assert chat._llm.stats().pages_used == 0
    assert say(chat, "1 2 5") == greedy(model, [61, 1, 2, 5, 62], 4)


def test_a_reply_that_is_stopped_is_part_of_the_history(model):
    chat, answers = chat_of(model), iter([False, True])
    said = Numbers().encode("".join(chat.reply("1 2 3", lambda: next(answers))))
    assert said == greedy(model, [61, 1, 2, 3, 62], 4)[:2]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    history = [61, 1, 2, 3, 62, *said, 61, 5, 62]
    assert say(chat, "5") == greedy(model, history, 4)


def test_the_oldest_turns_are_dropped(model):
    notes = []
    chat = chat_of(model, capacity=22, system="7", note=notes.append)
    said = []
    for text in ("1", "2", "3"):
        said.append(say(chat, text))
    assert len(notes) == 1
    assert "dropped the oldest turn" in notes[0]
    assert chat.messages[0] == {"role": "system", "content": "7"}
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["2", "3"]
    history = [60, 7, 61, 2, 62, *said[1], 61, 3, 62]
    assert said[2] == greedy(model, history, 4)
    say(chat, "8 " * 14)  # nothing else fits beside it: 18 and 4
    assert "dropped the oldest 2 turns" in notes[1]


def test_a_turn_that_never_fits_is_refused_and_forgotten(model):
    chat = chat_of(model, capacity=17)
    message = "prompt of 22 tokens and a reply of up to 4 take 26 tokens, the context has 17"
    with pytest.raises(PromptError, match=message):
        say(chat, "8 " * 20)
    assert chat.messages == []
    assert say(chat, "1") == greedy(model, [61, 1, 62], 4)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 5},
        {"page_size": 64, "enable_prefix_caching": False},
        {"page_size": 2, "run_ahead": True, "speculation": NgramSpeculation(shortest=1)},
    ],
    ids=["pages of 5", "one page", "n-grams"],
)
def test_the_engine_decides_nothing_of_what_is_said(options, model):
    llm = LLM(model, Numbers(), max_num_seqs=1, pages=64 // options["page_size"], **options)
    chat = Chat(llm, params=SamplingParams(max_tokens=4, temperature=0))
    first = say(chat, "1 2 3")
    assert say(chat, "4") == greedy(model, [61, 1, 2, 3, 62, *first, 61, 4, 62], 4)
    chat.reset()
    assert say(chat, "1 2 3") == first
    assert llm.stats().pages_used == 0


def test_pages_limit_the_context_too(model):
    llm = LLM(model, Numbers(), max_num_seqs=1, pages=4, page_size=3, cuda_graph=False)
    with pytest.raises(PromptError, match="take 14 tokens, the context has 13"):
        say(Chat(llm, params=SamplingParams(max_tokens=4, temperature=0)), "8 " * 8)


def test_seeds_decide_the_whole_conversation(model):
    def talk(seed):
        chat = chat_of(model, temperature=2.0, seed=seed)
        return say(chat, "1"), say(chat, "1")

    assert talk(3) == talk(3) != talk(4)
    assert talk(3)[0] != talk(3)[1]


def test_what_no_conversation_can_be_held_with(model):
    bare, llm = LLM(model, pages=4), LLM(model, Numbers(), pages=4)
    with pytest.raises(ValueError, match="llm must have a tokenizer, got one without"):
        Chat(bare)
    for params in (SamplingParams(n=2), SamplingParams(max_tokens=None)):
        with pytest.raises(
            ValueError, match="params must ask for one completion with max_tokens, got n="
        ):
            Chat(llm, params=params)
