"""Chat templates that would take gigabytes or never end are refused; what they may take is bounded."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from torch_fdattn.models import ModelError, template_limits
from torch_fdattn.models.chat_template import render

pytest.importorskip("jinja2", reason="needs the package jinja2")

USER = {"role": "user", "content": "a\tb" * 1000}
DOUBLED = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)
LARGE = {
    "percent": "{{ '%2000000000s' % 'a' }}",
    "percent with a width given": "{{ '%*s' % (2000000000, 'a') }}",
    "percent of bytes": "{{ 'x%2000000000s'.encode() % 'a'.encode() }}",
    "a precision": "{{ '%.2000000000f' % 1 }}",
    "times": "{{ 'a' * 2000000000 }}",
    "times of a list": "{{ (2000000000 * [1])|length }}",
    "a power": "{{ 10 ** 10000000000 }}",
    "products": "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "format": "{{ '{:2000000000}'.format('a') }}",
    "format with a width given": "{{ '{:{}}'.format('a', 2000000000) }}",
    "format_map": "{{ '{a:2000000000}'.format_map({'a': 1}) }}",
    "the filter format": "{{ '%2000000000s'|format('a') }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "zfill": "{{ 'a'.zfill(2000000000) }}",
    "expandtabs": "{{ messages[0].content.expandtabs(2000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "join": "{{ ('b' * 1000000).join(['a'] * 1000000) }}",
    "join of an iterator": "{{ ('b' * 1000000).join(range(100000)|map('string')) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "to_bytes": "{{ (1).to_bytes(2000000000, 'big')|length }}",
    "the filter center": "{{ 'a'|center(2000000000) }}",
    "the filter center, mapped": "{{ ['a']|map('center', 2000000000)|list }}",
    "the filter indent": "{{ ('\\n' * 1000000)|indent(1000000) }}",
    "the filter replace": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "the filter join": "{{ (['a'] * 1000000)|join('b' * 1000000) }}",
    "the filter tojson": "{{ [1]|tojson(indent=2000000000) }}",
    "the filter batch": "{{ [1]|batch(2000000000, 1)|list|length }}",
    "the filter wordwrap": "{{ ('a' * 1000000)|wordwrap(1, true, 'b' * 1000000) }}",
    "the filter round": "{{ 1.5|round(1000000000) }}",
    "the filter sum": "{{ ([[1] * 1000] * 100000)|sum(start=[])|length }}",
    "the date": "{{ strftime_now('%2000000000d') }}",
    "doubled by +": DOUBLED.replace("STEP", "ns.x + ns.x"),
    "doubled by ~": DOUBLED.replace("STEP", "ns.x ~ ns.x"),
    "doubled by a filter": DOUBLED.replace("STEP", "[ns.x, ns.x]|join"),
    "doubled by format": DOUBLED.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "doubled by a block": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "slices": "{% set ns = namespace(x=[]) %}{% set t = 'a' * 10000000 %}{% for i in range(1000) %}{% set ns.x = ns.x + [t[1:]] %}{% endfor %}",
}  # fmt: skip
LOOPS = {
    "doubled by a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}ab{% endmacro %}{{ m(60) }}",
    "a doubled list as text": DOUBLED.replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    "a doubled list as JSON": DOUBLED.replace("STEP", "[ns.x, ns.x]") + "{{ ns.x|tojson }}",
    "a doubled list by ~": DOUBLED.replace("STEP", "[ns.x, ns.x]") + "{{ ns.x ~ 'a' }}",
    "loops in loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "with loop": "{% for a in range(100000) %}{% for b in range(100000) %}{{ loop.index }}{% endfor %}{% endfor %}",
    "a loop of itself": "{% for a in range(99999) recursive %}{% if loop.depth < 4 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "a filter in a loop": "{% for a in range(100000) %}{{ range(100000)|sort|length }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large_values_are_refused_before_they_are_made(name):
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"the chat template must take at most .* shorten the"):
            render(LARGE[name], [USER], {})
        assert tracemalloc.get_traced_memory()[1] < 2**29
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", LOOPS)
def test_loops_end(name, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_STEPS", 100_000)
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 1)
    begin = time.thread_time()
    with pytest.raises(ModelError, match=r"the chat template must take at most \d+ (steps|seconds|char)"):  # fmt: skip
        render(LOOPS[name], [USER], {})
    assert time.thread_time() - begin < 5


def test_the_default_limits_end_loops():
    with pytest.raises(ModelError, match="must take at most 4000000 steps"):
        render(LOOPS["loops in loops"], [USER], {})


def test_a_long_conversation_is_rendered():
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m.content|trim ~ eos_token }}"
        "{% if loop.index0 < messages|length - 1 %}{{ m.content[:1] }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a" * 400}] * 20_000
    text = render(template, messages, {"eos_token": "</s>"})
    assert text.startswith("<|user|>aaa")
    assert text.count("</s>") == 20_000
    one = render(template, [{"role": "user", "content": "a" * 2**23}], {"eos_token": "</s>"})
    assert len(one) == 2**23 + 12
    mixed = "{{ messages[0].content|replace('a', 1) }}{{ messages[0].content.replace('a', 'b') }}"
    text = render(mixed, [{"role": "user", "content": "a" * 50_000}], {})
    assert text == "1" * 50_000 + "b" * 50_000
