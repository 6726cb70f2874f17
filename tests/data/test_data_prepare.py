"""The prepared tasks: exact answers, splits that share nothing, and rows that pass the row contract."""

import ast
import operator
import random
import re
from pathlib import Path

import pytest
from data_stage import invoke, lines
from hypothesis import given
from hypothesis import strategies as st

from etude.data import SFTDataset, check_row, read_rows
from etude.data.prepare import arithmetic, gsm8k
from etude.data.prepare.arithmetic import Habits, make_demonstrations, make_problems, make_rows, misread
from etude.data.prepare.sources import make_tables
from etude.errors import DataError
from etude.tools.builtin.calculator import Calculator

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
SPLITS = ("train", "demonstrations", "val", "test")


def value_of(expression):
    """The value by Python's own grammar."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def walk(node):
        return (
            node.value
            if isinstance(node, ast.Constant)
            else operators[type(node.op)](walk(node.left), walk(node.right))
        )

    return walk(ast.parse(expression, mode="eval").body)


@given(st.integers(0, 10**6), st.sampled_from(SPLITS))
def test_answers_are_exact_and_expressions_well_formed(seed, split):
    for problem in make_problems(5, seed, split):
        assert problem.answer == value_of(problem.expression)
        assert re.fullmatch(r"\d\d? [-+*] \d\d? [-+*] \d\d?", problem.expression)
        assert all(2 <= int(number) <= 99 for number in re.findall(r"\d+", problem.expression))
        assert problem.question in [form.format(problem.expression) for form in arithmetic.QUESTIONS]


def test_all_question_forms_and_operators_occur():
    problems = make_problems(200, 0, "train")
    assert len({problem.question.replace(problem.expression, "{}") for problem in problems}) == 5
    assert len({tuple(re.findall(r" ([-+*]) ", problem.expression)) for problem in problems}) == 9


def test_splits_share_no_question_whatever_the_seeds():
    drawn = [{p.expression for seed in (0, 1) for p in make_problems(1500, seed, split)} for split in SPLITS]
    assert sum(len(split) for split in drawn) == len(set().union(*drawn))


def test_a_split_repeats_no_expression_and_seeds_differ():
    one, two = ([p.expression for p in make_problems(1000, seed, "val")] for seed in (0, 1))
    assert len(set(one)) == 1000
    assert len(set(one) & set(two)) < 50


def test_rows_are_deterministic_and_pass_the_contract():
    rows = make_rows(20, 3, "train")
    assert rows == make_rows(20, 3, "train")
    assert rows[:10] == make_rows(10, 3, "train")
    for index, row in enumerate(rows):
        assert check_row(row, "x", ["calculator"]) == row
        assert row["data_source"] == "etude/arithmetic"
        assert "agent_name" not in row
        assert row["extra_info"]["index"] == index
        assert row["extra_info"]["split"] == "train"
        assert row["prompt"][-1] == {"role": "user", "content": row["extra_info"]["question"]}


@pytest.mark.parametrize(("n", "split"), [(-1, "train"), (10**9, "train"), (1, "validation")])
def test_impossible_requests_are_refused(n, split):
    with pytest.raises(DataError, match=f"cannot make {n} rows of '{split}'"):
        make_rows(n, 0, split)


def shown(messages):
    """(called the tool, its result, the final answer)."""
    tools = [message["content"] for message in messages if message["role"] == "tool"]
    final = re.fullmatch(r"The answer is \\boxed\{(-?\d+)\}\.", messages[-1]["content"])
    return bool(tools), (tools or [None])[0], final.group(1)


def test_demonstrations_hold_the_habits_they_were_asked_for():
    rows = make_demonstrations(300, 5)
    assert rows == make_demonstrations(300, 5)
    found = {"good": 0, "misread": 0, "direct": 0}
    for row in rows:
        messages = row["messages"]
        expression = next(form for form in re.findall(r"\d+ . \d+ . \d+", messages[1]["content"]))
        called, result, final = shown(messages)
        habit = "direct" if not called else "good" if final == result else "misread"
        assert habit == row["habit"]
        if called:
            assert result == str(value_of(expression))
            assert messages[2]["tool_calls"] == [
                {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
            ]
        found[habit] += 1
    assert found == {"good": 100, "misread": 30, "direct": 170}


async def test_tool_results_read_as_the_calculator_prints_them():
    tool = Calculator({})
    for row in make_demonstrations(60, 6, Habits(good=1.0, misread=0.0)):
        arguments = row["messages"][2]["tool_calls"][0]["function"]["arguments"]
        response, _, _ = await tool.execute("", arguments)
        assert response.text == row["messages"][3]["content"]


@pytest.mark.parametrize(
    ("habits", "counts"),
    [
        (Habits(), {"good": 3, "misread": 1, "direct": 6}),
        (Habits(good=1.0, misread=0.0), {"good": 10, "misread": 0, "direct": 0}),
        (Habits(good=0.55, misread=0.45), {"good": 6, "misread": 4, "direct": 0}),
    ],
)
def test_habit_counts_add_up(habits, counts):
    assert habits.counts(10) == counts


@pytest.mark.parametrize(("good", "misread"), [(-0.1, 0.1), (0.6, 0.6)])
def test_habits_must_be_shares(good, misread):
    with pytest.raises(DataError, match="must be shares of 1"):
        Habits(good, misread)


@given(st.integers(-(10**6), 10**6), st.integers(0, 10**6))
def test_a_misread_result_is_another_integer_one_digit_off(result, seed):
    wrong = misread(random.Random(seed), str(result))
    assert str(int(wrong)) == wrong
    assert int(wrong) != result
    assert abs(len(wrong) - len(str(result))) == 1
    assert wrong.startswith("-") == (result < 0)


def test_write_makes_the_files_asked_for(tmp_path):
    paths = arithmetic.write(tmp_path, train=6, val=0, test=2, demonstrations=4, seed=1)
    assert {split: path.name for split, path in paths.items()} == {
        split: f"{split}.parquet" for split in ("train", "test", "demonstrations")
    }
    assert read_rows(paths["train"]) == make_rows(6, 1, "train")
    demonstrations = [row["messages"] for row in make_demonstrations(4, 1)]
    assert [item["messages"] for item in SFTDataset(str(paths["demonstrations"]))] == demonstrations


EXAMPLE = {"question": "How many?", "answer": "Many.\n#### 1,234"}


def test_gsm8k_rows_pass_the_contract(tmp_path):
    lines(tmp_path / "main" / "train.jsonl", EXAMPLE)
    (row,) = read_rows(gsm8k.write([tmp_path], tmp_path / "out")["train"])
    assert check_row(row, "x", ["calc_gsm8k_reward"]) == row
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1234"}
    assert row["extra_info"] == {
        "split": "train",
        "index": 0,
        "answer": EXAMPLE["answer"],
        "question": "How many?",
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1234"}}},
    }
    assert row["prompt"][1]["content"].startswith("How many? ")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("#### 7", "7"), ("#### -0.5", "-0.5"), ("#### $1,000.50", "1000.50"), ("#### 1 #### 2", "2"), ("#### .5", ".5")],
)
def test_final_answers(answer, expected):
    assert gsm8k.final_answer(answer) == expected


@pytest.mark.parametrize("answer", ["3/4", "10:30", "2 1/2", "1e6", "10^3", "3.5 / 2"])
def test_what_only_begins_with_a_number_is_no_final_answer(answer):
    with pytest.raises(DataError, match="no '#### number'"):
        gsm8k.make_row({"question": "How many?", "answer": f"#### {answer}"}, "a.jsonl:1", "train", 0)


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        ({"question": "How many?", "answer": "1234"}, "no '#### number'"),
        ({"question": "How many?", "answer": "#### many"}, "no '#### number'"),
        ({"question": "How many?"}, "needs 'question' and 'answer' as text"),
        ({"question": 3, "answer": "#### 1"}, "needs 'question' and 'answer' as text"),
    ],
)
def test_a_bad_example_names_file_and_line(tmp_path, example, reason):
    path = lines(tmp_path / "test.jsonl", EXAMPLE, example)
    with pytest.raises(DataError) as raised:
        gsm8k.write([path], tmp_path / "out")
    assert str(raised.value).startswith(f"{path}:2: ")
    assert reason in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_input_files_must_tell_their_split(tmp_path):
    train, other = (lines(tmp_path / name, EXAMPLE) for name in ("train.jsonl", "more.jsonl"))
    with pytest.raises(DataError, match=r"more\.jsonl: the name must start with train or test"):
        gsm8k.write([other], tmp_path)
    with pytest.raises(DataError, match=r"train\.jsonl: the train split is already read from"):
        gsm8k.write([tmp_path, train], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no train\.jsonl or test\.jsonl in .*empty"):
        gsm8k.write([tmp_path / "empty"], tmp_path)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K's files are not beside this checkout")
def test_gsm8k_is_read_whole():
    for split, count in (("train", 7473), ("test", 1319)):
        finals = [row["final"] for row in read_rows(GSM8K / f"{split}.jsonl")]
        made = make_tables({split: GSM8K / f"{split}.jsonl"}, gsm8k.make_row)[split]
        assert len(made) == count
        assert [row["reward_model"]["ground_truth"] for row in made] == finals


def test_the_arithmetic_command_says_where_files_went(tmp_path):
    counts = ["--train", "3", "--val", "2", "--test", "0", "--demonstrations", "2"]
    output = invoke("arithmetic", "--output-dir", tmp_path, *counts, "--seed", "4").output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "demonstrations.parquet",
        "train.parquet",
        "val.parquet",
    ]
    assert f"3 rows  {tmp_path}/train.parquet" in output
    assert "the first row of train:" in output
    assert make_rows(1, 4, "train")[0]["extra_info"]["question"] in output


def test_the_gsm8k_command(tmp_path):
    lines(tmp_path / "test.jsonl", EXAMPLE)
    output = invoke("gsm8k", "--input", tmp_path, "--output-dir", tmp_path / "out").output
    assert f"1 rows  {tmp_path}/out/test.parquet" in output
    assert '"ground_truth": "1234"' in output
