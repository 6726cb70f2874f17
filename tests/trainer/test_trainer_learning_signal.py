"""Why a loss is zero, and which reward training follows: the metrics, the warnings, and the end of a run that only fails."""

import pytest
import torch
from house_stage import metrics, steps

from etude.checks.step_warnings import ALLOW, MEND, find_evidence, find_problems
from etude.errors import TrainingStopped
from etude.protocol import DataProto
from etude.rewards import COMPONENTS
from etude.trainer.group_filter import equal_group_metrics
from etude.trainer.learning_signal import component_metrics, loss_metrics
from etude.trainer.metrics import SkippedSteps
from etude.trainer.run import train
from etude.trajectory import Rewards, Rollout, StopReason, Trajectory


def rollout(stop=StopReason.COMPLETED, failures=0, **score_info):
    made = Trajectory("r", [1], stop_reason=stop, rewards=Rewards(score=0.0, score_info=score_info))
    return Rollout([made], failures=failures)


def test_shares_of_rollouts_that_teach_nothing():
    dropped = Rollout([], failures=2)
    dropped.drop(StopReason.INFRASTRUCTURE)
    found = loss_metrics(
        [rollout(pred="5"), rollout(pred=None), rollout(StopReason.RESPONSE_LENGTH), rollout(failures=1), dropped]
    )
    assert found == {
        "rollout/infrastructure_failure_share": 0.4,
        "rollout/truncated_share": 0.25,
        "rollout/unparsed_share": 0.5,
    }
    assert loss_metrics([]) == {}


def test_groups_with_equal_rewards():
    batch = DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1]] * 6 + [[0, 0]]),
            "token_level_scores": torch.tensor([[0.5, 0.5], [0.0, 1.0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 9.0]]),
        },
        non_tensors={"uid": ["a", "a", "b", "b", "c", "c", "c"]},
    )
    assert equal_group_metrics(batch) == {"rollout/equal_groups_share": pytest.approx(2 / 3)}
    assert equal_group_metrics(batch[:1]) == {}
    batch.batch["token_level_scores"][1, 1] += 1e-6  # by rounding: `algorithm.filter_groups` drops such a group, too
    assert equal_group_metrics(batch) == {"rollout/equal_groups_share": pytest.approx(2 / 3)}


def test_what_an_earlier_sequence_earned_makes_groups_differ():
    batch = DataProto.from_dict(
        tensors={
            "response_mask": torch.ones(4, 1),
            "token_level_scores": torch.tensor([[0.0], [0.0], [1.0], [0.0]]),  # a main sequence, and the one before it
            "main_sequence": torch.tensor([True, False, True, False]),
        },
        non_tensors={"uid": ["a"] * 4},
    )
    assert equal_group_metrics(batch) == {"rollout/equal_groups_share": 0.0}
    batch.batch["token_level_scores"] = torch.tensor([[0.0], [1.0], [0.0], [0.0]])
    assert equal_group_metrics(batch) == {"rollout/equal_groups_share": 0.0}
    batch.batch["token_level_scores"] = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    assert equal_group_metrics(batch) == {"rollout/equal_groups_share": 1.0}


def test_the_parts_of_the_spread_of_rewards():
    def rewards(right, format_):
        info = {"right": right, "format": format_, COMPONENTS: {"right": right, "format": 0.1 * format_}}
        return Rewards(steps=[(0, "calc", 0.25)], score=right + 0.1 * format_, score_info=info)

    found = component_metrics([rewards(1, 1), rewards(0, 1), rewards(1, 0), rewards(0, 0)], score_weight=2.0)
    assert found == {
        "reward/score/right/mean": 0.5,
        "reward/score/format/mean": 0.5,
        "reward/spread/score/right": pytest.approx(1 / 1.01),
        "reward/spread/score/format": pytest.approx(0.01 / 1.01),
    }
    assert find_problems(found) == {
        "reward/spread/score/right": (
            "99 % of the spread of rewards comes from 'score/right' alone",
            "see what it rewards",
        )
    }
    spread = "reward/spread/"
    assert find_problems({f"{spread}score": 0.97, f"{spread}step/price": 0.03}) == {}  # the task, and what a call costs
    assert [*find_problems({f"{spread}score": 0.97, f"{spread}final/price": 0.03})] == [f"{spread}score"]  # two judges
    [against] = find_problems({f"{spread}score": -0.6, f"{spread}final/price": 1.6}).values()  # such shares exceed 1
    assert against.what == "all of the spread of rewards comes from 'final/price' alone, against the other parts"
    assert component_metrics([Rewards(score=1.0), Rewards(score=0.0)]) == {}  # the only one that varies
    same = [Rewards(steps=[(0, tool, 0.05)], score=2.0) for tool in 23 * ["stock"] + 25 * ["price"]]
    assert component_metrics(same) == {}  # of 48 equal totals, the variance is rounding
    parts = [{"a": 5.0}, "a", {"a": "1"}]  # of a scorer that reports such a key, and whose score is no sum of it
    claimed = [Rewards(score=0.0 + n, score_info={COMPONENTS: part}) for n, part in enumerate(parts)]
    assert component_metrics(claimed) == {}


def test_calls_that_infrastructure_lost_are_not_the_models_mistakes():
    """A service that is down has a line of its own; a worked example in the prompt would not mend it."""
    lost = {"rollout/infrastructure_failures": 4.0, "tool/t/calls": 14.0, "tool/t/errors": 4.0}
    assert [*find_problems(lost | {"tool/t/infrastructure": 4.0})] == ["rollout/infrastructure_failures"]
    mixed = find_problems(lost | {"tool/t/errors": 7.0, "tool/t/infrastructure": 4.0})["tool/t"]
    assert mixed.what == "tool t: 7 of 14 calls failed, 4 lost to infrastructure"
    gone = {"tool/t/errors": 14.0, "tool/t/infrastructure": 12.0, "tool/t/timeouts": 6.0}  # a server that died
    told = find_problems(lost | gone)["tool/t"].what
    assert told == "tool t: 14 of 14 calls failed, 6 lost to infrastructure, 6 timed out"
    late = find_problems(lost | {"tool/t/infrastructure": 4.0, "tool/t/timeouts": 4.0})["tool/t"]
    assert late == ("tool t: 4 of 14 calls failed, 4 timed out", "mend the tool, or raise its config.timeout")


def test_warnings_of_shares():
    assert "95 % of groups" in find_problems({"rollout/equal_groups_share": 0.95})["rollout/equal_groups_share"].what
    assert "20 % of answers" in find_problems({"rollout/unparsed_share": 0.2})["rollout/unparsed_share"].what
    assert find_problems({"rollout/equal_groups_share": 0.5, "rollout/unparsed_share": 0.05}) == {}


def test_a_warning_quotes_the_commonest_error_and_says_whether_to_allow_longer_answers():
    def rollout(*calls, stop="completed", ids=range(40), unread=0):
        return {
            "tool_calls": [dict(zip(("name", "error", "response"), each)) for each in calls],
            "stop_reason": stop,
            "response_ids": [*ids],
            "metrics": {"unread_calls": unread},
        }

    unknown = [rollout(("price", "tool", f"unknown item '{item}'\n in shop")) for item in ("Apples", "Figs", "Apples")]
    late = rollout(
        ("price", "exception", "Error executing: " + 200 * "x"),
        ("sum", None, "3"),
        ("sun", "unknown_tool", "no tool 'sun'"),
    )
    evidence = find_evidence([*unknown, late])
    assert evidence["tool/price"].what == ", 3 like: unknown item 'Apples' in shop"
    assert evidence["rollout/unknown_tool_calls"] == (", 1 with: no tool 'sun'", "")
    assert len(find_evidence([late])["tool/price"].what) < 120
    assert [find_evidence(each)["tool/price"].fix for each in (unknown, [late])] == [ALLOW, MEND]  # refuses, raises
    opening = "Error executing tool 'price': "
    causes = [
        rollout(("price", "exception", opening + error))
        for error in ("KeyError: 'fig'", "ValueError: 1", "KeyError: 2")
    ]
    assert find_evidence(causes)["tool/price"].what.startswith(f", 2 like: {opening}KeyError")
    cut = {"stop": "response_length"}
    within = rollout(("road", "malformed", "it is not valid Python"), ids=range(90), **cut)
    assert "1 of 1 are cut within a tool call" in find_evidence([within])["response_length"].fix
    whole = rollout(("road", "not_executed", "not executed: a length limit ended its turn"), ids=range(90), **cut)
    advice = find_evidence([whole, rollout()])["response_length"].fix  # a guess ends early
    assert advice.startswith("raise data.max_response_length: 1 of 1 are cut within a tool call, or have no room left")
    fits = [rollout(("road", None, "120"))] * 2  # calls do fit, where the model writes nothing but them
    assert find_evidence([within, *fits])["response_length"].fix.startswith("do not raise data.max_response_length")
    stuck, slow = rollout(**cut, ids=[1, 2, 3] * 30), rollout(**cut, ids=range(90))
    advice = [find_evidence(each)["response_length"].fix for each in ([stuck, unknown[0]], [slow, unknown[0]], [slow])]
    assert [
        part in text
        for part, text in zip(
            ("of these repeat themselves", "take 40 at most", "raise data.max_response_length if"), advice
        )
    ] == [True] * 3
    near = rollout(**cut, ids=range(60))  # hardly longer than those that end: now and then, or often
    shares = [find_evidence([near, *unknown[:1] * others])["response_length"].fix for others in (7, 2)]
    assert [fix.startswith("so few need nothing") for fix in shares] == [True, False]
    helped, guess = ("price", None, "3"), rollout(ids=range(7))  # the right answers are the long ones, and cut
    alone, beside = ([rollout(helped, ids=range(40), **cut)] * 3 + [guess, *more] for more in ([], [rollout(helped)]))
    advice = [find_evidence(each)["response_length"].fix for each in (alone, beside)]
    assert [fix.startswith("raise data.max_response_length if") for fix in advice] == [True, True]
    assert [fix.rpartition(": ")[2] for fix in advice] == ["none ends before", "those that end take up to 40"]
    problems = find_problems({"tool/price/calls": 4.0, "tool/price/errors": 4.0}, evidence)
    assert problems == {"tool/price": ("tool price: 4 of 4 calls failed, 3 like: unknown item 'Apples' in shop", ALLOW)}
    few = find_evidence([*[rollout()] * 30, rollout(("sun", "malformed", "no JSON"), unread=1)])
    counts = {"rollout/unread_calls": 1.0, "rollout/malformed_calls": 1.0, "actor/ppo_kl": 6.0}
    assert [problem.fix.startswith("so few need nothing") for problem in find_problems(counts, few).values()] == [
        False,
        True,
        True,
    ]


def test_a_format_that_reads_most_calls_is_not_to_be_changed():
    def rollout(*names, unread=0):
        calls = [{"name": name, "error": None, "response": ""} for name in names]
        return {
            "tool_calls": calls,
            "stop_reason": "completed",
            "response_ids": [1],
            "metrics": {"unread_calls": unread},
        }

    counts, spoilt = {"rollout/unread_calls": 2.0}, [rollout(unread=1)] * 2
    [mixed] = find_problems(counts, find_evidence([*spoilt, *[rollout("price")] * 6])).values()
    assert mixed.what.endswith("multi_turn.format does not read, while 6 of 8 rollouts have some that it reads")
    assert mixed.fix.startswith("put a worked example")
    [none] = find_problems(counts, find_evidence([*spoilt, *[rollout()] * 6])).values()
    assert none.fix == "set multi_turn.format to that of the model's calls"


def test_a_warm_up_is_not_warned_of_what_it_has_yet_to_teach():
    samples = {"rollout/malformed_calls": 9.0, "tool/price/calls": 9.0, "tool/price/errors": 9.0}
    assert len(find_problems(samples)) == 2
    assert [*find_problems(samples | {"sft/loss": 1.0, "sft/skipped_steps": 1.0})] == ["sft/skipped_steps"]
    assert [*find_problems({"dpo/loss": 1.0, "dpo/skipped_steps": 1.0})] == ["dpo/skipped_steps"]


def test_a_validation_says_that_answers_are_missing():
    found = find_problems({"val-core/shop/reward/missing": 3, "val/rollout/dropped": 3.0})
    assert [problem.what for problem in found.values()] == [
        "3 answers of the validation dropped: its metrics are without them"
    ]


def test_equal_rewards_still_teach_the_penalty_in_them():
    step = {"critic/score/min": 0.0, "critic/score/max": 0.0, "rollout/equal_groups_share": 1.0}
    penalised = step | {"actor/reward_kl_penalty": 0.009}
    assert find_problems(step)["equal rewards"].what.endswith("learns nothing")
    assert find_problems(penalised)["equal rewards"].what.endswith("learns only the KL penalty")
    assert find_problems(penalised | {"training/filter_groups/kept": 0.0})["equal rewards"].what.endswith(
        "learns nothing"
    )
    [found] = find_problems({"rollout/equal_groups_share": 0.95, "actor/reward_kl_penalty": 0.009}).values()
    assert "learns only the KL penalty from them" in found.what


def test_failures_above_the_share_warn_once_and_stop_at_the_second_step(caplog):
    watched = SkippedSteps(5, 0.25)
    share = "rollout/infrastructure_failure_share"
    watched.note({share: 0.5})
    assert "50 % of rollouts met an infrastructure failure" in caplog.text
    watched.note({share: 0.25})
    watched.note({share: 0.5})
    with pytest.raises(TrainingStopped, match=r"max_infra_failure_share.*2 training steps in a row"):
        watched.note({share: 0.5})
    SkippedSteps(5).note({share: 1.0})


def test_a_run_whose_infrastructure_mostly_fails_ends_with_a_checkpoint(tiny, tmp_path):
    (tmp_path / "moody.py").write_text(
        "seen = set()\n"
        "def compute_score(solution_str, extra_info):\n"
        "    key = (extra_info['index'], solution_str)\n"
        "    if key not in seen:\n"
        "        seen.add(key)\n"
        "        raise ConnectionError('try again')\n"
        "    return 0.5\n"
    )
    run = tmp_path / "run"
    settings = (f"custom_reward_function.path={tmp_path}/moody.py", "trainer.max_infra_failure_share=0.25")
    with pytest.raises(TrainingStopped, match="infrastructure failure"):
        train(tiny.config(run, "actor_rollout_ref.rollout.infrastructure_retries=2", *settings))
    assert steps(run)[-1] == 2
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert all(each["rollout/dropped"] == 0 for each in metrics(run))  # all were scored at the second try


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("standing", ["lr=1e-12", "lr=0", "clip_grad=1e-12"])
def test_a_run_whose_weights_hardly_move_says_so(tiny, tmp_path, standing):
    train(tiny.config(tmp_path, f"{ACTOR}.optim.{standing}", f"{ACTOR}.optim.weight_decay=0"))
    records = [record for record in metrics(tmp_path) if record.get("actor/grad_norm", 0.0) > 0]
    assert records
    for record in records:
        assert record["actor/weight_change"] < 1e-7
        assert "actor/weight_change" in find_problems(record)
        assert "actor/weight_change" not in find_problems(record | {"actor/weight_change": 1e-5})
    decayed = {"sft/loss": 0.1, "sft/weight_change": 9e-9, "sft/grad_norm": 0.2, "sft/lr": 6e-9}
    said = find_problems(decayed)["sft/weight_change"]
    assert said.what.endswith("weights hardly move at a rate of 6e-09")
    assert said.fix.endswith("unless a warm-up begins or a decay ends here")


def test_what_a_teachers_loss_teaches_needs_no_advantage():
    differ = {"critic/score/min": 0.0, "critic/score/max": 1.0, "rollout/equal_groups_share": 0.5}
    differ |= {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    assert [*find_problems(differ)] == ["no advantage"]
    assert find_problems(differ | {"distillation/reverse_kl": 0.1}) == {}
