"""Chat templates, rendered as transformers renders them: its sandbox, extensions, filters and variables.

A template is a program of whoever published the model: it runs in jinja2's immutable sandbox. What is
rendered is tested to equal transformers' own text (tests/models/test_chat_templates.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

from torch_fdattn.models.errors import ModelError, require

#: Variables that `render` gives a template itself, besides the special tokens.
GIVEN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def render(
    template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """The conversation as text, up to where the assistant's next answer begins.

    special_tokens: bos_token, eos_token …, variables of the template.
    tools: functions that the model may call, each as OpenAI's API describes one.
    variables: more of the template's own, as enable_thinking.
    """
    if not messages:
        raise ModelError("messages must hold at least one message, got none")
    for message in messages:
        if not isinstance(message, Mapping):
            raise ModelError(
                "messages must be mappings with a role and a content, got "
                f"{type(message).__name__}: write [{{'role': 'user', 'content': …}}]"
            )
    # Templates tell a key that is missing from one that is given, and know no null contents.
    given = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    with _refusals():
        return _compiled(template).render(
            messages=given,
            tools=tools,  # `is not none` and `is defined` are both asked of these
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
            **(variables or {}),
        )


def template_variables(template: str) -> frozenset[str]:
    """Names that the template reads and does not only set itself, those that `render` always gives among them."""
    meta = require("jinja2.meta", "A chat template")
    with _refusals():
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # a template may raise anything
        cause = " ".join(str(error).split())
        raise ModelError(f"the chat template refused the messages: {cause}") from None


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> Any:
    jinja2 = require("jinja2", "A chat template")
    sandbox = require("jinja2.sandbox", "A chat template")
    extension = require("jinja2.ext", "A chat template")

    class Generation(extension.Extension):
        """`{% generation %}…{% endgeneration %}` marks an answer for training: text like any other."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)  # what is set within stays within

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore: they lead out of the sandbox."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *rest = args
            values = dict(*rest, **kwargs)
            for name in values:
                check(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"names of a namespace must not begin with an underscore, got {name!r}"
            )

    class MakeDict:
        """`dict(…)` and `dict.fromkeys(…)`, and nothing else of the type."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict:
            return dict.fromkeys(*args)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extension.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "namespace": Namespace,
        "dict": MakeDict(),
    }
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """jinja2's own filter escapes HTML and sorts keys: models have not seen that."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
