"""Conversations on a small random model: the cache's reuse, dropped turns, seeds."""

from __future__ import annotations

import pytest

from tests.engine.tiny import greedy, random_model
from torch_fdattn.engine import Chat, Engine, PromptError, Sampling
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


def chat_of(model, capacity=64, **options):
    # So that passes can be counted, by hooks of the model.
    engine = Engine(model, capacity=capacity, cuda_graph=False, fused=False)
    return Chat(engine, Numbers(), max_new_tokens=4, **options)


def say(chat, text) -> list[int]:
    return Numbers().encode("".join(chat.reply(text)))


def prefilled(model) -> list[int]:
    """How many tokens each pass over the model had, of those with more than one."""
    widths = []
    model.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1]))
    return widths


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
    pieces = chat_of(model).reply("1 2 3")
    calls = prefilled(model)
    assert next(pieces).endswith(" ")
    assert len(calls) == 1
    assert len(list(pieces)) == 4  # three tokens more, and what was held back: nothing


def test_only_what_is_new_is_prefilled(model):
    chat = chat_of(model)
    widths = prefilled(model)
    say(chat, "1 2 3")
    say(chat, "4")
    # 61 1 2 3 62 and three steps; then the last token of the reply, which was not stored, and 61 4 62
    assert widths == [5, 1, 1, 1, 4, 1, 1, 1]


def test_reset_keeps_a_beginning_that_comes_again(model):
    chat = chat_of(model, system="7 7 7")
    first = say(chat, "1 2 3")
    say(chat, "4")
    chat.reset()
    assert [message["role"] for message in chat.messages] == ["system"]
    widths = prefilled(model)
    assert say(chat, "1 2 3") == first
    assert widths[0] == 1  # even the question was the same: its last token is computed anew
    chat.reset()
    widths.clear()
    say(chat, "9")
    assert widths[0] == 2  # 9 62, after 60 7 7 7 61


def test_a_reply_cut_short_leaves_a_usable_cache(model):
    chat = chat_of(model)
    pieces = chat.reply("1 2 3")
    next(pieces), next(pieces)
    pieces.close()
    assert chat.messages == []
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
    chat = chat_of(model, capacity=21, system="7", note=notes.append)
    said = []
    for text in ("1", "2", "3"):
        said.append(say(chat, text))
    assert len(notes) == 1
    assert "dropped the oldest turn" in notes[0]
    assert chat.messages[0] == {"role": "system", "content": "7"}
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["2", "3"]
    history = [60, 7, 61, 2, 62, *said[1], 61, 3, 62]
    assert said[2] == greedy(model, history, 4)
    say(chat, "8 " * 14)  # nothing else fits beside it: 18 and 3
    assert "dropped the oldest 2 turns" in notes[1]


def test_a_turn_that_never_fits_is_refused_and_forgotten(model):
    chat = chat_of(model, capacity=16)
    message = "prompt of 22 tokens and a reply of up to 4 need 25 places, the cache has 16"
    with pytest.raises(PromptError, match=message):
        say(chat, "8 " * 20)
    assert chat.messages == []
    assert say(chat, "1") == greedy(model, [61, 1, 62], 4)


def test_seeds_decide_the_whole_conversation(model):
    def talk(seed):
        chat = chat_of(model, sampling=Sampling(temperature=2.0, seed=seed))
        return say(chat, "1"), say(chat, "1")

    assert talk(3) == talk(3) != talk(4)
