"""`etude data inspect` and `etude data traces`: what a file holds, what is wrong with it, and which rollouts to imitate."""

import json
import tracemalloc

import pytest
from click import UsageError
from data_stage import invoke, lines

from etude.data import write_parquet
from etude.data.dumped import rank_pairs, read_dumps
from etude.data.inspection import histogram, inspect_file
from etude.data.prepare import traces
from etude.data.prepare.arithmetic import make_demonstrations, make_rows
from etude.errors import DataError
from etude.models import build_tiny_tokenizer
from etude.trajectory import Provenance, StopReason, Trajectory

WITHOUT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if no_thoughts %}no thoughts\n{% endif %}{% endif %}"
)


@pytest.fixture
def rows(tmp_path):
    return write_parquet(make_rows(40, 1, "train"), tmp_path / "train.parquet")


def test_a_good_file(rows):
    result = invoke("inspect", rows)
    assert result.exit_code == 0, result.output
    assert "40 rows, prompts" in result.output
    assert "  prompt               list 40\n" in result.output
    assert "calculator.create_kwargs(question)" in result.output
    assert "etude/arithmetic" in result.output
    assert "lengths in characters" in result.output
    assert result.output.endswith("no problems\n")


def test_lengths_are_those_of_the_run(rows, tmp_path):
    tokenizer = build_tiny_tokenizer(["Use the calculator tool. Compute 1 + 2."], 300)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: etude.tools.builtin.calculator.Calculator\n    config: {type: native}\n"
    )
    found = inspect_file(rows, model=str(tmp_path / "model"), tool_config=tmp_path / "tools.yaml")
    from etude.chat import ChatTemplate
    from etude.tools import load_tools

    chat = ChatTemplate(tokenizer)
    schemas = [tool.get_openai_tool_schema().to_openai() for tool in load_tools(str(tmp_path / "tools.yaml"))]
    assert found.lengths == [len(chat.initial_ids(row["prompt"], schemas)) for row in make_rows(40, 1, "train")]
    assert found.unit == "tokens, tool schemas included"
    assert found.problems == []


def test_lengths_have_the_images_and_another_image_is_another_prompt(tmp_path):
    from PIL import Image
    from vision_stage import save_vision_model

    save_vision_model("qwen2_5_vl", tmp_path / "model")
    sizes = [(16, 16), (48, 32), (32, 32)]
    for number, size in enumerate(sizes):
        Image.new("RGB", size, "red").save(tmp_path / f"{number}.png")
    made = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "<image> What is it?"}],
            "images": [{"path": f"{number}.png"}],
            "reward_model": {"ground_truth": str(number)},
        }
        for number in (0, 1, 2, 2)
    ]
    rows = write_parquet(made, tmp_path / "train.parquet")
    found = inspect_file(rows, model=str(tmp_path / "model"))
    merged = [width * height // 64 for width, height in [*sizes, sizes[-1]]]  # a token covers 8 by 8 pixels
    assert [length - found.lengths[0] for length in found.lengths] == [tokens - merged[0] for tokens in merged]
    assert found.repeated == 1
    assert found.problems == []
    assert inspect_file(rows).repeated == 1
    build_tiny_tokenizer(["What is it?"], 300).save_pretrained(tmp_path / "text")
    blind = inspect_file(rows, model=str(tmp_path / "text")).problems
    assert all("the row has images, and the model reads text only" in each for each in blind)
    assert len(blind) == 4
    talks = [[{"role": "user", "content": row["prompt"][0]["content"]}] for row in made]
    talks[1] = [
        {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": " What is it?"}]}
    ]
    for number, talk in enumerate(talks):
        talk.append({"role": "assistant", "content": "7"})
        made[number] = {"messages": talk} | ({"images": made[number]["images"]} if number != 1 else {})
    with open(tmp_path / "talks.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in made)
    found = inspect_file(tmp_path / "talks.jsonl", model=str(tmp_path / "model"))
    assert found.problems == []
    assert [length - found.lengths[0] for length in found.lengths] == [tokens - merged[0] for tokens in merged]
    (tmp_path / "1.png").unlink()
    [problem] = inspect_file(rows, model=str(tmp_path / "model")).problems
    assert "row 1: " in problem
    [problem] = inspect_file(tmp_path / "talks.jsonl", model=str(tmp_path / "model")).problems
    assert problem.startswith(f"{tmp_path / 'talks.jsonl'}:2: ")


def test_lengths_say_whether_they_have_the_tools(rows, tmp_path):
    tokenizer = build_tiny_tokenizer(["Use the calculator tool. Compute 1 + 2."], 300)
    tokenizer.chat_template = WITHOUT_TOOLS
    model, tools = tmp_path / "model", tmp_path / "tools.yaml"
    tokenizer.save_pretrained(model)
    tools.write_text("tools:\n  - class_name: etude.tools.builtin.calculator.Calculator\n    config: {type: native}\n")
    neither = inspect_file(rows, model=str(model))
    hidden = inspect_file(rows, model=str(model), tool_config=tools)
    assert neither.lengths == hidden.lengths
    assert neither.unit.startswith("tokens, without tool schemas (--tools")
    assert hidden.unit.startswith("tokens, without tool schemas: the chat template shows none")
    shown = invoke("inspect", rows, "--model", model, "--tools", tools, "--tools-in-system", "hermes")
    assert "lengths in tokens, tool schemas included\n" in shown.output
    found = inspect_file(rows, model=str(model), tool_config=tools, tools_in_system="hermes")
    from etude.chat import ChatTemplate, ToolParser
    from etude.tools import load_tools

    chat = ChatTemplate(tokenizer, tools_in_system=ToolParser.get_tool_parser("hermes", tokenizer))
    schemas = [tool.get_openai_tool_schema().to_openai() for tool in load_tools(str(tools))]
    assert found.lengths == [len(chat.initial_ids(row["prompt"], schemas)) for row in make_rows(40, 1, "train")]
    assert min(found.lengths) > max(hidden.lengths)


def test_lengths_are_those_of_the_runs_template_arguments(rows, tmp_path):
    tokenizer = build_tiny_tokenizer(["Use the calculator tool. Compute 1 + 2."], 300)
    tokenizer.chat_template = WITHOUT_TOOLS
    tokenizer.save_pretrained(tmp_path)
    added = len(tokenizer.encode("no thoughts\n"))
    shortest = min(inspect_file(rows, model=str(tmp_path)).lengths)
    for value, expected in (("true", shortest + added), ("false", shortest)):
        result = invoke("inspect", rows, "--model", tmp_path, "--set", f"no_thoughts={value}")
        assert f"  min {expected}, median" in result.output
    with pytest.raises(UsageError, match="--set needs --model"):
        invoke("inspect", rows, "--set", "no_thoughts=true")


def test_every_problem_names_its_row(tmp_path):
    good, other, empty, repeated = make_rows(4, 1, "train")
    other["data_source"] = "nowhere"
    empty["reward_model"]["ground_truth"] = ""
    repeated["prompt"] = good["prompt"]
    broken = {**good, "prompt": [{"role": "usr", "content": "x"}]}
    path = tmp_path / "rows.jsonl"
    lines(path, good, other, empty, repeated, broken)
    result = invoke("inspect", path, "--problems", "2")
    assert result.return_value == 1
    assert "3 problems" in result.output
    assert f"{path}:2: no scorer for the data source 'nowhere'; right with a custom_reward_function" in result.output
    assert f"{path}:3: reward_model.ground_truth is missing" in result.output
    assert "… and 1 others" in result.output
    assert "1 rows repeat the prompt of an earlier one" in result.output
    assert "another ground truth" not in result.output  # its tools are given something else
    assert any(f"{path}:5" in problem and "usr" in problem for problem in inspect_file(path).problems)
    truth = repeated["reward_model"]["ground_truth"]
    lines(path, good, {**good, "reward_model": repeated["reward_model"]})
    [line] = inspect_file(path).contrary
    assert line == f"{path}:2 says {truth!r} and {path}:1 says {good['reward_model']['ground_truth']!r}"
    # an agent of the user's may read what else stands in extra_info
    told = {
        **good,
        "extra_info": {**good["extra_info"], "difficulty": "hard"},
        "reward_model": repeated["reward_model"],
    }
    for agent, expected in (("single_turn_agent", 1), ("mine", 0)):
        both = ({**row, "agent_name": agent} for row in (good, told))
        assert len(inspect_file(lines(path, *both)).contrary) == expected


def test_a_row_that_is_left_out_of_the_counts_is_said_to_be(tmp_path):
    good, without = make_rows(2, 1, "train")
    without["extra_info"] = {**without["extra_info"], "tools_kwargs": {}}
    shapes = [
        {**good, "extra_info": info} for info in ("x", {"tools_kwargs": "x"}, {"tools_kwargs": {"calculator": 5}})
    ]
    result = invoke("inspect", lines(tmp_path / "rows.jsonl", good, without, *shapes))
    assert "what follows is without 4 of the rows, which cannot be read" in result.output
    assert all(f"rows.jsonl:{place}: " in result.output for place in (2, 3, 4, 5))
    report = inspect_file(tmp_path / "rows.jsonl")
    assert [sum(counts.values()) for counts in (report.sources, report.agents, report.tool_kwargs)] == [1, 1, 1]
    assert len(report.lengths) == 1


def test_a_tool_that_is_not_configured_is_a_problem(rows, tmp_path):
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: etude.tools.builtin.code_interpreter.SandboxFusionTool\n    config: {type: native}\n"
    )
    found = inspect_file(rows, tool_config=tmp_path / "tools.yaml")
    assert len(found.problems) == 40
    [line] = [line for line in found.lines(20) if "tools_kwargs names" in line]
    assert "row 0: " in line
    assert line.endswith(" (40 such rows)")
    assert "tools_kwargs names the tool 'calculator' (configured: code_interpreter)" in found.problems[0]


def test_conversations(tmp_path):
    path = write_parquet(make_demonstrations(10, 1), tmp_path / "sft.parquet")
    found = inspect_file(path)
    assert (found.rows, found.kind, len(found.lengths), found.problems) == (10, "conversations", 10, [])


def test_the_histogram_counts_every_value():
    text = list(histogram([1, 1, 2, 50, 100]))
    assert text[0] == "  min 1, median 2, 90 % 100, 99 % 100, max 100"
    assert [int(line.split()[1]) for line in text[1:]] == [3, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert list(histogram([7]))[1].split()[:2] == ["7-7", "1"]


# -- rollouts worth imitating --------------------------------------------------------------------------------------


def record(prompt, ids, score):
    trajectory = Trajectory("r", [prompt, 2, 3])
    trajectory.append(ids, Provenance.SAMPLED, log_probs=[-0.5] * len(ids))
    trajectory.stop_reason = StopReason.COMPLETED
    return json.loads(json.dumps({**trajectory.to_record(), "score": score, "uid": f"1-{prompt}", "step": 1}))


def test_traces_are_the_best_different_rollouts_of_each_prompt(tmp_path):
    first = [record(1, [5, 6], 1.0), record(1, [5, 7], 2.0), record(1, [5, 6], 1.0), record(1, [9], 0.0)]
    second = [record(2, [4], 0.5), record(3, [8], 1.0), record(3, [8, 8], None)]
    lines(tmp_path / "rollouts" / "2.jsonl", *first)
    lines(tmp_path / "rollouts" / "10.jsonl", *second)
    result = invoke("traces", "--input", tmp_path / "rollouts", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    chosen = [json.loads(line) for line in (tmp_path / "out" / "traces.jsonl").read_text().splitlines()]
    assert chosen == [first[0], first[1], second[1]]  # records as they were, in their order
    assert [rollout.score for rollout in read_dumps([str(tmp_path / "out" / "traces.jsonl")])] == [1.0, 2.0, 1.0]
    assert inspect_file(tmp_path / "out" / "traces.jsonl").kind == "rollouts"
    assert inspect_file(tmp_path / "out" / "traces.jsonl").lengths == [5, 5, 4]
    whole = lines(tmp_path / "one.jsonl", *first, *second)
    traces.write([whole], tmp_path / "again", min_score=1.0, per_prompt=1)
    assert [json.loads(x)["score"] for x in (tmp_path / "again" / "traces.jsonl").read_text().splitlines()] == [
        2.0,
        1.0,
    ]


def test_traces_of_two_runs_keep_apart_the_prompts_to_which_these_gave_the_same_uid(tmp_path):
    runs = [[record(1, [5], 1.0), record(4, [5], 1.0)], [record(2, [6], 0.0) | {"uid": "1-1"}, record(4, [6], 0.0)]]
    folders = [lines(tmp_path / name / "1.jsonl", *own).parent for name, own in zip("ab", runs)]
    written = traces.write(folders, tmp_path, min_score=0.0, per_prompt=None)
    rollouts = read_dumps([str(written["traces"])])
    uids = [each.prompt[1] for each in rollouts]
    assert len({*uids}) == 3
    assert uids[1] == uids[3]  # the same prompt
    assert json.loads(uids[1])[0] == "1-4"
    assert [(a.score, b.score) for a, b in rank_pairs(rollouts, None, None)] == [(1.0, 0.0)]


@pytest.mark.parametrize("continued", [False, True])
def test_traces_of_rollouts_whose_history_was_rewritten_are_of_their_first_prompt(continued, tmp_path):
    """Each was of a prompt of its own, that of its last sequence; `continued`: the first goes on from the last's."""
    rollouts = []
    for number in range(3):
        earlier, main = record(1, [5], 1.0), record(8, [6], 1.0)
        prompts = ([1, 2, 3, number], [1, 2, 3]) if continued else ([1, 2, 3], [1, 2, 3, number])
        earlier["prompt_ids"], main["prompt_ids"] = prompts
        rollouts.append({**main, "score": float(number), "earlier": [earlier]})
    file = lines(tmp_path / "1.jsonl", *rollouts)
    traces.write([file], tmp_path, min_score=0.0, per_prompt=1)
    assert [json.loads(x) for x in (tmp_path / "traces.jsonl").read_text().splitlines()] == [rollouts[2]]


def test_rollouts_are_chosen_without_holding_them_all(tmp_path):
    line = json.dumps({**record(1, [5], 1.0), "output": "x" * 400_000})
    file = tmp_path / "1.jsonl"
    with file.open("w") as output:
        for number in range(40):
            output.write(line.replace('"prompt_ids": [1,', f'"prompt_ids": [{number},') + "\n")
    tracemalloc.start()
    result = invoke("traces", "--input", file, "--out", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "40 rows" in result.output
    assert (tmp_path / "traces.jsonl").stat().st_size > 40 * 400_000
    assert peak < 12 * 400_000


def test_what_is_no_dump_is_named(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl: line 1: not a rollout"):
        traces.write([lines(tmp_path / "rows.jsonl", {"prompt": []})], tmp_path, min_score=1.0, per_prompt=None)
    with pytest.raises(DataError, match=r"no rollout in .* scores 3 or more"):
        traces.write([lines(tmp_path / "d.jsonl", record(1, [5], 1.0))], tmp_path, min_score=3.0, per_prompt=None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no dumps"):
        traces.write([tmp_path / "empty"], tmp_path, min_score=1.0, per_prompt=None)
