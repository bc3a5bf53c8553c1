"""Renders chat templates of Hugging Face models in a sandbox: a template is a program that a stranger wrote.

jinja2's sandbox keeps it from files and attributes, but not from endless loops or from gigabytes. So chat_template.py
runs this file as a process of its own, with limits of memory and of processor time for each request:

| line | is |
|---|---|
| first from the parent | {"source", "special", "now"}: the template, its special tokens, the time as ISO text |
| each later one | {"messages", "tools", "prefixes", "mark"} |
| each answer | {"texts"}, one text for each of `prefixes`, or {"error", "kind"}: kind "template" or "record" |

A prefix is [how many messages, whether an answer is asked for]. Beside jinja2 it imports the standard library alone: it
must start fast, and jinja2 belongs to the extra `tuning`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import IO, Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 1 << 30  # address space of the process
REQUEST_CPU_LIMIT_S = 20.0  # processor time of one request; after it SIGPROF ends the process
LONGEST_TEXT = 64 << 20  # characters of one conversation

# Name of the template variable whose text is written before and after each generation block; if unset, nothing is.
GENERATION_MARK = "agora_generation_mark"

# What compiling and rendering may raise: a template's own error, or the error of an expression in it.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class GenerationBlocks(Extension):
    """jinja2 extension: the block {% generation %} ... {% endgeneration %} around what the assistant wrote.

    A block renders as its content, with the value of the template variable GENERATION_MARK before and after it.
    """

    tags = {"generation"}  # noqa: RUF012, as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark_block", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark_block(self, context: Context, caller: Callable[[], str]) -> str:
        mark = str(context.get(GENERATION_MARK, ""))
        return mark + caller() + mark


class PublicNamespace(Namespace):
    """The `namespace` of templates. A template that sets a name with a leading underscore in it gets SecurityError.

    Such names could lead out of the sandbox.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def compile_template(source: str, now: datetime) -> Template:
    """Compiles a template in jinja2's immutable sandbox, with the blocks, functions and filters of Hugging Face.

    These are {% generation %}, raise_exception, strftime_now, tojson and loop controls. now: the time that strftime_now
    formats. Raises one of TEMPLATE_ERRORS for a malformed template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    environment.globals["namespace"] = PublicNamespace
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _answers(requests: IO[str]) -> Iterator[dict[str, Any]]:
    opening = json.loads(requests.readline())
    try:
        template = compile_template(opening["source"], datetime.fromisoformat(opening["now"]))
    except TEMPLATE_ERRORS as error:
        yield {"error": str(error), "kind": "template"}
        return
    yield {"texts": []}
    for line in requests:
        # Processor time, so that a busy machine does not make a record malformed.
        signal.setitimer(signal.ITIMER_PROF, REQUEST_CPU_LIMIT_S)
        yield _render(template, opening["special"], json.loads(line))


def _render(template: Template, special: dict[str, str], request: dict[str, Any]) -> dict[str, Any]:
    try:
        texts = [
            template.render(
                {**special, GENERATION_MARK: request["mark"]},
                messages=request["messages"][:count],
                tools=request["tools"] or None,
                add_generation_prompt=asks,
            )
            for count, asks in request["prefixes"]
        ]
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory", "kind": "template"}
    except TEMPLATE_ERRORS as error:
        return {"error": str(error), "kind": "record"}
    if any(len(text) > LONGEST_TEXT for text in texts):
        return {"error": f"it makes more than {LONGEST_TEXT >> 20} Mi characters of it", "kind": "template"}
    return {"texts": texts}


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for answer in _answers(sys.stdin):
        try:
            line = json.dumps(answer)
        except MemoryError:
            line = json.dumps({"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory", "kind": "template"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(line, flush=True)


if __name__ == "__main__":
    _main()
