"""Parses Python literals in a model's text with Python's own parser, without evaluating them.

Invariant: a value from here is a JSON value: a string, a number, true, false, null, a list or an object. JSON's names
`true`, `false` and `null` are accepted, too.
"""

from __future__ import annotations

import ast

from etude.chat.parsers.json_call import Unreadable

MAX_CHARS = 100_000  # Python's parser is not hardened against hostile text
_JSON_NAMES = {"true": True, "false": False, "null": None}


def parse_expression(text: str) -> ast.expr:
    """Parses one Python expression to a syntax tree.

    Raises:
        Unreadable: it is invalid, or longer than `MAX_CHARS` characters.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable(f"it is longer than {MAX_CHARS} characters")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable('it is not valid Python; write [name(key="value")]') from None


def read_literal(node: ast.expr) -> object:
    """Converts the syntax tree of a literal to its value.

    Raises:
        Unreadable: it is not a literal.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [read_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
        return dict(zip(keys, map(read_literal, node.values)))
    raise Unreadable("a value must be a literal: a text, number, list or dict")
