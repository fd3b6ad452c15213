"""Texts, a conversation and its template, and GGUF files that hold a tokenizer."""

from __future__ import annotations

from tests.models.hf_models import reference, write_gguf

TEXTS = [
    "The capital of France is",
    "Hello 12345, wörld! 😀 👩‍👩‍👧 ça va？",
    "  leading and   inner spaces \n\n\ttabs\r\n",
    "def f(x):\n    return x**2  # naïve",
    "I'm you'll THEY'VE 3.14159 2024-05-06",
    "日本の首都は東京です。",
    "",
    " ",
]


TRAINING = [*TEXTS, "the quick brown fox jumps over the lazy dog 0123456789 2024 2025"] * 4


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b> & 2+2?"},
]


TEMPLATE = (
    "{%- for message in messages %}{% if message.role == 'robot' %}"
    "{{ raise_exception('no robots') }}{% endif %}\n"
    "    {%- if loop.first %}{{ bos_token }}{% endif %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_tokenizer_gguf(path, fields) -> None:
    write_gguf(path, reference("llama2"), fields=fields)
