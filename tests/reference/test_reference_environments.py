"""The figures of environments: those of the trainer are those of the plain one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.plain.rollouts import Rollout, environment_figures
from etude.trainer.metrics import environment_metrics
from etude.trajectory import Rewards, Trajectory

NUMBERS = st.floats(-2, 2, allow_nan=False)
EPISODES = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["", "gym:a", "b"]),
        "steps": st.lists(NUMBERS, max_size=3),
        "score": st.none() | NUMBERS,
        "acc": st.none() | st.sampled_from([0.0, 1.0]),
        "turns": st.integers(1, 4),
        "reported": st.dictionaries(st.sampled_from(["x", "y"]), NUMBERS),
    }
)


@settings(deadline=None)
@given(st.lists(EPISODES, max_size=6))
def test_the_figures_of_environments_are_the_plain_ones(episodes):
    trajectories, plain = [], []
    for each in episodes:
        steps, info = (
            [(0, "env", value) for value in each["steps"]],
            {} if each["acc"] is None else {"acc": each["acc"]},
        )
        made = Trajectory("r", [1], rewards=Rewards(steps, score=each["score"], score_info=info))
        made.assistant_turns = each["turns"]
        if each["name"]:
            made.extra_fields["environment"] = {"name": each["name"], "metrics": each["reported"]}
        trajectories.append(made)
        plain.append(
            Rollout(
                "u",
                step_rewards=steps,
                score=each["score"],
                accuracy=each["acc"],
                num_turns=made.num_turns,
                environment=each["name"],
                reported=each["reported"],
            )
        )
    weights = {"tool_reward_weight": 0.5, "score_weight": 2.0}
    found = environment_metrics(trajectories, 0.5, 2.0)
    expected = environment_figures(plain, {"reward_model": weights})
    assert found.keys() == expected.keys()
    assert all(abs(found[name] - expected[name]) < 1e-9 for name in expected)
