"""The calculator against hostile expressions, and the GSM8K tool's rewards."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, ToolError
from etude.tools import builtin_config, load_tools
from etude.tools.builtin.calculator import Calculator, evaluate, format_number


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("3 + 4", "7"),
        ("1/2", "0.5"),
        ("6/2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("2**100", str(2**100)),
        ("10**20/10", str(10**19)),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2**-1", "0.5"),
        ("-(3 - 5) * +4", "8"),
        ("12 × 3 − 4 ÷ 2", "34"),
        ("-0.0", "0"),
        ("(-1)**99999999999999999999", "-1"),
    ],
)
def test_values(expression, shown):
    assert format_number(evaluate(expression)) == shown


HOSTILE = [
    "9**9**9", "(2**2000)*(2**2000)", "-(2**2047)**3", "10.0**400", "1e308*10", "0**-1", "1/0", "1%0", "1//0", "(-8)**.5",
    "__import__('os').system('true')", "().__class__", "'a'*10**9", "[0]*10**9", "lambda: 1", "a", "True", "1j", "1,000",
    "1 if 1 else 2", "1 < 2", "~1", "1 << 99", "3^2", "x:=1", "1;2", "1\n2", "\0", "\ud800", "", "   ", "(" * 199, "--" * 99,
    "007", "2**2**2**2**2**2", "1e400", "f'{1}'", "1 +",
]  # fmt: skip


@pytest.mark.parametrize("expression", HOSTILE)
def test_hostile_expressions_are_answered_in_one_line(expression):
    with pytest.raises(ToolError) as told:
        evaluate(expression)
    assert str(told.value).startswith("Error: ")
    assert "\n" not in str(told.value)


@given(st.text(alphabet="0123456789.+-*/%() e", max_size=200))
def test_anything_has_a_bounded_value_or_an_error(expression):
    try:
        shown = format_number(evaluate(expression))
    except ToolError:
        return
    assert len(shown) < 700


@given(
    st.integers(-999, 999),
    st.sampled_from("+-*"),
    st.integers(-999, 999),
    st.sampled_from("+-*"),
    st.integers(-999, 999),
)
def test_integers_are_exact(a, op, b, op2, c):
    expression = f"{a} {op} ({b}) {op2} ({c})"
    assert format_number(evaluate(expression)) == str(eval(expression))


def test_an_odd_expression_warns_of_nothing():
    program = "import etude.tools.builtin.calculator as c; c.Calculator({}); c.ast.parse('1if 1 else 2', mode='eval')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""


async def test_the_calculator_as_a_tool():
    (tool,) = load_tools(builtin_config("calculator"))
    assert (await tool.execute("i", {"expression": "6*7"}))[0].text == "42"
    assert (await tool.execute("i", {"expression": 42}))[0].text == "42"
    assert tool.tool_schema.function.parameters.required == ["expression"]
    for parameters in (
        {},
        {"expression": None},
        {"expression": ["1"]},
        {"expression": " "},
        {"expression": "1+" * 100 + "1"},
    ):
        with pytest.raises(ToolError):
            await tool.execute("i", parameters)
    instance_id, response = await tool.create(None, anything="harmless")
    assert instance_id
    assert response.is_empty()


@pytest.mark.parametrize("limit", [0, 5000, "many", 2.5])
def test_the_calculators_limit(limit):
    with pytest.raises(ConfigError, match="max_expression_chars"):
        Calculator({"max_expression_chars": limit})


async def test_gsm8k_reads_numbers_and_keeps_trajectories_apart():
    (tool,) = load_tools(builtin_config("gsm8k"))
    await tool.create("a", ground_truth="1,072")
    await tool.create("b", ground_truth="2")
    response, reward, _ = await tool.execute("a", {"answer": "$1072.00"})
    assert (response.text, reward) == ("Current parsed answer='#### $1072.00' reward=1.0", 0.0)
    assert (await tool.execute("b", {"answer": 5}))[0].text == "Current parsed answer='#### 5' reward=0.0"
    assert (await tool.calc_reward("a"), await tool.calc_reward("b")) == (1.0, 0.0)
    await tool.execute("a", {})
    assert await tool.calc_reward("a") == 0.0
    await tool.release("a")
    with pytest.raises(KeyError):
        await tool.calc_reward("a")
