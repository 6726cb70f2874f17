"""`etude check`: seeded misconfigurations, each found with its remedy, and an agent with nothing wrong."""

import json
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_stage import REWARD, SCHEMA, TOOL, Agent, every_finding_has_specific_advice
from house_stage import ACTOR, ROLLOUT

from etude.checks.findings import Level
from etude.checks.resources import count_weights, learning_rate
from etude.cli.main import cli, run
from etude.options import OptimOptions
from etude.testing import inspect_run

EXAMPLES = Path(__file__).parents[2] / "examples"
CHATML = """{% for m in messages %}{% if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""  # SmolLM2's
WORKED_TURNS = [
    {"role": "user", "content": "Is it 3?"},
    {"role": "assistant", "content": '<tool_call>\n{"name": "guess", "arguments": {"number": 3}}\n</tool_call>'},
    {"role": "tool", "content": "yes"},
    {"role": "assistant", "content": "3"},
]
SAME = REWARD.replace("solution_str.split()[-1:] == [ground_truth]", "solution_str.strip() == ground_truth")
FOREIGN_TURNS = [
    {"role": "user", "content": "Is it 3?"},
    {"role": "assistant", "content": "[guess(number=3)]"},
    {"role": "user", "content": "higher"},
]
WORLD = """
from etude.environments import Environment, environment


@environment("world")
class World(Environment):
    def reset(self, task, seed):
        return f"Say {seed}."

    def score(self):
        return 0.0
"""
UNDESCRIBED = SCHEMA | {"function": SCHEMA["function"] | {"description": ""}}


__all__ = ["every_finding_has_specific_advice"]


@pytest.fixture
def agent(tmp_path, tiny):
    return Agent(tmp_path, tiny.model)


def inspect(agent, *overrides, **options):
    name, *rest = agent.arguments(*overrides)
    return inspect_run(name.partition("=")[2], rest, None, **options)


def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_an_agent_with_nothing_wrong(agent):
    found = inspect(agent)
    assert [(each.level, each.message) for each in found.all if each.level is not Level.OK] == []
    subjects = ["configuration", "plug-ins", "model", "tools", "template", "rows", "batch", "reward", "services"]
    assert [each.subject for each in found.all] == [*subjects, "memory", "disk", "rollout"]
    assert not (agent.folder / "run").exists()  # nothing is written


def test_the_form_of_the_answer_that_is_paid_is_named(agent):
    agent.write("reward.py", SAME.replace("== ground_truth", "== f'#### {ground_truth}'"))
    assert "tests/guess: the ground truth after '####' earns 1" in [each.message for each in inspect(agent).all]


def test_a_scripted_call_that_the_tool_answers_with_an_error_is_named(agent):
    execute("raise ToolError('not today')")(agent)
    [rolled_out] = [each.message for each in inspect(agent).all if each.subject == "rollout"]
    assert "every tool was called and answered (guess with an error: not today)" in rolled_out


def test_an_error_in_a_tool_is_told_once_with_its_arguments_and_line(agent):
    execute("return {}[parameters['number']]")(agent)
    [wrong] = [each for each in inspect(agent).all if "KeyError" in each.message + each.fix]
    assert f"({agent.folder}/tool.py:19) on {{'number': " in wrong.message
    assert wrong.fix.startswith(f"mend {agent.folder}/tool.py:19; for a mistake of the model's raise ToolError")


def test_a_tool_that_blocks_the_event_loop_for_ever_is_ended(agent, monkeypatch):
    monkeypatch.setattr("etude.testing.run._GRACE", 1.0)
    execute("import time; time.sleep(600)")(agent)
    found = inspect(agent, seconds=0.5)
    said = [each.message for each in found.all if each.subject == "rollout" and each.level is not Level.OK]
    assert any("the event loop was blocked for 2 s" in line for line in said), said


def test_a_scorer_that_does_not_end_is_named_with_its_limit(agent):
    agent.write("reward.py", SAME.replace("return", "import time; time.sleep(60); return"))
    found = inspect(agent, seconds=0.5, rolls_out=False)
    assert [each.message for each in found.all if each.level is Level.ERROR] == ["no score within 0.5 s (--timeout)"]


def test_tools_in_the_system_message_of_a_template_that_shows_none(agent):
    model = template(lambda text: CHATML)(agent)
    found = inspect(agent, *model, f"{ROLLOUT}.multi_turn.tools_in_system=true")
    assert [str(each) for each in found.all if each.level is not Level.OK] == []
    [rolled_out] = [each.message for each in found.all if each.subject == "rollout"]
    assert "every tool was called and answered" in rolled_out


def test_a_training_with_tools_that_the_model_is_not_shown_does_not_begin(agent, capsys):
    settings = agent.arguments(*template(lambda text: CHATML)(agent))
    assert run(cli, ["train", *settings]) == 2
    assert "the model is not shown its tools (guess)" in capsys.readouterr().err
    assert not (agent.folder / "run" / "metrics.jsonl").exists()


def test_a_line_of_the_reward_that_fails_is_reported_once_whatever_it_says(agent):
    agent.write("reward.py", f"{SCORE}{{}}[solution_str]\n")
    failed = [each for each in inspect(agent).all if "KeyError" in each.message]
    assert [each.subject for each in failed] == ["reward"]


def test_tasks_of_an_environment_are_not_reported_as_rows_of_a_file(agent):
    agent.write("world.py", WORLD)
    own = [
        "env=[{id: world, tasks: 8, val_tasks: 2}]",
        "custom_reward_function.path=null",
        f"plugins=[{agent.folder}/world.py]",
    ]
    found = inspect(agent, *own, "data.train_files=[]", "data.val_files=[]", rolls_out=False)
    made = "env: {} made, in place of data.{}_files; each starts with what reset returns"
    said = [each.message for each in found.all if each.subject == "rows" and each.level is Level.OK]
    assert said == ["; ".join((made.format(8, "train"), made.format(2, "val")))]


# -- one misconfiguration each: level, subject, settings or how it is made, and what is said or what to do ---------------


def source(name, text):
    """A file of the agent's with other content."""
    return lambda agent: agent.write(name, text)


def one_row_of_both(agent, truth=None):
    """Validation rows of which the second is the first training row, perhaps with another truth."""
    row, other = agent.row(0), agent.row(0)
    other["prompt"] = [{"role": "user", "content": "Another."}]
    if truth is not None:
        row["reward_model"] = row["reward_model"] | {"ground_truth": truth}
    agent.write("val.jsonl", "".join(json.dumps(each) + "\n" for each in (other, row)))
    return [f"data.val_files={agent.folder}/val.jsonl"]


def different_lengths(agent):
    """Each row's prompt has another length, and all are too long."""
    agent.rows([agent.row(n, prompt=[{"role": "user", "content": "Say it. " * (n + 1)}]) for n in range(4)])
    return SHORT


def worked(name):
    [asked, called, *rest] = WORKED_TURNS
    return [asked, called | {"content": called["content"].replace("guess", name)}, *rest]


def one_truth(agent):
    made = [agent.row(0) | {"prompt": [{"role": "user", "content": f"Say {n}."}]} for n in range(8)]
    agent.rows([row | {"reward_model": {"ground_truth": "4"}} for row in made])


def mostly_one_truth(agent):
    made = [agent.row(0) | {"prompt": [{"role": "user", "content": f"Say {n}."}]} for n in range(8)]
    agent.rows([row | {"reward_model": {"ground_truth": "4" if n < 6 else "5"}} for n, row in enumerate(made)])


def successors(*truths, answer="str(parameters['number'] + 1)", state=False):
    """A tool that says the next number, which a worked example shows, and rows of 40 + n with these truths, each with state
    of its own for the tool or none."""

    def make(agent):
        execute(f"return ToolResponse(text={answer}), 0.0, {{}}")(agent)
        [asked, called, _, _] = WORKED_TURNS
        shown = [asked, called, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4"}]
        asks = [{"role": "user", "content": f"Is it {40 + n}?"} for n in range(len(truths))]
        agent.rows(
            [
                agent.row(
                    number,
                    prompt=[*shown, ask],
                    reward_model={"ground_truth": str(truth)},
                    **({} if state else {"extra_info": {}}),
                )
                for number, (ask, truth) in enumerate(zip(asks, truths))
            ]
        )

    return make


def two_truths(agent):
    """The third row asks what the first asks, and has another truth."""
    made = [agent.row(number) for number in range(4)]
    made[2] = made[0] | {"reward_model": made[0]["reward_model"] | {"ground_truth": "9"}}
    agent.rows(made)


def last_of_another_type(agent):
    made = [agent.row(n) | {"reward_model": {"ground_truth": 94 if n == 3 else str(n)}} for n in range(4)]
    agent.rows(made)
    agent.write("reward.py", SAME)


def rows(change, reward=REWARD):
    """All rows of the agent's, changed, and another scorer."""

    def make(agent):
        agent.rows([change(agent.row(number)) for number in range(4)])
        agent.write("reward.py", reward)

    return make


def execute(body):
    """The tool with another `execute`."""
    head, tail = TOOL.split('        if not isinstance(parameters.get("number")')
    return source("tool.py", f"{head}        {body}\n\n    async def release" + tail.split("    async def release")[1])


def contradicted(answer):
    """The tool with another `answer` than the worked example shows."""

    def make(agent):
        execute(f"return ToolResponse(text={answer}), 0.0, {{}}")(agent)
        rows(lambda row: row | {"prompt": [*WORKED_TURNS, *row["prompt"]], "extra_info": {}})(agent)

    return make


def tool_file(class_name, schema=None, **config):
    def make(agent):
        agent.tools(class_name, schema, **{key: value() if callable(value) else value for key, value in config.items()})
        agent.rows([agent.row(number, extra_info={"index": number}) for number in range(4)])

    return make


def own_tool(name="Guess", schema=SCHEMA, **config):
    return lambda agent: agent.tools(f"{agent.folder}/tool.py:{name}", schema, **config)


def function_tool(name, body):
    """The tool as a function in a file that the configuration names."""

    def make(agent):
        agent.rows([agent.row(number, extra_info={"index": number}) for number in range(4)])
        head = "from etude.tools import function_tool\n\n\n@function_tool\n"
        head += f"def {name}(number: int) -> str:\n"
        agent.write("guess.py", f'{head}    """Tries a number."""\n    {body}\n')
        return (f"{ROLLOUT}.multi_turn.tool_config_path={agent.folder}/guess.py",)

    return make


def template(change):
    def make(agent):
        folder = agent.folder / "model"
        shutil.copytree(agent.model, folder)
        file = folder / "chat_template.jinja"
        text = file.read_text()
        file.write_text(change(text))
        assert file.read_text() != text
        return (f"actor_rollout_ref.model.path={folder}",)

    return make


def judge(agent):
    kwargs = f"{{base_url:'http://127.0.0.1:{closed_port()}/v1',model:m}}"
    return ("custom_reward_function.path=etude.rewards.judge", f"custom_reward_function.reward_kwargs={kwargs}")


def servers(agent):
    return (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://127.0.0.1:{closed_port()}]")


def broken_plugin(agent):
    agent.write("plugin.py", "1 / 0")
    return (f"plugins=[{agent.folder}/plugin.py]",)


def no_truth(agent):
    truths = ({"data_source": "openai/gsm8k", "reward_model": {"ground_truth": str(n or "")}} for n in range(4))
    agent.rows([agent.row(number, **truth) for number, truth in enumerate(truths)])
    return ("custom_reward_function.path=null",)


def named_in_the_prompt(agent):
    agent.rows([agent.row(n, prompt=[{"role": "user", "content": "Call guess."}]) for n in range(4)])
    return template(lambda text: CHATML)(agent)


def unshown_world(agent):
    """An environment with a tool of its own, and a template that shows none."""
    act = '    @tool\n    def look(self) -> str:\n        """Looks."""\n        return \'a wall\'\n\n    def score'
    world = WORLD.replace("import Environment", "import tool, Environment").replace("world", "walled")
    agent.write("world.py", world.replace("    def score", act))
    own = (
        "env=[{id: walled, tasks: 8, val_tasks: 2}]",
        "custom_reward_function.path=null",
        f"plugins=[{agent.folder}/world.py]",
    )
    return (*own, "data.train_files=[]", "data.val_files=[]", *template(lambda text: CHATML)(agent))


def moved_truth(row):
    return row | {"ground_truth": row.pop("reward_model")["ground_truth"]}


def hidden_truth(row):
    return row | {"extra_info": row["extra_info"] | {"answer": row.pop("reward_model")["ground_truth"]}}


def address(path=""):
    return lambda: f"http://127.0.0.1:{closed_port()}{path}"


ERROR, WARNING = Level.ERROR, Level.WARNING
SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
TRL_REWARD = "def correct(completions, **kwargs):\n    return [1.0]\n"
OTHER_KWARGS = {"index": 0, "tools_kwargs": {"gues": {"create_kwargs": {"secret": 1}}}}
NO_TOOLS = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
MISTYPED = SCHEMA["function"] | {"parameters": {"type": "object", "properties": {"number": {"type": "strin"}}}}
SANDBOX, SEARCH = "etude.tools.builtin.code_interpreter.SandboxFusionTool", "etude.tools.builtin.search.SearchTool"
SHORT = ("data.max_prompt_length=20", "data.filter_overlong_prompts=false")
GROUPS = {
    (ERROR, "configuration"): {
        "misspelt key": ("data.train_batch_sise=4", "data.train_batch_size?"),
        "n=1 with grpo": (f"{ROLLOUT}.n=1", f"set {ROLLOUT}.n to 2 or more"),
        "no model": ("actor_rollout_ref.model.path=/no/model", "model folder not found"),
        "unregistered loss": (f"{ACTOR}.policy_loss.loss_mode=vanila", "did you mean 'vanilla'?"),
    },
    (ERROR, "machine"): {
        "no GPU": ("trainer.device=cuda", "set trainer.device to auto or cpu"),
    },
    (ERROR, "plug-ins"): {
        "plug-in that raises": (broken_plugin, "ZeroDivisionError"),
    },
    (ERROR, "model"): {
        "inexact template": (
            template(lambda text: text.replace('assistant\\n" + content', 'assistant\\n" + content[:4]')),
            "etude chat check",
        ),
    },
    (ERROR, "template"): {
        "template without tools' answers": (
            template(lambda text: NO_TOOLS + text),
            "cannot show the model a tool's answer",
        ),
        "template that shows no tools of the environment": (unshown_world, "show the model the environment's tools"),
    },
    (ERROR, "rows"): {
        "template that shows no tools": (template(lambda text: CHATML), "the model is not shown its tools (guess)"),
        "tools_kwargs of another tool": (rows(lambda row: row | {"extra_info": OTHER_KWARGS}), "did you mean 'guess'?"),
        "tool_selection of another tool": (
            rows(lambda row: row | {"extra_info": {"tool_selection": ["guesses"]}}),
            "did you mean 'guess'?",
        ),
        "no tools_kwargs": (
            rows(lambda row: row | {"extra_info": {"need_tools_kwargs": True}}),
            "need_tools_kwargs is true",
        ),
        "prompt over length": (SHORT, "(4 such rows) → raise data.max_prompt_length"),
        "prompts of different lengths": (different_lengths, "(4 such rows) → raise data.max_prompt_length"),
        "no scorer": ("custom_reward_function.path=null", "no scorer for the data source"),
        "no ground truth": (no_truth, "rows.jsonl:1: reward_model.ground_truth is missing"),
    },
    (WARNING, "rows"): {
        "few rows": (
            "trainer.total_training_steps=20",
            "4 rows, each trained on 20 times: a model learns them by heart",
        ),
        "template that shows no tools, named in the prompt": (named_in_the_prompt, "multi_turn.tools_in_system=true"),
        "validation rows that are trained on": (
            lambda agent: [f"data.val_files={agent.folder}/rows.jsonl"],
            "4 of 4 rows are also in",
        ),
        "worked example in a format that is not read": (
            rows(lambda row: row | {"prompt": [*FOREIGN_TURNS, *row["prompt"]]}),
            "rows.jsonl:1: an assistant's turn calls a tool in the format pythonic, which multi_turn.format=hermes does not",
        ),
        "worked example of a tool that does not exist": (
            rows(lambda row: row | {"prompt": [*worked(name="gues"), *row["prompt"]]}),
            "; did you mean 'guess'?",
        ),
        "worked example without an answer": (
            rows(lambda row: row | {"prompt": [*WORKED_TURNS[:2], WORKED_TURNS[3], *row["prompt"]]}),
            "rows.jsonl:1: a worked example calls 'guess' and shows no answer of it",
        ),
        "worked example whose call the question follows": (
            rows(lambda row: row | {"prompt": [*WORKED_TURNS[:2], *row["prompt"]]}),
            "rows.jsonl:1: a worked example calls 'guess' and shows no answer of it",
        ),
        "prompts that end in their answers": (
            rows(lambda row: row | {"prompt": [*row["prompt"], {"role": "assistant", "content": "It is 4."}]}),
            "rows.jsonl:1: the prompt ends in an assistant message, after which the model answers once more (4 such rows)",
        ),
        "one ground truth in all rows": (one_truth, "all questions have the ground truth '4': a model can say it"),
        "misspelt ground truth": (
            rows(
                lambda row: row | ({"reward_model": {"ground_thruth": "4"}} if row["extra_info"]["index"] == 3 else {})
            ),
            "'ground_thruth' is not read; did you mean 'ground_truth'?",
        ),
        "tools_kwargs beside extra_info": (
            rows(lambda row: row | {"extra_info": {}, "tools_kwargs": row["extra_info"]["tools_kwargs"]}),
            "'tools_kwargs' is read in extra_info only, and it stands beside it → move 'tools_kwargs' into extra_info in",
        ),
        "mostly one ground truth": (mostly_one_truth, "75 % of questions have the ground truth '4'"),
        "one validation row that is trained on": (one_row_of_both, "val.jsonl:2 is "),
        "a missing truth made text": (
            rows(
                lambda row: (
                    row | ({"reward_model": {"ground_truth": str(None)}} if row["extra_info"]["index"] == 3 else {})
                )
            ),
            "1 rows have as ground truth what was missing, made text: ",
        ),
        "two truths of one question": (two_truths, "rows.jsonl:3 says '9' and "),
        "f-string without its f": (
            rows(lambda row: row | {"prompt": [{"role": "user", "content": "Guess {a} + {{ b }}."}]}),
            "rows.jsonl:1: the question holds {a}, {b}, and nearly all rows ask the same",
        ),
        "a truth that the validation contradicts": (
            lambda agent: one_row_of_both(agent, "9"),
            "data.val_files: 1 rows ask what another asks",
        ),
    },
    (WARNING, "configuration"): {
        "temperature at which a group is much alike": (
            f"{ROLLOUT}.temperature=0.2",
            f"{ROLLOUT}.temperature=0.2 (command line) leaves a group's answers much alike",
        ),
    },
    (WARNING, "template"): {
        "parser of another format": (f"{ROLLOUT}.multi_turn.format=glm4_moe", "multi_turn.format=auto takes"),
    },
    (ERROR, "tools"): {
        "tool of a wrong class": (own_tool("Gues"), "did you mean 'Guess'?"),
        "variable of the environment": (own_tool(url="${NOT_THERE_AT_ALL}"), "NOT_THERE_AT_ALL"),
        "tool whose schema is wrong": (own_tool(schema=SCHEMA | {"function": MISTYPED}), "strin"),
    },
    (WARNING, "tools"): {
        "tool without a description": (own_tool(schema=UNDESCRIBED), "write a docstring"),
    },
    (ERROR, "batch"): {
        "batch larger than the file": ("data.train_batch_size=5", "between 1 and 4"),
    },
    (WARNING, "batch"): {
        "uneven mini-batches": (f"{ACTOR}.ppo_mini_batch_size=3", f"set {ACTOR}.ppo_mini_batch_size=2"),
    },
    (ERROR, "reward"): {
        "reward that raises": (source("reward.py", f"{SCORE}1 / 0\n"), "ZeroDivisionError"),
        "reward that is no number": (source("reward.py", f"{SCORE}float('nan')\n"), "etude reward try"),
        "reward that is text": (source("reward.py", f"{SCORE}'1.0'\n"), "expected as reward: '1.0' → let it return a"),
        "truth of another type than the scorer compares": (
            rows(lambda row: row | {"reward_model": {"ground_truth": 7}}, SAME),
            "compare with str(ground_truth)",
        ),
        "truth that is a list, which the scorer compares as a whole": (
            rows(lambda row: row | {"reward_model": {"ground_truth": [row["reward_model"]["ground_truth"]]}}, SAME),
            "the ground truth is a list; compute_score in",
        ),
        "truth of another type in a later row": (last_of_another_type, "rows.jsonl:4: the ground truth is of type int"),
        "number that the scorer compares with a truth that is text": (
            source(
                "reward.py", f"{SCORE}float(solution_str.strip().isdigit() and int(solution_str) == ground_truth)\n"
            ),
            "pays only a number that equals it → compare with float(ground_truth), or write it as number, ",
        ),
        "reward of TRL's": (
            lambda agent: agent.write("reward.py", TRL_REWARD) or ("custom_reward_function.name=correct",),
            "write `def compute_score(solution_str, ground_truth",
        ),
        "reward of another name": ("custom_reward_function.name=score", "did you mean 'compute_score'?"),
    },
    (WARNING, "reward"): {
        "reward that is turned round": (
            source(
                "reward.py", f"{SCORE}float(__import__('re').findall('[0-9]+', solution_str)[-1:] != [ground_truth])\n"
            ),
            "and a wrong answer is paid: 10 → see whether a comparison in",
        ),
        "acc that calls every answer a success": (
            source("reward.py", REWARD.replace("return ", "return {'acc': 1.0, 'score': ") + "}\n"),
            "an empty answer earns 0 and counts as a success, by its acc",
        ),
        "acc that calls every answer with words a success": (
            source(
                "reward.py", REWARD.replace("return ", "return {'acc': float(bool(solution_str)), 'score': ") + "}\n"
            ),
            "a wrong answer earns 0 and counts as a success, by its acc → let compute_score in",
        ),
        "reward for nothing": (source("reward.py", f"{SCORE}0.5\n"), "an empty answer earns 0.5"),
        "penalty on length alone": (
            source("reward.py", f"{SCORE}-0.001 * len(solution_str)\n"),
            "the ground truth earns nothing, alone or",
        ),
        "reward on a part of the answer": (
            source("reward.py", f"{SCORE}float(str(ground_truth) in solution_str)\n"),
            "a longer answer that contains the right one earns 1",
        ),
        "reward on the beginning of the answer": (
            source("reward.py", f"{SCORE}float(solution_str.startswith(str(ground_truth)))\n"),
            "a longer answer that begins with the right one earns 1 in 3 of 3 rows, the right one 1: '17'",
        ),
        "reward for a part of the answer": (
            rows(
                lambda row: row | {"reward_model": {"ground_truth": "94"}},
                f"{SCORE}float(solution_str != '' and solution_str in ground_truth)\n",
            ),
            "a part of the right answer earns 1 in 3 of 3 rows, the right one 1: '9' → let compute_score in",
        ),
        "reward of which a tenth is for any text": (
            source("reward.py", REWARD.replace("return ", "return 0.1 * (len(solution_str) > 20) + 0.9 * ")),
            "long nonsense earns 0.1 in 3 of 3 rows, the right one 0.9: 'zorp quibble",
        ),
        "reward that looks for a tool's answer in the model's words": (
            source("reward.py", f"{REWARD}    if '<tool_response>' in solution_str:\n        return 1.0\n"),
            "reward.py:7 looks for <tool_response>, which its solution_str never has: reward_model.score_text=assistant",
        ),
        "truth in the wrong column": (rows(moved_truth, SAME), "move ground_truth to reward_model.ground_truth"),
        "truth beside the index": (rows(hidden_truth, SAME), "move extra_info.answer to"),
    },
    (ERROR, "services"): {
        "unreachable sandbox": (
            tool_file(SANDBOX, sandbox_fusion_url=address("/run_code")),
            "run `etude sandbox serve`",
        ),
        "unreachable search": (
            tool_file(SEARCH, retrieval_service_url=address("/retrieve")),
            "run `etude retrieve serve`",
        ),
        "unreachable judge": (judge, "start the judge's server"),
        "unreachable engine": (servers, "or correct actor_rollout_ref.rollout.server_urls"),
    },
    (ERROR, "memory"): {
        "more memory than there is": (
            f"{ROLLOUT}.kv_cache_memory_mb=1000000000",
            "lower actor_rollout_ref.rollout.kv_cache_memory_mb",
        ),
    },
    (WARNING, "rollout"): {
        "response too short for a call": ("data.max_response_length=12", "raise data.max_response_length"),
        "one turn only": (f"{ROLLOUT}.multi_turn.max_assistant_turns=1", "max_assistant_turns to 2 or more"),
        "tool that raises": (execute("return 1 / 0"), "raise ToolError"),
        "reward that reads the call with the answer": (
            source("reward.py", f"{SCORE}float(solution_str.strip() == str(ground_truth))\n"),
            "'1' alone earns 1, and after a call of 'guess' 0: solution_str begins with the call → set "
            "reward_model.score_text=final_turn, or let compute_score in",
        ),
        "tool that refuses from its second conversation on": (
            execute(
                "from etude.tools import ToolError; self.used = getattr(self, 'used', 0) + 1\n        if self.used > 1:\n"
                "            raise ToolError('connection is closed')\n        return ToolResponse(text='higher'), 0.0, {}"
            ),
            "tool 'guess' answers 'higher', and in the next conversation refuses the same call: connection is closed",
        ),
        "worked example with another answer than the tool's": (
            rows(lambda row: row | {"prompt": [*WORKED_TURNS, *row["prompt"]], "extra_info": {}}),
            "the worked example shows 'yes' as the answer of guess to {\"number\": 3}; it answers 'wrong'",
        ),
        "worked example whose call the tool refuses": (
            lambda agent: (
                rows(lambda row: row | {"prompt": [*WORKED_TURNS, *row["prompt"]], "extra_info": {}})(agent)
                or execute("from etude.tools import ToolError; raise ToolError('no such number')")(agent)
            ),
            "the answer of guess to {\"number\": 3}; it refuses it: 'no such number'",
        ),
        "tool that answers a worked example's call by chance, and refuses what is tried first": (
            lambda agent: (
                rows(lambda row: row | {"prompt": [*WORKED_TURNS, *row["prompt"]], "extra_info": {}})(agent)
                or execute(
                    "import random; from etude.tools import ToolError\n        if parameters['number'] != 3:\n"
                    "            raise ToolError('unknown')\n"
                    "        return ToolResponse(text=str(random.random())), 0.0, {}"
                )(agent)
            ),
            "tool 'guess' answers one call in fresh conversations of one row differently: '0.",
        ),
        "worked example with the right answer of a tool that ignores what it is asked": (
            contradicted("'7'"),
            "tool.py first, which answers other arguments alike; if they shall not matter, write what the tool answers into",
        ),
        "worked example with a wrong answer of a tool that heeds what it is asked": (
            contradicted("str(parameters['number'])"),
            "it answers '3' → mend ",
        ),
        "function that draws by chance, whose file is named as it is": (
            function_tool("draw", "import random\n    return str(random.random())"),
            "tool 'draw' answers one call in fresh conversations of one row differently: '0.",
        ),
        "function that prints its answer": (
            function_tool("show", "print(number)"),
            "its answer to {'number': 1} is 'None': the model learns nothing from it → let",
        ),
        "tool that draws by chance": (
            execute("import random; return ToolResponse(text=str(random.random())), 0.0, {}"),
            "tool 'guess' answers one call in fresh conversations of one row differently: '0.",
        ),
        "tool that counts the calls of all conversations": (
            execute(
                "self.used = getattr(self, 'used', 0) + 1; return ToolResponse(text=f'call {self.used}'), 0.0, {}",
            ),
            "keep no state of earlier conversations",
        ),
        "wrong ground truths beside a worked example": (
            successors(41, 43, 43, 44),
            '1 of 4 rows do not pay for what the worked example does: <tool_call> {"name": "guess", "arguments": '
            "{\"number\": 41}} </tool_call> is answered '42', 'It is 42' earns nothing, and the ground truth is '43'",
        ),
        "wrong ground truths of rows that give the tool state": (
            successors(41, 43, 43, 44, state=True),
            "1 of 4 rows do not pay for what the worked example does",
        ),
        "tool that answers alike whatever state it is given": (
            successors(41, 42, 43, 44, answer="'7'", state=True),
            "shows '4' as the answer of guess to {\"number\": 3}; it answers '7' → mend ",
        ),
        "tool that answers all rows alike": (
            successors(41, 42, 43, 44, answer="'4'"),
            "tool.py: it answers all of them alike",
        ),
        "tool whose reward is no component": (
            lambda agent: (
                execute("return ToolResponse(text='higher'), 0.25, {}")(agent)
                or ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score]"]
            ),
            "gdpo_reward_keys: what tools pay (step) counts as reward, and trains nothing → name step, too",
        ),
    },
    (ERROR, "rollout"): {
        "tool that does not answer": (execute("import asyncio; await asyncio.sleep(60)"), "etude tools call"),
        "tool that keeps the first conversation's state": (
            execute(
                "self.first = getattr(self, 'first', self.secrets[instance_id])\n"
                "        return ToolResponse(text=str(self.first)), 0.0, {}"
            ),
            "conversations see each other's state: '",
        ),
        "tool that keeps the first conversation's call": (
            lambda agent: (
                rows(lambda row: row | {"extra_info": {}})(agent)
                or execute(
                    "self.first = getattr(self, 'first', parameters['number'])\n"
                    "        return ToolResponse(text=str(self.first)), 0.0, {}"
                )(agent)
            ),
            "conversations see each other's state: '",
        ),
        "tool that does not answer its second call": (
            execute(
                "import asyncio; self.used = getattr(self, 'used', 0) + 1\n        if self.used > 1:\n"
                "            await asyncio.sleep(60)\n        return ToolResponse(text='higher'), 0.0, {}"
            ),
            "no answer within",
        ),
    },
}
CASES = {name: (*case, *found) for found, group in GROUPS.items() for name, case in group.items()}


@pytest.mark.parametrize("state", [False, True])
def test_rows_that_a_worked_example_solves_are_right(agent, state):
    successors(41, 42, 43, 44, state=state)(agent)
    assert "worked example" not in str(inspect(agent, seconds=0.5).all)


def test_a_worked_example_of_another_state_is_right(agent):
    agent.rows([each | {"prompt": [*WORKED_TURNS, *each["prompt"]]} for each in map(agent.row, range(4))])
    assert "worked example" not in str(inspect(agent, seconds=0.5).all)


@pytest.mark.parametrize(
    ("body", "description"),
    [
        ("import random; return ToolResponse(text=random.choice('ab')), 0.0, {}", "Flips a coin."),
        (
            "self.used = getattr(self, 'used', {}); self.used[instance_id] = self.used.get(instance_id, 0) + 1\n"
            "        return ToolResponse(text=f'call {self.used[instance_id]}'), 0.0, {}",
            "Counts.",
        ),
    ],
    ids=["by chance, as it says", "by what its conversation did"],
)
def test_a_tool_that_may_answer_one_call_differently_is_not_accused(agent, body, description):
    execute(body)(agent)
    own_tool(schema=SCHEMA | {"function": SCHEMA["function"] | {"description": description}})(agent)
    assert [str(each) for each in inspect(agent).all if each.level is not Level.OK] == []


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("solution_str = solution_str.replace('<tool_response>', '')", "assistant"),
        ("called = '<tool_call>' in solution_str", "assistant"),
        ("told = '<tool_response>' in solution_str", "full"),
        ("'Of <tool_response> nothing is read.'", "assistant"),
    ],
)
def test_a_reward_that_finds_the_tags_which_it_names_is_not_accused(agent, line, setting):
    agent.write("reward.py", REWARD.replace("    return ", f"    {line}\n    return "))
    found = inspect(agent, f"reward_model.score_text={setting}", rolls_out=False)
    assert [each.message for each in found.all if each.level is not Level.OK] == []


@pytest.mark.parametrize(
    "wanted", ["' and '.join(ground_truth)", "'<answer>' + '</answer><answer>'.join(ground_truth) + '</answer>'"]
)
def test_a_reward_that_wants_all_of_a_list_in_its_own_form_is_not_accused(agent, wanted):
    rows(
        lambda row: row | {"reward_model": {"ground_truth": ["Paris", "Rome"]}},
        f"{SCORE}float(solution_str == {wanted})\n",
    )(agent)
    assert not any(
        "ground truth" in str(each) for each in inspect(agent, rolls_out=False).all if each.level is not Level.OK
    )


def test_a_reward_that_punishes_what_is_wrong_and_pays_nothing_is_not_accused(agent):
    agent.write("reward.py", REWARD.replace("return ", "return -1.0 + "))
    found = inspect(agent, rolls_out=False).all
    assert [each.message for each in found if each.level is not Level.OK] == []
    assert any("earns 0, a wrong answer -1" in each.message for each in found)


def test_a_reward_that_takes_text_alone_is_no_error_where_no_usual_answer_is_paid(agent):
    agent.write("reward.py", f"{SCORE}float(solution_str == 'It is ' + ground_truth.strip())\n")
    found = inspect(agent, rolls_out=False)
    assert [each.message for each in found.all if each.level is Level.ERROR] == []
    assert any("the ground truth earns nothing" in each.message for each in found.all if each.level is Level.WARNING)


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("statement", "warned"),
    [
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
            "unittest.main(exit=False)",
            True,
        ),
        ("f(1) == 2", True),
        ("assert (f(1), 2)", True),
        ("assert f(1) == 2", False),
        ("assert f([]) is None and f([1]) == 1", False),
        ("while not f(1):\n    pass\nassert f(1) == 2", False),
    ],
)
def test_tests_that_every_program_passes(agent, statement, warned):
    rows(lambda row: row | {"data_source": "mbpp", "reward_model": {"ground_truth": {"assert_case": [statement]}}})(
        agent
    )
    found = inspect(agent, "custom_reward_function.path=null", rolls_out=False, seconds=4.0)
    [tried] = [each for each in found.all if each.subject == "reward"]
    assert tried.level is not Level.ERROR
    assert (tried.level is Level.WARNING, "a program that does nothing earns 1" in tried.message) == (warned, warned)


@pytest.mark.parametrize("length", [27, 28])
def test_a_call_that_just_fits_in_a_response_refuses_nothing(agent, length):
    found = [str(each) for each in inspect(agent, f"data.max_response_length={length}").all]
    assert not any("refused" in each for each in found)
    assert any("raise data.max_response_length" in each for each in found)


@pytest.mark.parametrize("name", CASES)
def test_a_misconfiguration_is_found_with_its_remedy(agent, name):
    make, text, level, subject = CASES[name]
    settings = (make(agent) or ()) if callable(make) else [make] if isinstance(make, str) else make
    found = inspect(agent, *settings, seconds=0.5)
    lines = [f"{each.message} → {each.fix}" for each in found.all if (each.level, each.subject) == (level, subject)]
    assert any(text in line for line in lines), "\n".join(map(str, found.all))
    assert found.failed == (level is ERROR), "\n".join(map(str, found.all))


def test_a_machine_that_is_too_small_comes_with_the_keys_to_change(agent, monkeypatch):
    usage, weights = shutil.disk_usage("/"), count_weights(str(agent.model))
    monkeypatch.setattr("etude.checks.resources._memory_here", lambda _: (1.0, 1.0, "of memory"))
    for free, level in ((0, ERROR), (80 * weights, WARNING)):
        monkeypatch.setattr(
            "etude.checks.resources.shutil.disk_usage", lambda place, free=free: usage._replace(free=free)
        )
        found = {each.subject: each for each in inspect(agent, "trainer.max_actor_ckpt_to_keep=9", rolls_out=False).all}
        assert (found["memory"].level, found["disk"].level) == (ERROR, level), found["disk"]
        assert "actor_rollout_ref.model.lora_rank=16" in found["memory"].fix
        assert "lower trainer.max_actor_ckpt_to_keep" in found["disk"].fix


@pytest.mark.parametrize(
    ("millions", "rate", "lora", "said"),
    [
        (135, "1e-6", 0, "hardly moves a model of 135 million weights"),
        (135, "2e-5", 0, ""),
        (135, "5e-4", 0, "may spoil a model of 135 million weights"),
        (135, "2e-5", 16, "hardly moves a model of 135 million weights with LoRA"),
        (135, "5e-4", 16, ""),
        (0.6, "1e-6", 0, "hardly moves a model of 1 million weights"),
        (0.6, "1e-5", 0, ""),
        (0.6, "4e-3", 0, ""),
        (0.6, "5e-3", 0, "may spoil a model of 1 million weights"),
        (7000, "1e-6", 0, ""),
    ],
)
def test_a_rate_far_from_the_one_at_which_such_a_model_learnt_is_a_warning(millions, rate, lora, said, monkeypatch):
    monkeypatch.setattr("etude.checks.resources.count_weights", lambda model: int(millions * 1e6))
    settings = SimpleNamespace(lora_rank=lora, path="model"), SimpleNamespace(optim=OptimOptions(lr=float(rate)))
    setup = SimpleNamespace(options=SimpleNamespace(model=settings[0], actor=settings[1]))
    found = [*learning_rate(setup)]
    assert [each.message for each in found] == [f"{float(rate):g} {said}"] * bool(said)
    learnt = "0.0003" if millions < 1 else "0.0005" if lora else "2e-05"
    assert all(f"optim.lr={learnt} " in each.fix for each in found)


def test_micro_batches_that_do_not_fit_come_with_a_size_that_does(agent, monkeypatch):
    """What is advised is followed: either of the two ways fits."""
    long = ("data.max_response_length=2000", f"{ROLLOUT}.max_model_len=null")
    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing"

    def memory(*overrides, given="false"):
        settings = (*long, f"{checkpointing}={given}", *overrides)
        return {each.subject: each for each in inspect(agent, *settings, rolls_out=False).all}["memory"]

    def parts(found):
        needed = re.search(r"up to ([0-9.]+) GiB .* activations ([0-9.]+), .*up to ([0-9,]+) tokens", found.message)
        return (*(float(each) * 2**30 for each in needed.groups()[:2]), int(needed[3].replace(",", "")))

    whole, activations, tokens = parts(memory())
    assert tokens <= 16_384
    assert activations > 0.05 * 2**30
    free = (whole - 0.6 * activations) / 0.9
    monkeypatch.setattr("etude.checks.resources._memory_here", lambda _: (8 * free, free, "here"))
    found = memory()
    assert found.level is WARNING
    ways = [way.split(" and ") for way in found.fix.removeprefix("set ").split(", or ")]
    assert f"{ACTOR}.ppo_max_token_len_per_gpu=" in ways[0][0]
    assert f"{checkpointing}=true" in ways[1]
    assert [memory(*way).level for way in ways] == [Level.OK, Level.OK]
    recomputed, fewer, _ = parts(memory(given="true"))
    assert fewer < 0.9 * activations
    for room, said in ((0.5 * (recomputed + whole), "with gradient checkpointing"), (1.1 * whole, "tokens)")):
        monkeypatch.setattr("etude.checks.resources._memory_here", lambda _, room=room: (9 * room, room / 0.9, "here"))
        chosen = memory(given="null")
        assert (chosen.level, said in chosen.message) == (Level.OK, True), chosen
    monkeypatch.setattr(
        "etude.checks.resources._memory_here",
        lambda _: (free, (whole - 0.98 * activations) / 0.9, "here"),
    )
    assert "data.max_response_length" in memory().fix


@pytest.mark.parametrize(("flags", "level"), [("fpu avx512f", WARNING), ("fpu avx512f avx512_bf16", None), ("", None)])
def test_a_dtype_that_the_cpu_emulates(agent, tmp_path, monkeypatch, flags, level):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n" if flags else "")
    monkeypatch.setattr("etude.checks.resources._CPU_INFO", tmp_path / "cpuinfo")
    found = inspect(agent, "actor_rollout_ref.model.dtype=bf16", rolls_out=False).all
    assert [(each.level, each.fix) for each in found if each.subject == "precision"] == (
        [(level, "set actor_rollout_ref.model.dtype=float32")] if level else []
    )


def test_a_teacher_that_does_not_answer(agent):
    url = address()()
    found = inspect(agent, f"distillation.teachers={{default:'{url}'}}", rolls_out=False)
    [fix] = [each.fix for each in found.all if each.subject == "services"]
    assert fix == f"start the teacher's server at {url}, or correct distillation.teachers.default"


def test_everything_wrong_is_found_at_once(agent):
    agent.rows([agent.row(0), agent.row(1, extra_info=OTHER_KWARGS), agent.row(2, prompt=[])])
    agent.write("reward.py", f"{SCORE}1 / 0\n")
    found = inspect(agent, "data.train_batch_sise=4", "trainer.device=cuda", f"{ROLLOUT}.n=1")
    errors = [(each.subject, each.message) for each in found.all if each.level is Level.ERROR]
    assert [subject for subject, _ in errors] == [
        *["configuration"] * 2,
        "machine",
        *["rows"] * 2,
        "batch",
        "reward",  # and not again where the rollout is scored
    ], errors


def test_rows_that_differ_in_what_tools_are_given_contradict_nobody_where_tools_do_not_load(agent):
    agent.tools(f"{agent.folder}/tool.py:Gues")
    same = [{"role": "user", "content": "Which number is it?"}]
    agent.rows([agent.row(number, prompt=same) for number in range(4)])
    found = inspect(agent)
    assert [each.subject for each in found.all if each.level is ERROR] == ["tools"]
    assert not [each.message for each in found.all if "ask what another asks" in each.message]


def test_tools_that_do_not_load_hide_neither_each_other_nor_rows_nor_the_reward(agent):
    agent.write(
        "tools.py",
        "from etude.tools import function_tool\n\n\n@function_tool\ndef first(a):\n    return a\n\n\n"
        "@function_tool\ndef fine(a: str) -> str:\n    return a\n\n\n@function_tool\ndef second(b):\n    return b\n",
    )
    agent.tools(f"{agent.folder}/tool.py:Gues")
    agent.rows([agent.row(0), agent.row(1, prompt=[])])
    key = f"{ROLLOUT}.multi_turn.function_tool_path"
    found = inspect(agent, f"{key}={agent.folder}/tools.py", "custom_reward_function.name=scroe")
    errors = [(each.subject, each.message) for each in found.all if each.level is Level.ERROR]
    said = ["'Gues'", "parameter 'a'", "parameter 'b'", "scroe", "rows.jsonl:2"]
    assert all(any(each in message for _, message in errors) for each in said), errors
    assert [each.subject for each in found.all if each.level is Level.SKIPPED] == ["template", "rollout"]


@pytest.mark.parametrize("model", ["/no/model", "null"])
def test_a_model_that_is_missing_hides_neither_tools_nor_rows_nor_the_reward(agent, model):
    """What only the model's tokenizer can tell is said not to have been checked."""
    missing = f"actor_rollout_ref.model.path={model}"
    found = inspect(agent, missing)
    assert [each.subject for each in found.all if each.level is ERROR] == ["configuration"]
    said = {each.subject: each.message for each in found.all if each.level is Level.OK}
    assert said["tools"] == "loaded: guess"
    assert "4 read; lengths not checked" in said["rows"]
    assert "the ground truth alone earns 1" in said["reward"]
    assert {each.subject for each in found.all if each.level is Level.SKIPPED} == {"template", "machine", "rollout"}
    agent.rows([agent.row(0), agent.row(1, extra_info=OTHER_KWARGS), agent.row(2, prompt=[]), agent.row(3)])
    agent.write("constant.py", f"{SCORE}0.5\n")
    found = inspect(agent, missing, f"custom_reward_function.path={agent.folder}/constant.py")
    wrong = [(each.level, each.subject) for each in found.all if each.level in (ERROR, WARNING)][1:]
    assert wrong == [(ERROR, "rows")] * 2 + [(ERROR, "batch"), (WARNING, "reward")]
    agent.tools(f"{agent.folder}/tool.py:Gues")
    assert any("did you mean 'Guess'?" in f"{each.message}{each.fix}" for each in inspect(agent, missing).all)


@pytest.mark.parametrize("given", [["agent/agent.yaml"], ["agent"], ["-cp", "agent/agent.yaml"], ["-cn", "x/agent"]])
def test_a_path_in_the_wrong_place_is_told_where_it_goes(tmp_path, monkeypatch, capsys, given):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.yaml").write_text("trainer: {}\n")
    monkeypatch.chdir(tmp_path)
    assert run(cli, ["check", *given]) == 1
    said = " ".join(capsys.readouterr().out.split())
    where = "--config-path" if given == ["-cn", "x/agent"] else "--config-path agent --config-name"
    assert where in said


@pytest.mark.parametrize("own", [False, True], ids=["of Étude", "one's own"])
@pytest.mark.parametrize(
    ("said", "setting", "advice"),
    [
        ("1 examples", "data.max_length=512", ""),
        ("more than data.max_length=2", "data.max_length=2", "raise data.max_length, or leave the row out"),
        ("unknown key data.max_lenght", "data.max_lenght=3", "did you mean"),
    ],
)
def test_supervised_training_is_checked_too(tiny, tmp_path, capsys, own, said, setting, advice):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 1}\n")
    named = ["-cp", str(tmp_path), "-cn", "mine", "--sft"] if own else ["-cn", "sft", "data.train_batch_size=1"]
    given = [f"data.train_files={tmp_path}/rows.jsonl", f"model.path={tiny.model}", setting]
    run_dir = tmp_path / "run"
    status = run(cli, ["check", *named, *given, f"trainer.default_local_dir={run_dir}"])
    out = " ".join(capsys.readouterr().out.split())
    assert status == int(bool(advice)), out
    assert said in out
    assert advice in out
    assert not run_dir.exists()


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in EXAMPLES.glob("*/agent.yaml")), ids=lambda path: path.name
)
def test_an_examples_configuration_is_right(tiny, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    found = inspect_run("agent", [f"actor_rollout_ref.model.path={tiny.model}"], folder, rolls_out=False)
    wrong = [each for each in found.all if each.level is Level.ERROR]
    prepared = ("data.train_files", "data.val_files")  # by what its README says to run first
    assert [each for each in wrong if each.subject != "services" and not each.message.startswith(prepared)] == []


@pytest.mark.parametrize("name", ["quickstart", "gsm8k_tool"])
def test_a_configuration_of_the_package_is_right(tiny, name):
    data = [f"data.{split}_files={tiny.folder}/data/train.parquet" for split in ("train", "val")]
    given = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    found = inspect_run(name, [*data, *given, f"actor_rollout_ref.model.path={tiny.model}"], None, rolls_out=False)
    assert [each for each in found.all if each.level is Level.ERROR] == []


def test_a_missing_file_is_told_once(agent):
    found = inspect(agent, "data.train_files=[nowhere/nope.jsonl]")
    assert ["nope.jsonl" in each.message for each in found.all if each.level is Level.ERROR] == [True], found.all


def test_a_loop_that_sets_its_own_reward_needs_no_scorer(agent):
    example = Path(__file__).parents[2] / "examples" / "openai_agent"
    settings = [f"actor_rollout_ref.model.path={agent.model}", "data.max_prompt_length=512"]
    found = inspect_run("agent", settings, example, rolls_out=False)
    assert [each for each in found.all if each.subject in ("rows", "reward") and each.level is not Level.OK] == []


def test_the_table_and_json_say_the_same(agent, capsys):
    arguments = ["check", *agent.arguments(f"{ROLLOUT}.n=1", "trainer.device=cuda"), "--no-rollout"]
    assert run(cli, arguments) == 1
    table = capsys.readouterr().out
    assert run(cli, [*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    for each in found["findings"]:
        if each["subject"] in ("memory", "disk"):  # what is free changes
            continue
        assert each["message"] in table
        assert each["fix"] in table
    assert table.splitlines()[-1] == "2 errors, 0 warnings"
    assert run(cli, ["check", *agent.arguments(), "--no-rollout", "--json"]) == 0


def test_training_logs_the_cheap_part_and_begins(agent, caplog):
    make, *_ = CASES["unreachable search"]
    make(agent)
    steps = ["trainer.total_training_steps=1", "trainer.report=false", "trainer.logger=[]"]
    with caplog.at_level("WARNING", logger="etude"):
        assert run(cli, ["train", *agent.arguments(*steps)]) == 0
    [line] = [record.getMessage() for record in caplog.records if record.name == "etude.trainer.run"]
    assert "services: tool search.retrieval_service_url: nothing answers" in line
    assert "run `etude retrieve serve`" in line
