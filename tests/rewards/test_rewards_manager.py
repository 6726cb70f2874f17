"""Reward managers and the trajectory scorer: what a scorer sees, and what its failures mean."""

import asyncio
import inspect
import time

import numpy as np
import pytest
import torch

from etude.config import compose
from etude.dumps import rollout_record
from etude.errors import ConfigError, EtudeError, InfrastructureError
from etude.protocol import DataProto
from etude.rewards import (
    REWARD_MANAGERS,
    AbstractRewardManager,
    NaiveRewardManager,
    RewardManagerBase,
    TrajectoryScorer,
    build_manager,
    compute_score,
    default_compute_score,
    duplicate_judge,
    load_compute_score,
    register,
)
from etude.rewards.default import COMPONENTS
from etude.rewards.rescore import rescore
from etude.rewards.user_functions import WeightedSum
from etude.trajectory import Provenance, Segment, ToolCallRecord, Trajectory


class Letters:
    """A tokenizer whose ids are code points; 0 is its special token."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(token) for token in token_ids if token or not skip_special_tokens)


def ids(text):
    return [ord(letter) for letter in text]


def trajectory(*turns, prompt="q"):
    """Turns of (assistant text, what followed it)."""
    made = Trajectory("r", ids(prompt))
    for said, followed in turns:
        made.append([*ids(said), 0], Provenance.SAMPLED)
        made.assistant_turns += 1
        made.append(ids("<"), Provenance.TEMPLATE)
        made.append(ids(followed), Provenance.TOOL)
    return made


def row(ground_truth="42", source="openai/gsm8k", **extra_info):
    return {
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def built(name="naive", scorer=None, *, config=None, score_text="assistant", **reward_kwargs):
    """The manager that a configuration names."""
    own = {"compute_score": scorer, "reward_kwargs": reward_kwargs, "score_text": score_text}
    return build_manager(name, config=config, tokenizer=Letters(), **own)


def score(made, of_row, scorer=None, **options):
    asyncio.run(TrajectoryScorer(NaiveRewardManager(Letters(), scorer, **options))(made, of_row))
    return made.rewards


def test_a_tool_cannot_satisfy_the_scorer():
    assert score(trajectory(("I call", "#### 42"), ("done", "")), row()).score == 0.0
    assert score(trajectory(("I call", "7"), ("#### 42", "")), row()).score == 1.0


def test_a_scorer_sees_the_assistants_turns_and_the_trajectorys_facts():
    seen = {}

    def scorer(**arguments):
        seen.update(arguments)
        return {"score": 0.5, "acc": True, "pred": "x"}

    made = trajectory(("one", "tool"), ("two", ""))
    made.rewards.steps = [(0, "t", 0.25), (0, "t", -0.05), (1, "t", 1.0)]
    made.rewards.final = {"t": 2.0}
    made.user_turns = 1
    the_row = row(index=3)
    rewards = score(made, the_row, scorer)
    assert (rewards.score, rewards.score_info) == (0.5, {"score": 0.5, "acc": True, "pred": "x"})
    assert (seen["solution_str"], seen["ground_truth"], seen["data_source"]) == ("one\ntwo", "42", "openai/gsm8k")
    assert seen["extra_info"] == {
        "index": 3,
        "num_turns": 4,
        "tool_rewards": [0.25, -0.05, 1.0],
        "turn_scores": [pytest.approx(0.2), 1.0],
        "rollout_reward_scores": {"t": 2.0},
    }
    assert the_row == row(index=3)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.25), torch.tensor(2.0)])
def test_numbers_of_all_kinds(value):
    rewards = score(trajectory(("a", "")), row(), lambda **_: value)
    assert (rewards.score, rewards.score_info) == (float(value), {"acc": float(value)})


def test_async_scorers():
    async def scorer(**_):
        await asyncio.sleep(0)
        return 0.75

    assert score(trajectory(("a", "")), row(), scorer).score == 0.75


def test_a_rollout_without_a_response_is_scored():
    assert (
        score(Trajectory("r", ids("q")), {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}).score
        == 0.0
    )


@pytest.mark.parametrize(
    "result", [None, "1", float("nan"), {}, {"score": None}, {"score": float("inf")}, -1e31, [1.0]]
)
def test_no_finite_score_is_broken_not_wrong(result):
    made = trajectory(("a", ""))
    kind = ConfigError if result in ("1", [1.0]) else InfrastructureError  # another type is a mistake in its code
    with pytest.raises(kind, match="compute_score for the data source 'openai/gsm8k'"):
        score(made, row(), lambda **_: result)
    assert (made.rewards.score, made.rewards.score_info) == (None, {})


def test_a_scorer_that_raises_or_hangs_is_broken_not_wrong():
    def raises(**_):
        raise KeyError("x")

    with pytest.raises(InfrastructureError, match="failed: KeyError: 'x'") as caught:
        score(trajectory(("a", "")), row(), raises)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(InfrastructureError, match="no answer within"):
        score(trajectory(("a", "")), row(), lambda **_: time.sleep(5), timeout=0.02)


def test_what_the_user_must_change_stays_what_it_is():
    with pytest.raises(ConfigError, match="custom_reward_function"):
        score(trajectory(("a", "")), row(source="mine/own"))


def test_reward_kwargs():
    with pytest.raises(ConfigError, match=r"no reward_model.reward_kwargs.overlong"):
        NaiveRewardManager(Letters(), None, overlong=1)
    with pytest.raises(ConfigError, match="timeout must be a positive"):
        NaiveRewardManager(Letters(), None, timeout=0)


def batch():
    texts = ["a#### 42b", "#### 42aa"]
    masks = [[0] + [1] * 7 + [0], [1] * 9]
    objects = {
        "data_source": ["openai/gsm8k"] * 2,
        "reward_model": [{"ground_truth": "42"}] * 2,
        "extra_info": [{}, None],
    }
    tensors = {
        "responses": torch.tensor([ids(text) for text in texts]),
        "response_mask": torch.tensor(masks),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors={k: np.array(v, dtype=object) for k, v in objects.items()})


def test_the_batch_form_puts_each_score_on_the_last_sampled_token():
    manager = REWARD_MANAGERS.get("naive")(Letters(), compute_score)
    rewards = manager(batch())
    assert rewards.shape == (2, 9)
    assert rewards.nonzero().tolist() == [[0, 7], [1, 8]]
    returned = manager(batch(), return_dict=True)
    assert torch.equal(returned["reward_tensor"], rewards)
    assert returned["reward_extra_info"] == {"score": [1.0, 1.0], "acc": [1.0, 1.0], "pred": ["42", "42"]}


def test_a_scorer_that_uses_up_its_ground_truth_scores_every_rollout_of_the_prompt_alike():
    def takes(solution_str, ground_truth, extra_info, **others):
        extra_info["log"].append(solution_str)
        return float(len(extra_info["log"]) == 1 and ground_truth.pop() == "b")

    both = WeightedSum([("first", 1.0, takes), ("second", 1.0, takes)])
    for function, expected in ((takes, 1.0), (both, 2.0)):
        scorer = TrajectoryScorer(NaiveRewardManager(Letters(), function))
        row = {"data_source": "x", "reward_model": {"ground_truth": ["a", "b"]}, "extra_info": {"log": []}}
        for _ in range(2):
            made = Trajectory("t", [1], [Segment((2,), Provenance.SAMPLED, 0)])
            asyncio.run(scorer(made, row))
            assert made.rewards.score == expected
        assert row["reward_model"]["ground_truth"] == ["a", "b"]


def test_a_score_that_is_too_large_names_its_function_and_the_limit():
    combined = WeightedSum([("fair", 1.0, lambda **_: 1.0), ("wild", 0.5, lambda **_: 1e200)])
    with pytest.raises(InfrastructureError, match=r"^the reward 'wild' returned the reward 1e\+200; at most 1e\+30"):
        combined()


def test_run_single_scores_one_row():
    with pytest.raises(ValueError, match="one row, not 2"):
        asyncio.run(NaiveRewardManager(Letters()).run_single(batch()))


@register("test_documents_manager")
class DocumentsManager(RewardManagerBase):
    """The shape of the documents' own example."""

    async def run_single(self, data):
        assert len(data) == 1
        item = data[0]
        prompt_length = item.batch["prompts"].shape[-1]
        valid = int(item.batch["attention_mask"][prompt_length:].sum())
        extra_info = item.non_tensor_batch.get("extra_info", {})
        extra_info["num_turns"] = item.non_tensor_batch.get("__num_turns__")
        extra_info["rollout_reward_scores"] = item.non_tensor_batch.get("reward_scores", {})
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(item.batch["responses"][:valid].tolist(), skip_special_tokens=True)
        )
        result = await self.compute_score(
            data_source=item.non_tensor_batch["data_source"],
            solution_str=text,
            ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=extra_info,
        )
        return {"reward_score": result, "reward_extra_info": {"turns": extra_info["num_turns"]}}


def test_a_manager_written_as_in_the_documents():
    made = trajectory(("x", "#### 42"))
    asyncio.run(TrajectoryScorer(REWARD_MANAGERS.get("test_documents_manager")(Letters(), compute_score))(made, row()))
    assert (made.rewards.score, made.rewards.score_info) == (1.0, {"turns": 2})


class WholeBatch(AbstractRewardManager):
    def __init__(self, answer):
        self.answer = answer

    def __call__(self, data, return_dict=False):
        if isinstance(self.answer, Exception):
            raise self.answer
        tensor = torch.zeros(data.batch["responses"].shape)
        tensor[:, -1] = self.answer
        return {"reward_tensor": tensor, "reward_extra_info": {"n": [len(data)]}} if return_dict else tensor


def test_a_manager_of_whole_batches():
    made = trajectory(("x", ""))
    asyncio.run(TrajectoryScorer(WholeBatch(0.5))(made, row()))
    assert (made.rewards.score, made.rewards.score_info) == (0.5, {"n": 1})
    with pytest.raises(InfrastructureError, match="not finite"):
        asyncio.run(TrajectoryScorer(WholeBatch(float("nan")))(made, row()))


def test_a_manager_without_a_score_is_broken_infrastructure():
    class Forgets(RewardManagerBase):
        async def run_single(self, data):
            return {"reward_score": None, "reward_extra_info": {}}

    made = trajectory(("x", ""))
    with pytest.raises(InfrastructureError, match="Forgets returned no score"):
        asyncio.run(TrajectoryScorer(Forgets(tokenizer=Letters()))(made, row()))
    assert made.rewards.score is None


@pytest.mark.parametrize(("error", "kind"), [(KeyError("x"), InfrastructureError), (EtudeError("x"), EtudeError)])
def test_a_failing_manager_is_broken_infrastructure(error, kind):
    with pytest.raises(kind):
        asyncio.run(TrajectoryScorer(WholeBatch(error))(trajectory(("x", "")), row()))


def test_duplicate_judge():
    judged = {"calc": {"create_kwargs": {"ground_truth": "42"}}}
    assert duplicate_judge(row("42"), judged)
    assert not duplicate_judge(row("43"), judged)
    assert not duplicate_judge(row("42"), {"calc": {"create_kwargs": None}, "other": None})
    assert not duplicate_judge(row("42"), None)
    assert not duplicate_judge({"reward_model": None}, {"calc": {}})
    assert duplicate_judge(row(["a"]), {"calc": {"create_kwargs": {"ground_truth": np.array(["a"])}}})
    assert duplicate_judge(row("42") | {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "42"}}, None)
    assert not duplicate_judge(row("42") | {"interaction_kwargs": {"name": "customer"}}, None)


# Managers of the shapes that verl's have


def made(name, cls, scorer=None, config=None, **reward_kwargs):
    """What the configuration's `reward_manager` makes of a class."""
    register(name)(cls)
    return built(name, scorer, config=config, **reward_kwargs)


def half(**_):
    return 0.5


class Legacy(AbstractRewardManager):
    """Up to verl 0.6: whole batches, and the parameters in this order."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", bonus=0.0):
        self.tokenizer, self.num_examine, self.compute_score = tokenizer, num_examine, compute_score
        self.reward_fn_key, self.bonus = reward_fn_key, bonus

    def __call__(self, data, return_dict=False):
        tensor = torch.zeros(data.batch["responses"].shape)
        for index in range(len(data)):
            item = data[index]
            length = item.batch["attention_mask"][item.batch["prompts"].shape[-1] :].sum()
            tensor[index, length - 1] = self.bonus + self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=self.tokenizer.decode(item.batch["responses"][:length].tolist()),
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch["extra_info"],
            )
        return {"reward_tensor": tensor, "reward_extra_info": {}} if return_dict else tensor


class Loop(RewardManagerBase):
    """From verl 0.7: one row at a time, the configuration first."""

    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.compute_score = compute_score or default_compute_score
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.factor = config["factor"]

    async def run_single(self, data):
        item = data[-1:][0]
        arguments = {
            "data_source": item.non_tensor_batch["data_source"],
            "solution_str": "",
            "ground_truth": item.non_tensor_batch["reward_model"]["ground_truth"],
            "extra_info": item.non_tensor_batch.get("extra_info", {}),
        }
        if self.is_async_reward_score:
            result = await self.compute_score(**arguments)
        else:
            result = await self.loop.run_in_executor(None, lambda: self.compute_score(**arguments))
        return {"reward_score": result * self.factor, "reward_extra_info": {"acc": result}}


class Short(RewardManagerBase):
    """verl 0.6's first form of the same: without a scorer for the base."""

    def __init__(self, config, tokenizer, compute_score):
        super().__init__(config, tokenizer)
        self.compute_score = compute_score

    async def run_single(self, data):
        return {"reward_score": self.compute_score(), "reward_extra_info": {}}


class Handing(NaiveRewardManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def scored(manager):
    rollout = trajectory(("x", "#### 42"))
    asyncio.run(TrajectoryScorer(manager)(rollout, row()))
    return rollout.rewards.score


def test_a_manager_gets_the_users_function_whatever_the_order_of_its_parameters():
    legacy = made("test_legacy", Legacy, half, bonus=0.25)
    assert (legacy.num_examine, legacy.reward_fn_key, legacy.compute_score) == (0, "data_source", half)
    assert scored(legacy) == 0.75
    assert scored(made("test_loop", Loop, half, config={"factor": 3})) == 1.5
    assert scored(made("test_short", Short, half)) == 0.5
    assert scored(made("test_handing", Handing, half)) == 0.5


def test_without_a_function_of_the_users_the_built_in_one_is_handed_over():
    assert made("test_legacy", Legacy).compute_score is default_compute_score
    assert scored(made("test_legacy", Legacy)) == 1.0  # decodes what a tool said, too: it is its own


@pytest.mark.parametrize("is_async", [True, False])
def test_a_loaded_function_is_async_if_it_was_written_so(is_async, tmp_path):
    (tmp_path / "mine.py").write_text(
        f"{'async ' * is_async}def compute_score(ground_truth): return float(ground_truth) / 84\n"
    )
    scorer = load_compute_score(str(tmp_path / "mine.py"))
    assert inspect.iscoroutinefunction(scorer) is is_async
    assert scored(made("test_loop", Loop, scorer, config={"factor": 2})) == 1.0
    assert scored(NaiveRewardManager(Letters(), scorer)) == 0.5


@pytest.mark.parametrize("parts", [("config", Letters(), half), (Letters(), half), (Letters(), 1, half, "data_source")])
def test_the_built_in_manager_is_made_in_any_of_the_orders(parts):
    assert scored(NaiveRewardManager(*parts)) == 0.5


@pytest.mark.parametrize(
    ("parts", "named", "words"),
    [
        ((), {}, "needs a tokenizer"),
        ((half, Letters()), {"compute_score": 3}, "compute_score is not a function"),
        (({}, half, Letters()), {}, "needs a tokenizer, got function"),
        ((Letters(), 0, half, "source"), {}, "data_source picks"),
        ((Letters(), 0, half, "data_source", 1, 2), {}, "takes tokenizer, num_examine"),
    ],
)
def test_parts_in_no_known_order_are_refused(parts, named, words):
    with pytest.raises(ConfigError, match=words):
        NaiveRewardManager(*parts, **named)


class Unmatched(AbstractRewardManager):
    def __init__(self, tok, fn):
        raise AssertionError

    def __call__(self, data, return_dict=False):
        raise AssertionError


class NoScorer(Legacy):
    def __init__(self, tokenizer):
        super().__init__(tokenizer, 0, half)


class Failing(Legacy):
    def __init__(self, config):
        super().__init__(config.reward.tokenizer, 0)


class NeverCalled(NaiveRewardManager):
    def __call__(self, data, return_dict=False):
        raise AssertionError


@pytest.mark.parametrize(
    ("cls", "scorer", "reward_kwargs", "words"),
    [
        (Unmatched, None, {}, r"\(Unmatched\) requires 'tok', which nothing provides"),
        (Legacy, None, {"bonus": 1, "bonsu": 1}, "no reward_model.reward_kwargs.bonsu"),
        (Legacy, None, {"num_examine": 3}, "no reward_model.reward_kwargs.num_examine"),
        (NoScorer, half, {}, r"custom_reward_function.path is set, but .*\(NoScorer\) takes no compute_score"),
        (Failing, None, {}, "cannot be made: AttributeError: 'NoneType' object has no attribute 'reward'"),
        (NeverCalled, None, {}, "derive it from AbstractRewardManager"),
    ],
)
def test_what_cannot_be_matched_is_refused(cls, scorer, reward_kwargs, words):
    with pytest.raises(ConfigError, match=words) as caught:
        made(f"test_{cls.__name__}", cls, scorer, **reward_kwargs)
    assert "\n" not in str(caught.value)


def test_a_batch_without_a_response_mask_is_scored_by_its_attention_mask():
    data = batch()
    mask = data.batch.pop("response_mask")
    data.batch["attention_mask"] = torch.cat([torch.ones(2, 3, dtype=torch.long), mask], dim=1)
    rewards = NaiveRewardManager(Letters(), compute_score)(data)
    assert rewards.nonzero().tolist() == [[0, 7], [1, 8]]
    del data.batch["attention_mask"]
    assert NaiveRewardManager(Letters(), lambda **_: 1.0)(data).nonzero().tolist() == [[0, 8], [1, 8]]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("right", "cheats"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_a_heavier_penalty_makes_no_answer_right_or_wrong(right, cheats, order):
    parts = [("answer", 1.0, lambda: right), ("cheats", -2.0, lambda: cheats)]
    assert WeightedSum(parts[::order])()["acc"] == right


def test_a_function_that_says_nothing_of_success_hides_none_that_does():
    silent = ("form", 1.0, lambda: {"score": 0.5, "acc": None})
    assert WeightedSum([silent, ("answer", 0.6, lambda: {"score": 1.0, "acc": 0.0})])()["acc"] == 0.0


@pytest.mark.parametrize("acc", [float("nan"), float("inf"), "1.0", [1.0]])
def test_an_acc_that_is_no_finite_number_is_no_failure_of_the_model(acc):
    rollout = trajectory(("x", "#### 42"))
    with pytest.raises((ConfigError, InfrastructureError), match="as acc"):
        score(rollout, row(), lambda **_: {"score": 0.5, "acc": acc})
    assert rollout.rewards.score is None
    assert score(rollout, row(), lambda **_: {"score": 0.5, "acc": np.bool_(True)}).score_info["acc"] is True
    assert score(rollout, row(), lambda **_: {"score": 0.5, "acc": None}).score == 0.5


# DAPO's length penalty


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(10, 0.0), (12, 0.0), (14, -0.5), (16, -1.0), (20, -2.0)]
)  # at most 16 tokens, the last 4 of which are the buffer
def test_dapo_takes_a_share_of_the_buffer_that_is_used(tokens, penalty):
    buffer = {"enable": True, "len": 4, "penalty_factor": 0.5, "log": True}
    rollout = Trajectory("r", ids("q"))
    rollout.append(ids("x" * 6), Provenance.SAMPLED)
    rollout.append(ids("t" * (tokens - 6)), Provenance.TOOL)
    manager = built("dapo", half, overlong_buffer_cfg=buffer, max_resp_len=16)
    asyncio.run(TrajectoryScorer(manager)(rollout, row()))
    assert rollout.rewards.score == 0.5 + 0.5 * penalty
    parts = {"answer": 0.5, "overlong_reward": 0.5 * penalty}
    logged = {"overlong_reward": 0.5 * penalty, "overlong": penalty < 0}
    assert rollout.rewards.score_info == {"acc": 0.5, **logged, COMPONENTS: parts}
    assert rollout.rewards.score == sum(parts.values())


def test_dapo_takes_the_longest_response_from_the_configuration():
    config = compose("ppo_trainer", ["data.max_response_length=20"])
    assert built("dapo", config=config, overlong_buffer_cfg={"len": 4}).max_resp_len == 20
    assert scored(built("dapo", half, config=config)) == 0.5
    assert scored(built("dapo", half, overlong_buffer_cfg={"enable": False, "len": 4})) == 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlong_buffer_cfg": {"len": 4}}, "from 1 to max_resp_len tokens: 4, None"),
        ({"overlong_buffer_cfg": {"len": 40}, "max_resp_len": 20}, "from 1 to max_resp_len"),
        ({"overlong_buffer_cfg": {"lenn": 4}}, "overlong_buffer_cfg.lenn; did you mean 'len'"),
        (
            {"overlong_buffer_cfg": {"len": 4, "penalty_factor": -1}, "max_resp_len": 20},
            "penalty_factor must be a number of at least 0",
        ),
        ({"overlong": 4}, "'dapo' has no reward_model.reward_kwargs.overlong"),
    ],
)
def test_dapos_options_are_checked(options, words):
    with pytest.raises(ConfigError, match=words):
        built("dapo", **options)


SEARCH = '<tool_call>{"name": "search", "arguments": {"query": "capital"}}</tool_call>'


def in_form(name, *turns, prompt="q", function="compute_score"):
    """What a form is worth in a run, and rescored from its dump; turns are texts, or (text, error of its call or None)."""
    made = Trajectory("r", ids(prompt))
    for number, turn in enumerate(turns):
        text, *errors = (turn,) if isinstance(turn, str) else turn
        made.append(ids(text), Provenance.SAMPLED)
        made.append(ids(prompt), Provenance.TEMPLATE)
        made.messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "It is Rome"}]
        made.tool_calls += [ToolCallRecord(number, "search", "{}", "It is Rome", error=error) for error in errors]
        made.assistant_turns += 1
    of_row, scorer = row("Rome", "x"), load_compute_score(f"etude.rewards.{name}", function)
    rewards = score(made, of_row, scorer)
    texts = [Letters().decode(segment.token_ids) for segment in made.segments]
    record = rollout_record(made, of_row | {"uid": "u"}, step=1, input=prompt, output="", score=None, texts=texts)
    assert [each.new for each in rescore([record], scorer)] == [rewards.score]
    return rewards.score_info.get("format", rewards.score)


@pytest.mark.parametrize(
    ("turns", "formed"),
    [
        ([(f"<think>a</think>\n{SEARCH}", None), "<think>b</think><answer>Rome</answer>"], True),
        (
            [(f"I look.\n{SEARCH}", None), (f"<think>Again.</think>More: {SEARCH}", "tool"), "<answer>Rome</answer>"],
            True,
        ),
        ([("<think>a</think>", None), "<answer>Rome</answer>"], True),  # a gateway's message has no calls in it
        ([("<think>a</think>[search(q)]", None), "It is <answer>Rome</answer>"], False),
        ([(f"<think>a{SEARCH}", None), "</think><answer>Rome</answer>"], False),
        ([(f"<think>a</think>{SEARCH}", "malformed"), "<answer>Rome</answer>"], False),
        ([("so <search>q</search>", None), "<answer>Rome</answer>"], False),
        ([(f"<answer>Rome</answer>{SEARCH}", None), "<answer>Rome</answer>"], False),
        ([(SEARCH, None)], False),
    ],
)
def test_searching_by_native_calls_is_in_search_r1s_form(turns, formed):
    assert in_form("search_r1", *turns) == formed


def test_a_tag_that_the_prompt_opens_is_seen_by_forms():
    thinks, opened = "Hm.</think>", "q<think>\n"
    for prompt, earned in ((opened, 1.0), ("q", 0.0)):
        assert in_form("tags", f"{thinks}<answer>Rome</answer>", prompt=prompt) == earned
        assert in_form("geo3k", f"{thinks}\\boxed{{5}}", prompt=prompt) == pytest.approx(0.1 * earned)
        turns = (f"{thinks}{SEARCH}", None), f"{thinks}<answer>Rome</answer>"
        assert in_form("search_r1", *turns, prompt=prompt) == earned
    assert in_form("tags", f"{thinks}<answer>Rome</answer>", prompt=opened, function="count_tags") == 1.0
    assert in_form("tags", "<answer>Rome</answer>", prompt=opened) == 0.0  # never closed
    assert in_form("tags", f"<think>{thinks}<answer>Rome</answer>", prompt="q<assistant>\n") == 1.0


def test_an_empty_block_is_no_reasoning():
    assert in_form("geo3k", "<think>\n</think>\\boxed{5}") == 0.0
    assert in_form("tags", "<think>\n</think><answer>Rome</answer>") == 0.0
