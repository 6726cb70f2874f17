"""Environments of other packages: each passes the conformance test that users have, and wrong ids are told early."""

import asyncio
import inspect
import random
import re
import time

import numpy as np
import pytest

from etude.environments import Environment, EnvironmentSession, InvalidAction, Step, environment, tool
from etude.environments.adapters import reasoning_gym
from etude.environments.base import ENVIRONMENTS
from etude.environments.loader import load_environments
from etude.environments.randomness import GlobalRandom
from etude.environments.tasks import task_rows
from etude.errors import ConfigError, EtudeError
from etude.options import EnvironmentOptions
from etude.testing.environment_check import check_environment
from etude.trainer.metrics import is_success
from etude.trajectory import Rewards

pytest.importorskip("reasoning_gym")
pytest.importorskip("gymnasium")
pytest.importorskip("textarena")

CONFORMING = {
    "reasoning_gym:chain_sum": {"attempts": 2},
    "reasoning_gym:countdown": {},
    "reasoning_gym:graph_color": {},  # has no one answer: a known solution is tried
    "reasoning_gym:list_functions": {},  # prepares all its questions, and draws from the global generator
    "reasoning_gym:propositional_logic": {},
    "gym:FrozenLake-v1": {"random_map": 4},
    "gym:Blackjack-v1": {"invalid_reward": -20},
    "gym:CliffWalking-v1": {"invalid_reward": -20},
    "gym:Taxi-v4": {"invalid_reward": -20},
    "gym:CartPole-v1": {},
    "gym:Pendulum-v1": {"invalid_reward": -20},
    "textarena:GuessTheNumber-v0": {},
    "textarena:LightsOut-v0": {},
    "textarena:TowerOfHanoi-v0": {},
    "textarena:Sudoku-v0": {},
}
MEANT = ("all tasks have one start", "nonsense earns", "a premise that is copied")


@pytest.mark.parametrize("name", CONFORMING)
def test_an_adapted_environment_conforms(name):
    found = check_environment(EnvironmentOptions(id=name, args=CONFORMING[name]))
    faults = [each.message for each in found.all if each.level.value != "ok"]
    assert [each for each in faults if not any(text in each for text in MEANT)] == []


INSPECTED = """
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import Score, includes, match, mean, scorer
from inspect_ai.solver import generate, solver, system_message, use_tools
from inspect_ai.tool import ToolError, tool
from inspect_ai.util import store


@tool
def add():
    async def execute(a: int, b: int) -> str:
        \"""Adds.

        Args:
            a: first.
            b: second.
        \"""
        if a < 0:
            raise ToolError("not so")
        return str(a + b)

    return execute


@solver
def twice():
    async def solve(state, generate):
        state = await generate(state)
        if state.output.completion != state.target.text:
            state.messages.append(ChatMessageUser(content="Wrong."))
            state = await generate(state)
        return state

    return solve


def sums(size=4, sandbox=None):
    samples = [Sample(input=f"{n} + {n + 1} = ?", target=str(2 * n + 1)) for n in range(size)]
    solvers = [system_message("Add."), use_tools(add()), twice()]
    return Task(dataset=samples, solver=solvers, scorer=[match(), includes()], sandbox=sandbox)


def valued(value):
    @scorer(metrics=[mean()])
    def fixed():
        async def score(state, target):
            return Score(value=value)

        return score

    return Task(dataset=[Sample(input="x", target="y")], solver=generate(), scorer=fixed())


def silent():
    return Task(dataset=[Sample(input="x", target="y")], solver=system_message("Add."), scorer=match())


@tool
def submit():
    async def execute(answer: str) -> str:
        \"""Submits.

        Args:
            answer: the answer.
        \"""
        store().set("submitted", answer)
        return "ok"

    return execute


@solver
def count():
    async def solve(state, generate):
        state.metadata["seen"].append(len(state.metadata["seen"]))
        state.user_prompt.text += "?"
        return await generate(state)

    return solve


@scorer(metrics=[mean()])
def submitted():
    async def score(state, target):
        return Score(value=float(store().get("submitted") == target.text) / len(state.metadata["seen"]))

    return score


def submissions():
    sample = Sample(input=[ChatMessageUser(content="2 + 2 =")], target="4", metadata={"seen": []})
    setup = [system_message("Submit."), use_tools(submit())]
    return Task(dataset=[sample], setup=setup, solver=count(), scorer=submitted())
"""


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    pytest.importorskip("inspect_ai")
    file = tmp_path_factory.mktemp("inspected") / "inspected_tasks.py"
    file.write_text(INSPECTED)
    return f"inspect:{file}"


def test_a_task_of_inspect_conforms_and_is_played_turn_by_turn(inspected):
    found = check_environment(EnvironmentOptions(id=f"{inspected}:sums"))
    assert [each for each in found.all if each.level.value != "ok"] == []

    async def main():
        [entry] = load_environments([EnvironmentOptions(id=f"{inspected}:sums", args={"size": 3})]).entries.values()
        async with EnvironmentSession(entry, row(sample=2)) as session:
            assert [(m["role"], m["content"]) for m in session.observation] == [
                ("system", "Add."),
                ("user", "2 + 3 = ?"),
            ]
            assert (await session.call_tool("add", {"a": 2, "b": 3}))[0].text == "5"
            with pytest.raises(InvalidAction, match="not so"):
                await session.call_tool("add", {"a": -2, "b": 3})
            assert await session.step("6") == (
                Step([{"role": "user", "content": "Wrong."}]),
                [{"role": "user", "content": "Wrong."}],
            )
            step, _ = await session.step("<think>6?</think>5")
            assert step.done
            assert await session.score(completed=True) == (1.0, {"score_2": 1.0})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("value", "score"),
    [("C", 1.0), ("I", 0.0), ("N", 0.0), ("no", 0.0), ("0.0", 0.0), (0, 0.0), (0.5, 0.5), (False, 0.0)],
)
def test_a_score_of_inspect_counts_as_its_metrics_do(inspected, value, score):
    options = EnvironmentOptions(id=f"{inspected}:valued", args={"value": value})
    assert play(options, ["a"], sample=0)[-1] == (score, {})


@pytest.mark.parametrize("value", [{"a": 1, "b": 0}, [1, 0], "great"])
def test_a_score_of_inspect_that_is_no_number_is_an_error_and_never_0(inspected, value):
    with pytest.raises(EtudeError, match="which is no number"):
        play(EnvironmentOptions(id=f"{inspected}:valued", args={"value": value}), ["a"], sample=0)


def test_a_verdict_of_numpy_is_a_verdict():
    class Verdicts(Environment):
        def reset(self, task, seed):
            return "x"

        def score(self):
            return {"score": 1.0, "acc": np.bool_(False)}

    environment("verdicts")(Verdicts)
    try:
        _, _, (score, info) = play(EnvironmentOptions(id="verdicts"), ["a"])
    finally:
        ENVIRONMENTS._items.pop("verdicts")
    assert (score, info["acc"]) == (1.0, False)
    assert not is_success(Rewards(score=score, score_info=info))


async def test_what_solvers_and_tools_of_inspect_keep_is_their_own_rollouts(inspected):
    """The store was the process's, the sample all rollouts', and the task's setup was left out."""
    [entry] = load_environments([EnvironmentOptions(id=f"{inspected}:submissions")]).entries.values()
    calls = ({"answer": "4"}, {"answer": "5"}, None)
    submitted, turn = [], asyncio.Event()

    async def rollout(arguments):
        async with EnvironmentSession(entry, row(sample=0)) as session:
            assert [m["content"] for m in session.observation] == ["Submit.", "2 + 2 =?"]
            if arguments is not None:
                await asyncio.create_task(session.call_tool("submit", arguments))
            submitted.append(arguments)
            if len(submitted) >= len(calls):
                turn.set()
            await turn.wait()
            await asyncio.create_task(session.step("done"))
            return (await session.score(completed=True))[0]

    assert await asyncio.gather(*(rollout(each) for each in calls)) == [1.0, 0.0, 0.0]
    assert [await rollout(each) for each in calls] == [1.0, 0.0, 0.0]


def test_samples_of_inspect_are_kept_for_validation(inspected):
    [entry] = load_environments([EnvironmentOptions(id=f"{inspected}:sums", args={"val_samples": 1})]).entries.values()
    made = [[each["extra_info"]["task"]["sample"] for each in task_rows(entry, split, 9)] for split in ("train", "val")]
    assert made == [[0, 1, 2], [3]]


def test_a_solver_that_never_asks_ends_the_run(inspected):
    with pytest.raises(EtudeError, match="never asks for the model"):
        play(EnvironmentOptions(id=f"{inspected}:silent"), [], sample=0)


def test_a_task_of_inspect_in_a_container_is_refused(inspected):
    with pytest.raises(ConfigError, match="need a container"):
        load_environments([EnvironmentOptions(id=f"{inspected}:sums", args={"sandbox": "docker"})])


OPPONENT = """
def first_free(shown):
    free = [cell for cell in "012345678" if f"[{cell}]" in shown.rpartition("Available Moves")[2]]
    return f"[{free[0]}]" if free else "[0]"
"""


@pytest.fixture
def tic_tac_toe(tmp_path):
    (tmp_path / "rival.py").write_text(OPPONENT)
    return EnvironmentOptions(id="textarena:TicTacToe-v0", args={"opponent": f"{tmp_path}/rival.py:first_free"})


def test_a_game_of_two_is_played_against_a_script(tic_tac_toe):
    assert not check_environment(tic_tac_toe).failed


def test_a_game_of_several_that_a_token_limit_cuts_is_lost(tic_tac_toe):
    """Worth 0, it taught a player who mostly loses to write until it is cut."""

    async def cut(options):
        [entry] = load_environments([options]).entries.values()
        async with EnvironmentSession(entry, row()) as session:
            charge = session.charge_cut() or 0.0
            return charge + (await session.score(completed=False))[0]

    assert asyncio.run(cut(tic_tac_toe)) == -1.0
    assert asyncio.run(cut(EnvironmentOptions(id="textarena:GuessTheNumber-v0"))) == 0.0


@pytest.mark.parametrize("whole", [False, True])
def test_a_game_that_pays_for_nearness_pays_for_a_hit_alone_if_asked_to(whole):
    async def played(guesses):
        given = {"max_turns": 4} | ({"all_or_nothing": True} if whole else {})
        [entry] = load_environments([EnvironmentOptions(id="textarena:GuessTheNumber-v0", args=given)]).entries.values()
        async with EnvironmentSession(entry, row()) as session:
            for guess in guesses:
                await session.step(f"[{guess}]")
                if session.done:
                    break
            return (await session.score(completed=True))[0]

    hits = [asyncio.run(played([number])) for number in range(1, 21)]
    assert hits.count(1.0) == 1
    number = hits.index(1.0) + 1
    near = asyncio.run(played([(number + each) % 20 + 1 for each in range(1, 6)]))
    assert near == 0.0 if whole else 0.0 < near < 1.0


BUTTONS = """
import gymnasium, numpy

class Buttons(gymnasium.Env):
    action_space = gymnasium.spaces.MultiDiscrete([3, 3])
    observation_space = gymnasium.spaces.Box(-numpy.inf, numpy.inf, (1,))

    def reset(self, seed=None, options=None):
        return numpy.zeros(1, dtype=numpy.float32), {}

    def step(self, action):
        return numpy.zeros(1, dtype=numpy.float32), float(action.sum()), False, False, {}

class Dials(Buttons):
    action_space = gymnasium.spaces.Box(-numpy.inf, numpy.inf, (1,))
"""


@pytest.mark.parametrize(
    ("game", "text"),
    [*(("Buttons", f"1 {text}") for text in ("9" * 400, "9" * 30, "-1", "1 1")), ("Dials", "9" * 400)],
)
def test_a_number_that_no_space_holds_is_an_invalid_action(tmp_path, monkeypatch, game, text):
    """It ended the whole run: the model need only write four hundred nines."""
    import gymnasium

    (tmp_path / "etude_games.py").write_text(BUTTONS)
    monkeypatch.syspath_prepend(tmp_path)
    spec = gymnasium.envs.registration.EnvSpec(f"{game}-v0", entry_point=f"etude_games:{game}")
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    options = EnvironmentOptions(id=f"gym:{game}-v0", args={"invalid_reward": -0.5})
    _, [step], _ = play(options, [text])
    assert (step.reward, step.done) == (-0.5, False)


def row(seed=0, **task):
    return {"extra_info": {"task": task}, "group_seed": seed, "request_id": "r"}


def play(options, texts, seed=0, **task):
    """(first observation, steps, score) of a session."""

    async def main():
        [entry] = load_environments([options]).entries.values()
        async with EnvironmentSession(entry, row(seed, **task)) as session:
            steps = [(await session.step(text))[0] for text in texts]
            return session.observation, steps, await session.score(completed=session.done)

    return asyncio.run(main())


def test_several_attempts_at_a_question():
    options = EnvironmentOptions(id="reasoning_gym:chain_sum", args={"attempts": 3, "max_terms": 2})
    shown, steps, (score, info) = play(options, ["<answer>x</answer>", "no answer"])
    assert "Write your final answer between <answer> and </answer>." in shown
    assert [step.done for step in steps] == [False, False]
    assert (score, info) == (0.0, {"acc": 0.0})
    question = shown.partition("=")[0].rpartition(":")[2]
    _, steps, (score, _) = play(
        options, ["<answer>x</answer>", f"<think><answer>1</answer></think><answer>{eval(question)}</answer>"]
    )
    assert steps[1].done
    assert score == 1.0


@pytest.mark.parametrize(
    ("generator", "text"),
    [
        *(("coin_flip", "1e400"), ("game_of_life", '{"a": 1}'), ("prime_factorization", "A")),
        *(("complex_arithmetic", text) for text in ("nan", "NaN i", "nan+nanj", "(3+nani)")),
    ],
)
def test_an_answer_that_the_scorer_trips_over_is_wrong_and_counted(generator, text):
    _, [step], (score, _) = play(EnvironmentOptions(id=f"reasoning_gym:{generator}"), [f"<answer>{text}</answer>"])
    assert (step.done, step.metrics, score) == (True, {"unreadable": 1}, 0.0)


def test_what_answers_without_a_thought_earn_is_warned_of(caplog):
    logic = EnvironmentOptions(id="reasoning_gym:propositional_logic")
    shown, _, _ = play(logic, [])
    premises = re.findall(r"^\.?\d\. (.+)", shown, re.MULTILINE)
    _, _, (score, _) = play(logic, [f"<answer>{max(premises, key=len)}</answer>"])
    assert score == 1.0
    assert "a premise that is copied from the question scores 1" in caplog.text
    coins = EnvironmentOptions(id="reasoning_gym:coin_flip")
    scores = [play(coins, ["<answer>0</answer>"], seed=seed)[2][0] for seed in range(20)]
    assert 0.8 < sum(scores) / len(scores) < 1.0
    assert "the answer 0 scores 0.9 on average" in caplog.text


def test_a_long_text_is_read_in_linear_time():
    started = time.process_time()
    _, [step], _ = play(EnvironmentOptions(id="reasoning_gym:chain_sum"), ["<answer>" * 15_000])
    assert (step.metrics, time.process_time() - started < 2.0) == ({"unreadable": 0}, True)


@pytest.mark.parametrize("returned", [float("nan"), float("inf"), 10**400])
def test_a_score_that_is_not_finite_is_no_success(returned):
    class Scores:
        def __len__(self):
            return 1

        def __getitem__(self, number):
            return {"question": "?", "answer": "1", "metadata": {"source_dataset": "leg_counting"}}

        def score_answer(self, answer, entry):
            return returned

    question = reasoning_gym.Question(Scores(), 1)
    question.reset({}, 0)
    assert question.step("<answer>1</answer>").metrics == {"unreadable": 1}
    assert question.score() == {"score": 0.0, "acc": 0.0}


def test_a_seed_beyond_the_questions_is_one_of_them():
    options = EnvironmentOptions(id="reasoning_gym:word_ladder")
    assert play(options, [], 2**40)[0] == play(options, [], 2**40 % 20_000)[0]


@pytest.mark.parametrize("charge", [None, -20])
@pytest.mark.parametrize(
    ("name", "costs"),
    [
        *((f"{name}-v1", True) for name in ("Blackjack", "CliffWalking", "Acrobot", "Pendulum")),
        *(("MountainCar-v0", True), ("Taxi-v4", True), ("FrozenLake-v1", False), ("CartPole-v1", False)),
    ],
)
def test_a_game_in_which_never_acting_may_be_best_is_warned_of(name, costs, charge, caplog):
    """CliffWalking's best game is worth -13, and one without an action was worth 0, of which nothing warned."""
    args = {} if charge is None else {"invalid_reward": charge}
    _, _, (score, _) = play(EnvironmentOptions(id=f"gym:{name}", args=args), ["flap", "flap"])
    assert score == 0.0
    assert ("a model may earn most by never acting; set args.invalid_reward" in caplog.text) == (costs and not args)


def test_a_gymnasium_game_in_words():
    options = EnvironmentOptions(id="gym:FrozenLake-v1", args={"is_slippery": False})
    shown, steps, (score, _) = play(options, ["I go Right", "flap", "down, no: down"])
    assert "write one action: left, down, right, up" in shown
    assert "[S]FFF" in shown
    assert steps[0].observation.endswith("S[F]FF\nFHFH\nFFFH\nHFFG")
    assert steps[1].observation == "Write one of: left, down, right, up."
    assert [steps[0].reward, steps[1].reward, steps[2].reward, score] == [0.0, None, 0.0, None]
    assert steps[2].done
    assert play(options, [])[2][0] == 0.0  # cut before the first step
    maps = {play(EnvironmentOptions(id="gym:FrozenLake-v1", args={"random_map": 5}), [], seed)[0] for seed in (1, 1, 2)}
    assert len(maps) == 2
    charged = EnvironmentOptions(id="gym:Blackjack-v1", args={"invalid_reward": -1})
    _, steps, _ = play(charged, ["flap"])
    assert (steps[0].reward, steps[0].done) == (-1, False)
    _, steps, _ = play(EnvironmentOptions(id="gym:Pendulum-v1", args={"invalid_reward": -1}), ["1 2"])
    assert steps[0].reward == -1


def test_numbers_are_acted_on_as_they_are_written():
    """Torques of a pendulum: -.1 is not 1, nor −0.5 with the sign as typeset 0.5."""
    options = EnvironmentOptions(id="gym:Pendulum-v1", args={"invalid_reward": -1})
    for plain, others in {"-0.1": ["-.1", "-1e-1", "−0.1", "[-0.1]"], "0.5": [".5", "5e-1", "It is 0.5."]}.items():
        wanted = play(options, [plain])[1][0]
        for other in others:
            assert play(options, [other])[1][0] == wanted, other


def test_scorers_that_evaluate_answers_are_known_by_name():
    from reasoning_gym.factory import DATASETS

    sources = {name: inspect.getsource(kind) for name, (kind, _) in DATASETS.items()}
    assert {name for name, text in sources.items() if "eval(answer" in text} == set(reasoning_gym.LITERALS)
    assert {name for name, text in sources.items() if "parse_expr(answer" in text} == set(reasoning_gym.FORMULAS)
    assert {name for name, text in sources.items() if "= min(1.0," in text} == set(reasoning_gym.UNORDERED)


@pytest.mark.parametrize("generator", [*reasoning_gym.LITERALS, *reasoning_gym.FORMULAS])
def test_an_answer_is_not_run(generator, monkeypatch, tmp_path):
    """It was, in this process: whoever answers decides the reward."""
    monkeypatch.chdir(tmp_path)
    for code in ("open('ran', 'w')", "open(chr(114), chr(119))", "[open('ran', 'w')]"):
        play(EnvironmentOptions(id=f"reasoning_gym:{generator}"), [f"<answer>{code}</answer>"])
        datasets = [{"name": generator, "weight": 1.0, "config": {}}]
        play(
            EnvironmentOptions(id="reasoning_gym:composite", args={"datasets": datasets}), [f"<answer>{code}</answer>"]
        )
    assert not list(tmp_path.iterdir())


def test_formulas_are_told_from_programs_and_from_numbers_without_end():
    for text in ("2*(3 + 4) - 5/6", "-x**3*cos(3*x)/9 + C", "exp(2*x) + log(x)", "x**1000", "24", "6*pi"):
        assert reasoning_gym.is_formula(text), text
    for text in (
        *("max(1, 2)", "exec(x)", "x.real", "[1]", "'a'", "1 if x else 2", "True", "name", "Integral(x, x)", "", "1+"),
        *("9**9**9", "((9**99)**99)**99", "exp(exp(exp(9)))", "(x + y)**999", "1e999", "1+" * 600 + "1"),
    ):
        assert not reasoning_gym.is_formula(text), text


@pytest.mark.parametrize(
    ("game", "texts", "acc"),
    [
        ("FrozenLake-v1", ["down", "down", "right", "right", "down", "right"], 1.0),
        ("CartPole-v1", ["left", "left"], 0.0),  # earned 2 of the 475 that solve it
        ("CartPole-v1", ["left"] * 10, 0.0),
        ("MountainCar-v0", ["none"], 0.0),  # -1, better than its threshold of -110, because it was cut
        ("MountainCar-v0", [], 0.0),
    ],
)
def test_success_in_a_gymnasium_game_is_its_reward_threshold(game, texts, acc):
    args = {"is_slippery": False} if game.startswith("Frozen") else {}
    assert play(EnvironmentOptions(id=f"gym:{game}", args=args), texts)[2][1] == {"acc": acc}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "gim:FrozenLake-v1"}, r"env\[0\]: no package is called 'gim:'; did you mean 'gym:'"),
        ({"id": "gym:FrozenLak-v1"}, r"gymnasium has no environment 'FrozenLak-v1'; did you mean 'FrozenLake-v1'"),
        ({"id": "gym:FrozenLake-v1", "args": {"slippery": True}}, "slippery"),
        ({"id": "gym:FrozenLake-v1", "args": {"actions": ["a"]}}, "must name its 4 actions"),
        ({"id": "reasoning_gym:chain_summ"}, "did you mean 'chain_sum'"),
        ({"id": "reasoning_gym:chain_sum", "args": {"max_term": 3}}, "args: unknown argument 'max_term'; did you mean"),
        ({"id": "reasoning_gym:chain_sum", "args": {"max_terms": "x"}}, r"args.max_terms: .*, not 'x'"),
        ({"id": "reasoning_gym:chain_sum", "args": {"attempts": "x"}}, r"args.attempts: .*, not 'x'"),
        ({"id": "gym:FrozenLake-v1", "args": {"random_map": "x"}}, r"args.random_map: .*, not 'x'"),
        ({"id": "gym:FrozenLake-v1", "args": {"is_slippery": "x"}}, r"args.is_slippery: .*, not 'x'"),
        ({"id": "textarena:GuessTheNumber-v0", "args": {"max_turns": "x"}}, r"args.max_turns: .*, not 'x'"),
        ({"id": "textarena:GuessTheNumbr-v0"}, "did you mean 'GuessTheNumber-v0'"),
        ({"id": "textarena:TicTacToe-v0"}, "args.opponent"),
        ({"id": "nobody"}, "unknown environment 'nobody'"),
        ({"id": "mine.py:Mine"}, r"write @environment\(NAME\) before the class, env=NAME and plugins=\[mine\.py\]"),
    ],
)
def test_a_wrong_id_or_argument_is_told_before_anything_is_played(options, message):
    with pytest.raises(ConfigError, match=message):
        load_environments([EnvironmentOptions(**options)])


def test_missing_data_of_nltk_is_told_in_one_line(monkeypatch):
    def lacking(*_):
        raise LookupError("*****\n  Resource \x1b[93mwords\x1b[0m not found.\n  Please use the NLTK Downloader")

    monkeypatch.setattr("etude.environments.adapters.textarena.Game.reset", lacking)
    with pytest.raises(ConfigError, match=r"NLTK's data 'words' are not there; run python -m nltk.downloader words"):
        load_environments([EnvironmentOptions(id="textarena:GuessTheNumber-v0")])


def test_two_entries_of_one_name_need_names():
    twice = [EnvironmentOptions(id="reasoning_gym:chain_sum")] * 2
    with pytest.raises(ConfigError, match="give it a name"):
        load_environments(twice)
    named = [EnvironmentOptions(id="reasoning_gym:chain_sum", name=name) for name in ("easy", "hard")]
    assert list(load_environments(named).entries) == ["easy", "hard"]


def test_seeds_of_training_and_validation_are_disjoint():
    [entry] = load_environments([EnvironmentOptions(id="reasoning_gym:chain_sum")]).entries.values()
    seeds = [{each["extra_info"]["env_seed"] for each in task_rows(entry, split, 50)} for split in ("train", "val")]
    assert [len(each) for each in seeds] == [50, 50]
    assert not seeds[0] & seeds[1]


def test_global_generators_are_a_sessions_own():
    def drawn(generator):
        with generator:
            return random.random(), np.random.random()

    one, two, again = GlobalRandom(1), GlobalRandom(2), GlobalRandom(1)
    random.seed(5)
    expected = random.random()
    random.seed(5)
    both = [drawn(one), drawn(two), drawn(one)]
    assert random.random() == expected
    assert [drawn(again), drawn(again)] == [both[0], both[2]]


# -- the conformance test finds what it looks for ----------------------------------------------------------------


class Sound(Environment):
    def tasks(self, split):
        yield from ({"goal": n} for n in range(3))

    def reset(self, task, seed):
        self.goal = task["goal"]
        return f"Say {self.goal}."

    def step(self, text):
        if text != str(self.goal):
            raise InvalidAction(f"Say {self.goal}.")
        return Step(done=True, reward=0.5)

    @tool
    def hint(self, size: int = 1) -> str:
        """Gives a hint."""
        return str(self.goal)

    def score(self):
        return 0.0

    def answer(self):
        return str(self.goal)


class Unseeded(Sound):
    def reset(self, task, seed):
        super().reset(task, seed)
        return f"Say {id(self)}."


class Crashing(Sound):
    def step(self, text):
        return Step(reward=1 / len(text))


class Repeating(Sound):
    def reset(self, task, seed):
        self.seen = "Long rules. " * 50
        return self.seen

    def step(self, text):
        self.seen += text
        return Step(self.seen, reward=0.0)


class PaysByHistory(Environment):
    seen: list[str] = []  # noqa: RUF012

    def reset(self, task, seed):
        return f"Say {seed}."

    def step(self, text):
        self.seen.append(text)
        return Step(reward=0.01 * len(self.seen), done=True)


class CallsPayByHistory(Sound):
    seen: list[int] = []  # noqa: RUF012

    @tool
    def hint(self, size: int = 1) -> str:
        """Gives a hint."""
        self.seen.append(size)
        return Step("No.", reward=0.01 * len(self.seen))


class PaysCalls(Sound):
    @tool
    def hint(self, size: int) -> str:
        """Gives a hint."""
        return Step(str(self.goal), 0.25)


class AsTrlHasIt(Sound):
    def reset(self, **row):
        return "Bring it to 2."


class Unmarked(Environment):
    def reset(self, task, seed):
        return f"Bring it to 2, in world {seed}."

    def increment(self, by: int) -> str:
        return str(by)

    def get_reward(self):
        return 0.0


class KeepsTrlsReset(Sound):
    def reset(self, goal=2, **row):
        return "Bring it to 2."


class HalfMarked(Sound):
    def pass_by(self, by: int) -> str:
        return str(by)


class HalfRenamed(Unmarked):
    reset = AsTrlHasIt.reset


class TrlFactory:
    reset, increment, get_reward = AsTrlHasIt.reset, Unmarked.increment, Unmarked.get_reward


def checked(kind):
    environment("mine")(kind)
    try:
        return check_environment(EnvironmentOptions(id="mine"))
    finally:
        del ENVIRONMENTS._items["mine"]


def test_a_method_that_is_no_tool_is_told():
    found = checked(HalfMarked)
    assert any(each.message.endswith("no @tool, so not for the model: pass_by") for each in found.all), found.all


@pytest.mark.parametrize(
    ("kind", "subject", "message"),
    [
        (PaysByHistory, "fresh state", "pays other than the next of the same seed"),
        (CallsPayByHistory, "fresh state", "pays other than the next of the same seed: hint pays"),
        (PaysCalls, "tools", "each call earns 0.25 or more, whatever its arguments"),
        (AsTrlHasIt, "id", "reset takes other arguments"),
        (HalfRenamed, "id", "reset takes other arguments"),
        (KeepsTrlsReset, "id", "reset takes other arguments"),
        (TrlFactory, "id", "neither an Environment"),
        (Unmarked, "tools", "increment, get_reward cannot be called"),
        (Unmarked, "nonsense", "get_reward is called score here"),
        (Sound, "own answer", "its own answers earn 0.5"),
        (Unseeded, "same seed", "one seed has two starts"),
        (Crashing, "nonsense", "step failed: ZeroDivisionError"),
        (Repeating, "history", "repeats an earlier one"),
    ],
)
def test_what_does_not_conform_is_found(kind, subject, message):
    found = checked(kind)
    assert any(each.subject == subject and message in each.message and each.fix for each in found.all), found.all
    if kind is HalfRenamed:  # all that is left at once
        assert "write reset(self, task, seed), @tool before increment, and score(self) in place of get_reward" in str(
            found.all
        )
    if kind is TrlFactory:
        assert "write class TrlFactory(Environment), reset(self, task, seed), @tool before increment, and" in str(
            found.all
        )
        assert "score(self) in place of get_reward" in str(found.all)
