"""Chat templates, rendered as transformers renders them: its sandbox, extensions, filters and variables.

A template is a program of whoever published the model: it runs in jinja2's immutable sandbox, within limits of its own
(`template_limits.py`). What is rendered is tested to equal transformers' own text (tests/models/test_chat_templates.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

from torch_fdattn.models import template_limits as limits
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
    values = {
        "messages": given,
        "tools": tools,  # `is not none` and `is defined` are both asked of these
        "documents": None,
        "add_generation_prompt": True,
        **special_tokens,
        **(variables or {}),
    }
    with _refusals():
        return limits.within_limits(lambda: _compiled(template).render(values))


def template_variables(template: str) -> frozenset[str]:
    """Names that the template reads and does not only set itself, those that `render` always gives among them."""
    meta = require("jinja2.meta", "A chat template")
    with _refusals():
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ImportError, ModelError):
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

    class BoundedNodes(jinja2.visitor.NodeTransformer):
        """Loops that count their passes; `~` and slices that count their characters."""

        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            counted = filtered(jinja2.nodes.Const(None), "_step", node)
            node.body.insert(0, jinja2.nodes.ExprStmt(counted).set_lineno(node.lineno))
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return filtered(jinja2.nodes.List(node.nodes), "_concat", node)

        def visit_Getitem(self, node: Any) -> Any:
            self.generic_visit(node)
            is_slice = isinstance(node.arg, jinja2.nodes.Slice)
            return filtered(node, "_sized", node) if is_slice else node

    def filtered(value: Any, name: str, like: Any) -> Any:
        node = jinja2.nodes.Filter(value, name, [], [], None, None)
        return node.set_environment(like.environment).set_lineno(like.lineno)

    class BoundedEnvironment(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"%", "*", "**", "+"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            limits.check_binary(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __function: Any, *args: Any, **named: Any) -> Any:
            given = list(args)
            limits.check_call(__function, given, named)
            call = sandbox.ImmutableSandboxedEnvironment.call
            return limits.sized(call(__self, __context, __function, *given, **named))

        def _parse(self, *args: Any) -> Any:
            return BoundedNodes().visit(super()._parse(*args))

    @jinja2.pass_eval_context
    def concat(context: Any, parts: list[Any]) -> str:
        limits.check_parts(parts)
        joined = jinja2.runtime.markup_join if context.autoescape else jinja2.runtime.str_join
        return joined(parts)

    @jinja2.pass_context  # so that it is not computed in advance
    def step(context: Any, _: None) -> None:
        limits.step()

    def strftime_now(layout: str) -> str:
        limits.check_percent(layout)
        return datetime.now().strftime(layout)

    environment = BoundedEnvironment(
        finalize=limits.check_output,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, extension.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    for name, function in environment.filters.items():
        environment.filters[name] = limits.bounded_filter(name, function)
    environment.filters |= {"_step": step, "_concat": concat, "_sized": limits.sized}
    environment.concat = limits.bounded_concat
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
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
