"""`etude env test`: what an agent could be paid for, and what trajectories could leave to each other, is found."""

import json

import pytest
from agent_stage import REWARD, TOOL, Agent, every_finding_has_specific_advice
from house_stage import ROLLOUT

from etude.checks.findings import Level
from etude.cli.main import cli, run
from etude.testing import inspect_environment

ENVIRONMENT = '''
"""Guess a number, in words."""

from etude.agents.environments import TextEnv, register_env


@register_env("NAME")
class Guess(TextEnv):
    secret = 0

    def reset(self, *, seed=None, options=None):
        SELF.secret = 1 + options["index"]
        return "Say a number.", {}

    def step(self, action):
        right = str(SELF.secret) in action.split()
        return f"no, it is not {SELF.secret + 1}", float(right), right, False, {}
'''


__all__ = ["every_finding_has_specific_advice"]


@pytest.fixture
def agent(tmp_path, tiny):
    return Agent(tmp_path, tiny.model)


def inspect(agent, *overrides, **options):
    name, *rest = agent.arguments(*overrides)
    return inspect_environment(name.partition("=")[2], rest, None, **{"rows": 4, **options})


def listed(found):
    return [(each.level, each.subject, each.message, each.fix) for each in found.all if each.level is not Level.OK]


def test_a_tool_that_conforms(agent):
    found = inspect(agent)
    assert listed(found) == []
    agents = ["empty agent", "copying agent", "guessing agent", "random agent", "ground truth"]
    assert [each.subject for each in found.all] == [
        *agents,
        "determinism",
        "isolation",
        "leaks",
        "time",
        "cancelled call",
        "late call",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [('"right" if parameters["number"] == self.secrets[instance_id] else "wrong"', '"ok"')],
            "all calls got one answer",
        ),
        ([('if not isinstance(parameters.get("number"), int)', "if True")], "no call was answered"),
    ],
)
def test_isolation_is_not_ticked_where_no_two_answers_differ(agent, changes, said):
    tool(*changes)(agent)
    [isolation] = [each for each in inspect(agent).all if each.subject == "isolation"]
    assert (isolation.level, isolation.message.split("; ")[0]) == (Level.SKIPPED, f"not known: {said}")


SUM = '''
from etude.tools import ToolError, function_tool


@function_tool
def add(terms: str) -> str:
    """Adds numbers.

    Args:
        terms: written as 2+3
    """
    if not terms.replace("+", "").isdecimal():
        raise ToolError("write 2+3")
    return str(sum(map(int, terms.split("+"))))
'''


@pytest.mark.parametrize("shown", [True, False])
def test_isolation_is_tried_with_the_call_of_a_worked_example(agent, shown):
    name = "add" if shown else "total"  # a process knows a function's name once
    agent.write("add.py", SUM.replace("add(", f"{name}("))
    call = '<tool_call>\n{"name": "add", "arguments": {"terms": "2+3"}}\n</tool_call>'
    turns = [("user", "Sum of 2 and 3?"), ("assistant", call), ("tool", "5"), ("assistant", "5")] if shown else []
    prompt = [{"role": role, "content": text} for role, text in [*turns, ("user", "Sum of 4 and 5?")]]
    agent.rows([agent.row(n, prompt=prompt, extra_info={"index": n}) for n in range(4)])
    tools = f"{ROLLOUT}.multi_turn.tool_config_path={agent.folder}/add.py"
    sizes = ("data.max_prompt_length=700", f"{ROLLOUT}.max_model_len=1024")
    [isolation] = [each for each in inspect(agent, tools, *sizes).all if each.subject == "isolation"]
    assert isolation.level is (Level.OK if shown else Level.SKIPPED), isolation.message
    assert shown or "Field(examples=[…])" in isolation.message


def reward(expression):
    return lambda agent: agent.write(
        "reward.py", REWARD.replace("solution_str.split()[-1:] == [ground_truth]", expression)
    )


def tool(*changes):
    def make(agent):
        text = TOOL
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        agent.write("tool.py", text)

    return make


def prompt_with_the_truth(agent):
    rows = [agent.row(n, prompt=[{"role": "user", "content": f"The number is number {n}."}]) for n in range(4)]
    agent.rows([row | {"reward_model": {"ground_truth": f"number {n}"}} for n, row in enumerate(rows)])
    reward("ground_truth in solution_str")(agent)


def plan_of_all_truths(agent):
    plan = {"role": "system", "content": "Rooms: " + ", ".join(f"F8{n}" for n in range(4))}
    rows = [agent.row(n, prompt=[plan, {"role": "user", "content": f"Where is guest {n}?"}]) for n in range(4)]
    agent.rows([row | {"reward_model": {"ground_truth": f"F8{n}"}} for n, row in enumerate(rows)])


def on_the_first_call(statement):
    counted = (
        f"self.count = getattr(self, 'count', 0) + 1\n        if self.count == 1:\n            {statement}\n        "
    )
    return tool((ANSWER, f"{counted}{ANSWER}"))


ANSWER = 'return ToolResponse(text="right" if parameters["number"] == self.secrets[instance_id] else "wrong"), 0.0, {}'
KEPT = """vars(self).setdefault("kept", {{}})[{key}] = parameters["number"]
        await __import__("asyncio").sleep(0.01)
        return ToolResponse(text=str(self.kept[{key}])), 0.0, {{}}"""
CREATE = "self.secrets[instance_id] = secret"
CHECK = 'if not isinstance(parameters.get("number"), int):\n            raise ToolError("give a whole number")\n'
ERROR, WARNING = Level.ERROR, Level.WARNING


CASES = {
    "pay for nothing": (
        reward("solution_str.strip() == ''"),
        (ERROR, "empty agent", "it earns 1 in row 0, and in 3 others", "without an answer"),
    ),
    "pay for a copy of the prompt": (
        prompt_with_the_truth,
        (ERROR, "copying agent", "it earns 1 in row 0", "score what the model did"),
    ),
    "truth in the prompt": (
        prompt_with_the_truth,
        (WARNING, "ground truth", "row 0: the prompt holds the ground truth, 'number 0'", "leave it out"),
    ),
    "short truths in one prompt for all": (
        plan_of_all_truths,
        (WARNING, "ground truth", "row 0: the prompt holds the ground truth, 'F80'", "leave it out"),
    ),
    "pay for guesses": (
        reward("ground_truth in solution_str.split()"),
        (ERROR, "guessing agent", "it earns 1 in row 0", "not any that is mentioned"),
    ),
    "pay for calls": (
        tool((", 0.0, {}", ", 0.1, {}")),
        (WARNING, "random agent", "rows: 0.1 for a call of guess", "pay for what was achieved"),
    ),
    "a scorer that raises": (
        reward("1 / 0"),
        (
            ERROR,
            "empty agent",
            "4 of 4 trajectories were dropped: scoring: 'compute_score' of",
            "reward.py:6; a failure drops",
        ),
    ),
    "no check of arguments": (
        tool((CHECK, ""), ('parameters["number"] ==', '1 / (parameters["number"] - 1) ==')),
        (WARNING, "random agent", "'guess' raises on {\"number\": 1}", "raise ToolError(text)"),
    ),
    "a call that blocks the event loop": (
        on_the_first_call("import time; time.sleep(4)"),
        (ERROR, "time", "'guess' blocks the event loop", "asyncio.to_thread"),
    ),
    "a slow call": (
        on_the_first_call("import asyncio; await asyncio.sleep(1.1)"),
        (WARNING, "time", "of the 2 s that it has", "config.timeout"),
    ),
    "unseeded randomness": (
        tool(('text="right"', 'text=str(id(object())) + str(__import__("random").random()) if True else "right"')),
        (WARNING, "determinism", "the same calls were answered differently", "seed randomness"),
    ),
    "state on the tool itself": (
        tool((CREATE, f"{CREATE}; self.last = secret"), ("self.secrets[instance_id] else", "self.last else")),
        (ERROR, "isolation", "sees the others: 'right' and 'wrong'", "under its instance id"),
    ),
    "what a call leaves on the tool itself": (
        tool((ANSWER, KEPT.format(key="'any'"))),
        (ERROR, "isolation", "row 0 sees the others: ", "under its instance id"),
    ),
    "state that two trajectories of a row share": (
        tool((ANSWER, KEPT.format(key="self.secrets[instance_id]"))),
        (ERROR, "isolation", "row 0 sees the others: ", "under its instance id"),
    ),
    "files left open": (
        tool((CREATE, f"{CREATE}; self.files = [*getattr(self, 'files', []), open(__file__)]")),
        (ERROR, "leaks", "more files after 12 trajectories", "in release"),
    ),
    "tasks left running": (
        tool(
            ("from etude.tools", "import asyncio\n\nfrom etude.tools"),
            (
                CREATE,
                f"{CREATE}; self.kept = [self.__dict__.get('kept'), asyncio.ensure_future(asyncio.sleep(99))]",
            ),
        ),
        (ERROR, "leaks", "more tasks after 12 trajectories", "cancel and await them"),
    ),
    "a release that needs a call": (
        tool(
            (ANSWER, f"self.called = {{instance_id}}\n        {ANSWER}"),
            ("del self.secrets[instance_id]", "self.called.remove(instance_id)"),
        ),
        (ERROR, "cancelled call", "'guess': 1 created, 0 released", "let release of 'guess'"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_with_its_remedy(agent, name):
    make, (level, subject, message, fix) = CASES[name]
    if name == "a slow call":
        agent.tools(f"{agent.folder}/tool.py:Guess", timeout=2)
    make(agent)
    found = listed(inspect(agent))
    assert any((level, subject) == each[:2] and message in each[2] and fix in each[3] for each in found), "\n".join(
        map(str, found)
    )


@pytest.mark.parametrize(("read", "paid"), [("[-1:] == [ground_truth]", False), (".count(ground_truth) > 0", True)])
def test_a_scorer_that_reads_the_last_code_does_not_pay_guesses(agent, read, paid):
    agent.rows([agent.row(n, reward_model={"style": "rule", "ground_truth": f"KX{41 + n}"}) for n in range(4)])
    reward(rf"__import__('re').findall(r'\b[A-Z]{{2}}\d{{2}}\b', solution_str){read}")(agent)
    errors = [subject for level, subject, *_ in listed(inspect(agent)) if level is ERROR]
    assert errors == ["guessing agent"] * paid


def test_a_code_is_guessed_whole_where_answers_are_short(agent):
    agent.rows([agent.row(n, reward_model={"style": "rule", "ground_truth": f"F-30{n}-AB"}) for n in range(4)])
    reward("ground_truth in solution_str")(agent)
    found = listed(inspect(agent, "data.max_response_length=60"))
    assert [message for _, subject, message, _ in found if subject == "guessing agent"] == [
        "it earns 1 in row 0, and in 3 others"
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_an_environment(agent, shared):
    name = f"guess_{shared}"
    agent.write("env.py", ENVIRONMENT.replace("NAME", name).replace("SELF", "Guess" if shared else "self"))
    agent.rows([agent.row(number, extra_info={"index": number}) for number in range(4)])
    found = inspect(
        agent,
        f"plugins=[{agent.folder}/env.py]",
        f"actor_rollout_ref.env.name={name}",
        "reward_model.enable=false",
        "custom_reward_function.path=null",
        f"{ROLLOUT}.multi_turn.tool_config_path=null",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
    )
    errors = [(each.subject, each.message) for each in found.all if each.level is ERROR]
    # An environment that pays for any number among the words pays who says them all.
    assert [subject for subject, _ in errors] == ["guessing agent", *["isolation"] * shared], errors


def test_the_command(agent, capsys):
    arguments = ["env", "test", *agent.arguments(), "--rows=2", "--json"]
    assert run(cli, arguments) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    agent.write("other.py", REWARD.replace("solution_str.split()[-1:] == [ground_truth]", "not solution_str.strip()"))
    assert run(cli, [*arguments, f"custom_reward_function.path={agent.folder}/other.py"]) == 1


OF_ONES_OWN = '''
"""Guess a number: by a call, or in words."""

from etude.environments import Environment, InvalidAction, Step, environment, tool


class Guess(Environment):
    def reset(self, task, seed):
        SELF.number, self.best = 1 + task["index"], 0.0
        return "Guess my number."

    def guess(self, number):
        self.best = max(self.best, float(number == SELF.number))
        return "higher" if number < SELF.number else "lower"

    def score(self):
        return self.best


@environment("calls_NAME")
class Calls(Guess):
    @tool
    def try_number(self, number: int) -> str:
        """Says whether the number is higher or lower."""
        return Step(self.guess(number), PAID)


@environment("words_NAME")
class Words(Guess):
    def step(self, text):
        if not text.strip().isdecimal():
            raise InvalidAction("Write a number.")
        return self.guess(int(text))
'''


@pytest.mark.parametrize("kind", ["calls", "words"])
@pytest.mark.parametrize("fault", ["", "shared", "paid"])
def test_an_environment_of_ones_own_is_acted_in(agent, kind, fault):
    """Its tools are called, and one without is told what tells its rows apart; only then is its isolation known."""
    name = f"{kind}_{fault or 'fair'}"  # a process knows an environment's name once
    text = OF_ONES_OWN.replace("NAME", name).replace("SELF", "Guess" if fault == "shared" else "self")
    agent.write("own.py", text.replace("PAID", "0.25" if fault == "paid" else "None"))
    agent.rows([agent.row(n, extra_info={"index": n}, reward_model={"style": "rule"}) for n in range(4)])
    given = f"plugins=[{agent.folder}/own.py]", f"env={kind}_{name}", "custom_reward_function.path=null"
    found = inspect(agent, *given, f"{ROLLOUT}.multi_turn.tool_config_path=null")
    said = [(each.level, each.subject) for each in found.all if each.level not in (Level.OK, Level.SKIPPED)]
    expected = {"shared": [(Level.ERROR, "isolation")], "paid": [(Level.WARNING, "random agent")] * (kind == "calls")}
    assert said == expected.get(fault, []), "\n".join(map(str, found.all))
    [isolation, truth] = [each for each in found.all if each.subject in ("isolation", "ground truth")][::-1]
    assert truth.level is Level.SKIPPED  # there is none
    assert fault != "shared" or f"'{kind}_{name}' ({agent.folder}/own.py)" in isolation.fix


BY_SEED = '''
from etude.environments import Environment, environment, tool


@environment("by_seed")
class BySeed(Environment):
    number = {}

    def tasks(self, split):
        yield from ({"goal": n} for n in range(3, 40))

    def reset(self, task, seed):
        self.seed, self.goal = seed, task["goal"]
        self.number[seed] = 0
        return f"Count to {self.goal}."

    @tool
    def add(self, k: int) -> str:
        """Adds k to the number."""
        self.number[self.seed] += k
        return str(self.number[self.seed])

    def score(self):
        return float(self.number[self.seed] == self.goal)
'''


def test_an_environment_that_keeps_state_by_its_seed_is_not_isolated(agent):
    """All rollouts of a prompt have one seed, so that they would act in one game."""
    agent.write("own.py", BY_SEED)
    given = f"plugins=[{agent.folder}/own.py]", "env=by_seed", "custom_reward_function.path=null"
    found = inspect(agent, *given, "data.train_files=[]", f"{ROLLOUT}.multi_turn.tool_config_path=null")
    [isolation] = [each for each in found.all if each.subject == "isolation"]
    assert (isolation.level, isolation.message.split(":")[0]) == (Level.ERROR, "row 0 sees the others")


def test_isolation_of_an_environment_that_answers_all_alike_is_not_known(agent):
    text = OF_ONES_OWN.replace("NAME", "alike").replace("SELF", "self").replace("PAID", "None")
    agent.write("own.py", text.replace("text.strip()", "'.'"))
    agent.rows([agent.row(n, extra_info={"index": n}, reward_model={"style": "rule"}) for n in range(4)])
    given = f"plugins=[{agent.folder}/own.py]", "env=words_alike", "custom_reward_function.path=null"
    found = inspect(agent, *given, f"{ROLLOUT}.multi_turn.tool_config_path=null")
    [isolation] = [each for each in found.all if each.subject == "isolation"]
    assert (isolation.level, isolation.message.split(";")[0]) == (
        Level.SKIPPED,
        "not known: all that was said got one answer",
    )


TELLS = '''
"""Add, in words; a wrong answer is told the right one."""

from etude.environments import Environment, Step, environment


@environment("tells")
class Tells(Environment):
    def reset(self, task, seed):
        self.right = str(7 + task["index"])
        return "Add."

    def step(self, text):
        right = text.split()[-1:] == [self.right]
        return Step(f"It was {self.right}", float(right), right)
'''


def test_an_environment_that_tells_its_answer_and_asks_again_pays_who_copies(agent):
    agent.write("own.py", TELLS)
    agent.rows([agent.row(n, extra_info={"index": n}, reward_model={"style": "rule"}) for n in range(4)])
    given = f"plugins=[{agent.folder}/own.py]", "env=tells", "custom_reward_function.path=null"
    found = inspect(agent, *given, f"{ROLLOUT}.multi_turn.tool_config_path=null", "data.max_response_length=200")
    errors = [(each.subject, each.message) for each in found.all if each.level is Level.ERROR]
    assert errors == [("copying agent", "it earns 1 in row 0, and in 3 others")]


UNTOUCHED = '''
"""Write the number: right until a wrong one is written."""

from etude.environments import Environment, Step, environment


@environment("untouched")
class Untouched(Environment):
    def reset(self, task, seed):
        self.number, self.right = str(7 + task["index"]), True
        return "Which number?"

    def step(self, text):
        self.right = text.strip() == self.number
        return Step(done=True)

    def score(self):
        return float(self.right)
'''


def test_an_environment_that_pays_where_nothing_was_done_pays_who_writes_until_it_is_cut(agent):
    agent.write("own.py", UNTOUCHED)
    agent.rows([agent.row(n, extra_info={"index": n}, reward_model={"style": "rule"}) for n in range(4)])
    given = f"plugins=[{agent.folder}/own.py]", "env=untouched", "custom_reward_function.path=null"
    found = inspect(agent, *given, f"{ROLLOUT}.multi_turn.tool_config_path=null")
    errors = [(each.subject, each.message, each.fix) for each in found.all if each.level is Level.ERROR]
    assert [each[:2] for each in errors] == [("cut agent", "it earns 1 in row 0, and in 3 others")]
    assert "environment 'untouched'" in errors[0][2]
    assert "step never sees a turn that is cut" in errors[0][2]
