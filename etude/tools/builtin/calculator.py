"""`Calculator`: evaluates arithmetic expressions.

Invariant: an expression is parsed and interpreted, never evaluated as Python. Time and memory are bounded, as its length is
limited and no intermediate integer exceeds `MAX_BITS`. Integers are exact.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from pydantic import Field

from etude.errors import ToolError
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.tools.base import BaseTool, Execution, function_schema
from etude.tools.options import ToolOptions, read_options
from etude.trace import rollout_trace_op

Number = int | float

MAX_BITS = 2048  # about 600 digits: more than any arithmetic question needs
_SCHEMA = function_schema(
    "calculator",
    "Evaluates an arithmetic expression and returns its value.",
    ["expression"],
    expression={
        "type": "string",
        "description": "Numbers, + - * / // % ** and parentheses, for example (3 + 4) * 12",
    },
)
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


class CalculatorOptions(ToolOptions):
    """`config` of `calculator`."""

    max_expression_chars: int = Field(default=200, ge=1, le=2000)


class Calculator(BaseTool):
    """`config.max_expression_chars` (default 200, at most 2,000) limits the length of the expression."""

    name = "calculator"
    schema = _SCHEMA

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Raises ConfigError if the limit is not an integer from 1 to 2,000, or there is an unknown key."""
        super().__init__(config, tool_schema)
        self._max_chars = read_options(CalculatorOptions, config, self.name).max_expression_chars

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Returns the value of `parameters["expression"]` as text; step reward 0.0.

        Raises:
            ToolError: the expression is missing or has no value; one line with the reason.
        """
        expression = parameters.get("expression")
        if isinstance(expression, int | float) and not isinstance(expression, bool):
            expression = str(expression)
        if not isinstance(expression, str) or not expression.strip():
            raise ToolError("Error: the argument 'expression' must be an arithmetic expression, such as \"12 * 7\"")
        if len(expression) > self._max_chars:
            raise ToolError(f"Error: the expression is longer than {self._max_chars} characters")
        return ToolResponse(text=format_number(evaluate(expression))), 0.0, {}


def evaluate(expression: str) -> Number:
    """Returns the value of an arithmetic expression.

    Raises:
        ToolError: the expression is invalid, or its value is not a finite real number within `MAX_BITS`.
    """
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError:
        raise ToolError("Error: division by zero") from None
    except OverflowError:
        raise ToolError("Error: the result is too large") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("Error: this is not a valid arithmetic expression") from None


def format_number(value: Number) -> str:
    """Formats an integer in full, and another number to 15 significant digits without a trailing ".0"."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return format(value, ".15g")


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise ToolError("Error: write powers as **, not ^")
    raise ToolError("Error: only numbers, + - * / // % ** and parentheses are allowed")


def _bounded(value: object) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise OverflowError
        return value
    if not isinstance(value, float):
        raise ToolError("Error: the result is not a real number")
    if not math.isfinite(value):
        raise OverflowError
    return value


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> object:
    integers = isinstance(base, int) and isinstance(exponent, int)
    if integers and exponent * (abs(base).bit_length() - 1) > MAX_BITS:  # type: ignore[attr-defined]
        raise OverflowError  # without computing it: the result has at least that many bits
    return base**exponent


_UNARY: dict[type[ast.unaryop], Callable[[Any], object]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
