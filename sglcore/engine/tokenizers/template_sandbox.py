"""The sandbox for a checkpoint's chat template: no code, no Python attributes, and a limit on all
work.

A template counts its steps (loop iterations, calls, filters) and the characters it makes; above a
limit it ends with a TemplateLimit that states the limit. The counts belong to the thread that
renders.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from string import Formatter
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sglcore.engine.tokenizers.template_bounds import Bounds

MAX_WIDTH = 100_000
"""Maximum width of padding, in characters, and maximum length of a repeated text or list."""
MAX_BITS = 4096
"""Maximum bits of a whole number that `*` or `**` computes."""

_WIDE = re.compile(r"(?!0)\d{6,}|[{*]")
"""A width or precision of more than five digits, or one that a value gives."""
_PERCENT = re.compile(r"%(?:\([^()]*\))?[-#0 +]*((?:\*|\d+)?(?:\.(?:\*|\d*))?)[hlL]?(.?)", re.DOTALL)
"""A field of a format for `%`: its width and precision, and its kind, which is "(" if its key has
parentheses."""
_PADS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "round"})
"""Methods and filters whose work grows with a number that they are given."""


class TemplateLimit(TemplateError):
    """A template exceeded a limit; the text states the limit."""


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A compiled template, the names of the variables that it reads, and all its literal text, one
    line for each piece."""

    code: Template
    names: frozenset[str]
    literals: str


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandboxed environment with the functions that chat templates use, and with limits."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"+", "*", "**", "%"})

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"])
        self._bounds = bounds
        self._spent = threading.local()
        self.finalize = self.made
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._bounded("tojson", to_json)
        self.globals.pop("lipsum", None)
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}

    def compiled(self, source: str) -> CompiledTemplate:
        """Return a template whose loops and `~` are counted, with the names of its variables and
        its literal text. Raises jinja2.TemplateError if it cannot be parsed."""
        tree = self.parse(source)
        names = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        counting = _Counting().visit(tree).set_environment(self)
        return CompiledTemplate(self.from_string(counting), names, "\n".join(texts))

    def render(self, template: CompiledTemplate, variables: dict[str, Any]) -> str:
        """Return the text of a template. Raises jinja2.TemplateError, also for errors in its
        expressions, and TemplateLimit."""
        self._spent.steps = self._spent.made = 0
        parts: list[str] = []
        size = 0
        try:
            for part in template.code.generate(variables):
                parts.append(part)
                size += len(part)
                if size > self._bounds.output:
                    raise TemplateLimit(f"it makes more than {self._bounds.output} characters")
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from None
        return "".join(parts)

    def turns(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop, and count each as a step. Raises TemplateLimit."""
        for item in items:
            self._step()
            yield item

    def joined(self, *parts: Any) -> str:
        """Return the texts of `parts` joined (the operator `~`), with the characters counted.
        Raises TemplateLimit."""
        return self.made("".join(map(str, parts)))

    def made(self, value: Any) -> Any:
        """Return the value unchanged, after counting its characters or items. Raises
        TemplateLimit."""
        if isinstance(value, str | bytes | list | tuple):
            self._spent.made += len(value)
            if self._spent.made > self._bounds.made:
                raise TemplateLimit(f"it makes more than {self._bounds.made} characters in all its intermediate values")
        return value

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function for the template; counts the call and its result, and checks the widths
        of padding. Raises TemplateLimit. Overrides Jinja's method."""
        self._step()
        name = obj.__name__ if callable(obj) and not isinstance(obj, LoopContext) and _named(obj) else ""
        if name in _PADS:
            _check_width((*args, *kwargs.values()))
        if isinstance(obj, LoopContext):
            args = tuple(map(self.turns, args))
            kwargs = {name: self.turns(items) for name, items in kwargs.items()}
        return self.made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return Jinja's safe form of a bound `str.format`, None for other values. Raises
        TemplateLimit for a format with wide padding, which could fill the memory. Overrides Jinja's
        method."""
        inner = super().wrap_str_format(value)
        if inner is not None:
            _check_widths(value.__self__, (spec or "" for _, _, spec, _ in Formatter().parse(value.__self__)))
        return inner

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the result of `+`, `*`, `**` or `%`, after a check that it is not too large.
        Raises TemplateLimit. Overrides Jinja's method."""
        self._step()
        numbers: list[int] = [value for value in (left, right) if isinstance(value, int)]
        sized = [value for value in (left, right) if isinstance(value, str | bytes | list | tuple)]
        if operator == "*" and sized and numbers and len(sized[0]) * max(numbers[0], 0) > MAX_WIDTH:
            raise TemplateLimit(f"it repeats to more than {MAX_WIDTH} characters")
        if operator == "%" and isinstance(left, str | bytes):
            _check_percent(left)
        bits = sum(value.bit_length() for value in numbers) if operator == "*" else 0
        if operator == "**" and len(numbers) == 2:
            bits = numbers[0].bit_length() * max(numbers[1], 0)
        if bits > MAX_BITS:
            raise TemplateLimit(f"it computes a number of more than {MAX_BITS} bits")
        return self.made(super().call_binop(context, operator, left, right))

    def _step(self) -> None:
        self._spent.steps += 1
        if self._spent.steps > self._bounds.steps:
            raise TemplateLimit(f"it takes more than {self._bounds.steps} steps (loop iterations, calls, filters)")

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._step()
            if name in _PADS:
                _check_width((*args[1:], *kwargs.values()))  # without the value that is filtered
            if name == "format":
                _check_percent(str(args[0]))
            return self.made(function(*args, **kwargs))

        return bounded


class GenerationBlock(Extension):
    """Jinja extension for the tag `{% generation %}`, which marks the assistant's text for
    training: its content is rendered as if the tag were not there."""

    tags: ClassVar[frozenset[str]] = frozenset({"generation"})  # type: ignore[misc]

    def parse(self, parser: Any) -> Any:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counting(NodeTransformer):
    """Changes a parsed template so that its loops call `Sandbox.turns` and `~` calls
    `Sandbox.joined`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _counted("turns", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _counted("joined", node.nodes)


def _counted(method: str, args: list[Any]) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _named(value: Any) -> bool:
    return bool(getattr(value, "__name__", ""))  # foreign: any callable of Python or Jinja


def _check_width(values: Iterable[Any]) -> None:
    wide = [value for value in values if isinstance(value, int) and abs(value) > MAX_WIDTH]
    if wide:
        raise TemplateLimit(f"it pads to {wide[0]} characters, more than {MAX_WIDTH}")


def _check_percent(form: str | bytes) -> None:
    text = form if isinstance(form, str) else form.decode("latin-1")
    _check_widths(form, ("*" if field[2] == "(" else field[1] for field in _PERCENT.finditer(text)))


def _check_widths(form: str | bytes, widths: Iterable[str]) -> None:
    if any(map(_WIDE.search, widths)):
        raise TemplateLimit(f"its format {form!r:.40} may be wider than {MAX_WIDTH} characters")


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return the JSON of a value (the filter `tojson`): characters are not escaped for HTML, and
    non-ASCII ones stay as they are. `indent` is limited to 16."""
    indent = None if indent is None else min(indent, 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
