"""Reward managers and the trajectory scorer: what a scorer sees, and what its failures mean."""

import asyncio
import time

import numpy as np
import pytest
import torch

from etude.errors import ConfigError, EtudeError, InfrastructureError
from etude.protocol import DataProto
from etude.rewards import (
    REWARD_MANAGERS,
    AbstractRewardManager,
    NaiveRewardManager,
    RewardManagerBase,
    TrajectoryScorer,
    compute_score,
    duplicate_judge,
    register,
)
from etude.trajectory import Provenance, Trajectory


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


@pytest.mark.parametrize("result", [None, "1", float("nan"), {}, {"score": None}, {"score": float("inf")}, [1.0]])
def test_no_finite_score_is_broken_not_wrong(result):
    made = trajectory(("a", ""))
    with pytest.raises(InfrastructureError, match="compute_score for the data source 'openai/gsm8k'"):
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
    assert returned["reward_extra_info"] == {"acc": [1.0, 1.0]}


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
