"""`Tracer`: a chat template rendered with ropes in place of its contents (`symbolic`).

The rendering runs in the environment that Transformers compiles templates with, in which the places where Python's C code
would read a text past its methods (joining, `%`, filters, calls) are guarded.

Invariant: no text of a rope reaches the template's program but through a method that notes it, or hands it on unread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etude.chat.symbolic import Form, Part, Rope, Slot, Trace, Untraceable, concatenated, refusing

_HANDS_ON = {  # filters that look at a content only through its methods
    *("string", "list", "first", "last", "reverse", "default", "d", "length", "count", "items", "trim", "replace"),
    *("lower", "upper", "capitalize", "select", "selectattr", "reject", "rejectattr", "map"),
}


def _may_hold(value: object) -> bool:
    """Whether there is, or might be, a rope in `value`."""
    if isinstance(value, Rope):
        return True
    if value is None or isinstance(value, str | int | float | Undefined | Macro):
        return False
    if isinstance(value, Mapping):
        return any(map(_may_hold, value.values()))
    return not isinstance(value, list | tuple) or any(map(_may_hold, value))


class _Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(concatenated)
    intercepted_binops = frozenset({"%"})

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        keeps = isinstance(__obj, Macro) or any(__obj is __self.globals.get(name) for name in ("namespace", "dict"))
        if not keeps and (_may_hold(args) or _may_hold(kwargs)):
            raise Untraceable("a call")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _may_hold(left) or _may_hold(right):
            raise Untraceable(operator)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        return None if isinstance(getattr(value, "__self__", None), Rope) else super().wrap_str_format(value)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        seen = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if _may_hold(seen) or _may_hold(kwargs):
            raise Untraceable(name)
        return function(*args, **kwargs)

    return guarded


def _joined(values: Iterable[Any], between: str = "") -> str:
    pieces = [piece for value in values for piece in (str(between), str(value))]
    return concatenated(pieces[1:])


def _type_only(test: Any) -> Callable[[Any], Any]:
    return lambda value: True if isinstance(value, Rope) else test(value)


def _is_plain_join(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return not kwargs and len(args) <= 2 and isinstance(args[0], list | tuple)


class Tracer:
    """Traces one template. `environment` is the one that Transformers has compiled it in."""

    def __init__(self, source: str, environment: ImmutableSandboxedEnvironment) -> None:
        own = object.__new__(_Environment)
        own.__dict__.update(environment.__dict__)
        own.cache = None
        own.filters = {
            name: function if name in _HANDS_ON else _guarded(name, function)
            for name, function in environment.filters.items()
        }
        own.filters["tojson"] = self._json(own.filters["tojson"])
        own.filters["join"] = self._join(environment.filters["join"], own.filters["join"])
        own.tests = environment.tests | {name: _type_only(environment.tests[name]) for name in ("iterable", "sequence")}
        own.globals = environment.globals | {"strftime_now": refusing("strftime_now")}
        parsed = own.parse(source)
        own.filters["concatenated"] = _joined
        for concat in list(parsed.find_all(nodes.Concat)):  # `a ~ b` would join past the environment
            replaced = nodes.Filter(nodes.List(concat.nodes), "concatenated", [], [], None, None)
            _put_in_place(parsed, concat, replaced.set_lineno(concat.lineno))
        self._template = own.from_string(parsed)

    def trace(self, contents: Sequence[str], variables: Callable[[Sequence[str]], Mapping[str, Any]]) -> Form:
        """The form of `contents`; `variables` makes the template's variables of what stands for them.

        Raises:
            Untraceable: there is none.
            Exception: whatever the template raises.
        """
        trace = Trace(contents)
        ropes = [Rope.of(trace, [Slot(index)]) for index in range(len(contents))]
        text = self._template.render(**variables(ropes))
        parts: tuple[Part, ...] = text.parts if isinstance(text, Rope) else (text,)
        return Form(parts, tuple(trace.questions.values()))

    @staticmethod
    def _json(guarded: Callable[..., Any]) -> Callable[..., Any]:
        def tojson(value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, Rope) and not args and not kwargs:
                return concatenated(['"', value.changed("tojson"), '"'])
            return guarded(value, *args, **kwargs)

        return tojson

    @staticmethod
    def _join(plain: Any, guarded: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def join(*args: Any, **kwargs: Any) -> Any:
            return _joined(*args[1:]) if _is_plain_join(args[1:], kwargs) else guarded(*args, **kwargs)

        return join


def _put_in_place(tree: nodes.Node, old: nodes.Node, new: nodes.Node) -> None:
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name in parent.fields:
            value = getattr(parent, name, None)
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                setattr(parent, name, [new if each is old else each for each in value])
