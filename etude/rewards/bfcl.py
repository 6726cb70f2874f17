"""Scoring of function calls as in the Berkeley Function-Calling Leaderboard: syntax trees against accepted values.

Ground truths (or the JSON text of one):

    [{"f": {"city": ["Paris", "paris"], "unit": ["C", ""]}}, …]   calls in any order; "" makes an argument optional
    ["f(city='Paris')", …]                                        one accepted value each
    []                                                            no call is expected
    "any"                                                         at least one call, to any function

Invariant: nothing is executed or evaluated; every expected call must be matched and no call may be left over. An integer
is accepted where a float is expected, not the reverse; strings are compared ignoring case, spaces and punctuation, as
BFCL does.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.chat.parsers import ToolParser
from etude.chat.parsers.arguments import Unreadable, parse_expression, read_literal
from etude.errors import DataError
from etude.rewards.truth import reads_truth, require_truth

MAX_CHARS = 50_000  # characters that are parsed, from a solution's end
MAX_CALLS = 100
_FORMATS = ("hermes", "pythonic", "llama3_json")
_IGNORED = re.compile(r"[ ,./\-_*^'\"]")
_FENCE = re.compile(r"\A(?:```(?:python|json|tool_code)?\s*\n(.*?)\n?```|`([^`\n]*)`)\Z", re.DOTALL)
_BARE = re.compile(r"[A-Za-z_][\w.]*\(.*\)", re.DOTALL)  # a call, or several, without the brackets of their list

Call = tuple[str, dict[str, Any]]


def _read_ground_truth(given: Any) -> list[Call] | None:
    """Returns the expected calls, each argument with a list of accepted values; None for "any".

    Raises:
        DataError: there is no ground truth (an empty list is one), or it has none of the forms above.
    """
    if given == "any":
        return None
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise DataError(f"ground_truth of function calls: not JSON: {error}") from error
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, list | Mapping):
        require_truth(given)
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, Sequence):
        raise DataError(f"ground_truth of function calls must be a list of calls, not a {type(given).__name__}")
    return [_read_call(call) for part in given for call in (part if isinstance(part, list) else [part])]


def _read_call(call: Any) -> Call:
    if isinstance(call, str):
        return _parse_call(call)
    if not isinstance(call, Mapping) or len(call) != 1:
        raise DataError(f"ground_truth of function calls: {str(call)[:80]!r} is not {{name: {{argument: [values]}}}}")
    ((name, arguments),) = call.items()
    if not isinstance(arguments, Mapping) or not all(isinstance(values, list) for values in arguments.values()):
        raise DataError(f"ground_truth of function calls: the arguments of '{name}' are not lists of accepted values")
    return str(name), dict(arguments)


def _parse_call(text: str) -> Call:
    try:
        node = parse_expression(text)
        if not isinstance(node, ast.Call):
            raise Unreadable("it is no call")
        arguments = {str(number): [read_literal(each)] for number, each in enumerate(node.args)}
        arguments |= {str(keyword.arg): [read_literal(keyword.value)] for keyword in node.keywords}
    except (Unreadable, RecursionError) as error:
        raise DataError(f"ground_truth of function calls: {text[:80]!r}: {error}") from error
    return ast.unparse(node.func), arguments


@reads_truth(_read_ground_truth)
def compute_score(solution_str: str, ground_truth: Any, trajectory: Any = None) -> dict[str, Any]:
    """Returns `score` and `acc` (1.0 if the calls are exactly those of `ground_truth`, else 0.0) and the counts
    `matched` and `calls`.

    The calls are those that the agent loop parsed, if `trajectory` has any, else those in the text (Hermes, pythonic or
    JSON, fenced or not).

    Raises:
        DataError: `ground_truth` has none of the forms above.
    """
    wanted = _read_ground_truth(ground_truth)
    calls = _calls_of(solution_str, trajectory)
    if wanted is None:
        right = bool(calls) and all(name for name, _ in calls)  # a malformed call has no name
        matched = int(right)
    else:
        matched = _count_matches(wanted, calls)
        right = matched == len(wanted) == len(calls)
    return {"score": float(right), "acc": float(right), "matched": matched, "calls": len(calls)}


def _calls_of(text: str, trajectory: Any) -> list[Call]:
    made = [] if trajectory is None else [(call.name, call.arguments) for call in trajectory.tool_calls]
    if not made:
        text = text[-MAX_CHARS:].rpartition("</think>")[2].strip()
        fenced = _FENCE.match(text)
        text = (fenced[1] or fenced[2] or "").strip() if fenced else text
        if _BARE.fullmatch(text):
            found = ToolParser.get_tool_parser("pythonic").parse(f"[{text}]")
            text = f"[{text}]" if found.calls and not found.errors else text
        for name in _FORMATS:
            parsed = ToolParser.get_tool_parser(name).parse(text)
            made = [(call.name, call.arguments) for call in parsed.calls] + [("", "")] * len(parsed.errors)
            if made:
                break
    return [(name, _arguments(arguments)) for name, arguments in made[: MAX_CALLS + 1]]


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"": text}  # matches nothing
    return found if isinstance(found, dict) else {"": found}


def _count_matches(wanted: list[Call], calls: list[Call]) -> int:
    """Returns the size of a maximum matching between expected and actual calls, found by augmenting paths."""
    fits = [[n for n, call in enumerate(calls) if _is_call(call, each)] for each in wanted]
    taken: dict[int, int] = {}  # call → wanted

    def place(one: int, seen: set[int]) -> bool:
        for number in fits[one]:
            if number not in seen:
                seen.add(number)
                if number not in taken or place(taken[number], seen):
                    taken[number] = one
                    return True
        return False

    return sum(place(one, set()) for one in range(len(wanted)))


def _is_call(call: Call, wanted: Call) -> bool:
    (name, arguments), (right_name, accepted) = call, wanted
    if name.replace(".", "_") != right_name.replace(".", "_"):
        return False
    if any(key.isdigit() for key in accepted):  # positional arguments: compare by position
        arguments = {str(n): value for n, value in enumerate(arguments.values())}
        accepted = {str(n): values for n, values in enumerate(accepted.values())}
    return _are_arguments(arguments, accepted)


def _are_arguments(given: Mapping[str, Any], accepted: Mapping[str, Any]) -> bool:
    if any(key not in accepted for key in given):
        return False
    for key, values in accepted.items():
        if not values:  # no accepted values: only a missing or empty argument matches
            if given.get(key):
                return False
        elif key not in given:
            if "" not in values:
                return False
        elif not any(_is_value(given[key], value) for value in values):
            return False
    return True


def _is_value(given: Any, accepted: Any) -> bool:
    if isinstance(accepted, bool) or isinstance(given, bool) or accepted is None or given is None:
        return given is accepted
    if isinstance(accepted, int | float) and isinstance(given, int | float):
        return given == accepted and (isinstance(given, int) or isinstance(accepted, float))
    if isinstance(accepted, str) and isinstance(given, str):
        return _folded(given) == _folded(accepted)
    if isinstance(accepted, list) and isinstance(given, list):
        return len(given) == len(accepted) and all(map(_is_value, given, accepted))
    if isinstance(accepted, Mapping) and isinstance(given, Mapping):
        values = {key: value if isinstance(value, list) else [value] for key, value in accepted.items()}
        return _are_arguments(given, values)
    return False


def _folded(text: str) -> str:
    lowered = text.lower()
    return _IGNORED.sub("", lowered) or lowered.strip()  # "-" is neither "*" nor ""
