"""Several agents in one session: a request names its role, and every role its reward."""

import openai
import pytest
from agents_stage import says
from gateway_stage import USER, post_reward, roll, talk

from etude.agents.base import AGENT_LOOPS
from etude.agents.gateway import openai_agent
from etude.errors import EtudeError
from etude.options.rollout import AgentOptions
from etude.trajectory import StopReason

DUEL = AgentOptions(roles=("white", "black"))


def by(role):
    return {"extra_headers": {"X-Agent-Role": role}}


def test_each_role_is_a_sequence_of_its_own_with_the_rewards_for_its_turns():
    async def work(stage):
        for role in ("white", "black", "white/2"):  # the same words, and three sequences
            await stage.chat([USER], **by(role))
        for body in ({"reward": 1, "role": "black"}, {"reward": 0.5}, {"reward": 2, "role": "white"}):
            assert (await post_reward(stage.url, stage.key, body))[0] == 200
        for role in ("green", "white/3", 7, "white/x"):
            assert (await post_reward(stage.url, stage.key, {"reward": 1, "role": role}))[0] == 400
        return stage.session.trajectories(), stage.session.trajectories(by_role=False)

    own, together = talk(work, [says("5"), says("6"), says("7")], agent=DUEL)
    assert [(each.role, each.rewards.steps) for each in own] == [
        ("white", [(0, "agent", 2.0)]),
        ("black", [(0, "agent", 1.0)]),
        ("white/2", [(0, "agent", 0.5)]),
    ]
    assert [len(each.rewards.steps) for each in together] == [0, 0, 3]


def test_an_unknown_role_is_one_line_that_names_the_known_ones():
    async def work(stage):
        errors = []
        for role in ("whte", "white/", "white/1234"):
            with pytest.raises(openai.BadRequestError) as caught:
                await stage.chat([USER], **by(role))
            errors.append(caught.value.body["message"])
        return errors, len(stage.session.tree.turns)

    errors, turns = talk(work, [], agent=DUEL)
    assert turns == 0
    assert all("\n" not in each and "white, black" in each for each in errors)
    assert "did you mean 'white'" in errors[0]

    async def undeclared(stage):
        with pytest.raises(openai.BadRequestError, match=r"rollout\.agent\.roles"):
            await stage.chat([USER], **by("white"))

    talk(undeclared, [])


@pytest.mark.parametrize(
    ("reward", "rewards"),
    [
        ({"white": 1, "black": -1}, [1.0, -1.0]),
        (0.5, [0.5, 0.5]),
        ({"white": 1}, "none for the role 'black'"),
        ({"white": 1, "black": None}, "none for the role 'black'"),
        ({"white": 1, "blakc": -1}, "did you mean 'black'"),
        ({"white": 1, "black": float("nan")}, "not finite"),
    ],
)
def test_an_agents_reward_is_a_number_for_all_or_one_for_each_role(reward, rewards):
    @openai_agent("duel")
    async def duel(client, row):
        for role in ("white", "black"):
            await client.chat.completions.create(model="any", messages=row["raw_prompt"], **by(role))
        return reward

    try:
        [result], _ = roll("duel", agent=DUEL, scored=False)
    finally:
        AGENT_LOOPS._items.pop("duel")
    if isinstance(rewards, str):
        assert result.dropped is StopReason.AGENT_ERROR
        assert rewards in result.cause
    else:
        assert [(each.role, each.rewards.score) for each in result.sequences] == list(zip(("white", "black"), rewards))


@pytest.mark.parametrize(
    ("posted", "returned", "found"),
    [
        ([("white", 1), ("black", 2)], None, [("white", None, 1.0), ("black", None, 2.0)]),
        ([("white", 1)], 5.0, [("white", None, 1.0), ("black", 5.0, 0.0)]),  # the manager's score will replace it
        ([("black", 2)], 5.0, "none for the role 'white'"),
        ([(None, 2)], None, [("white", None, 0.0), ("black", None, 2.0)]),  # shared, as the manager's score is
    ],
)
def test_beside_a_reward_manager_a_role_keeps_what_was_posted_for_it(posted, returned, found):
    @openai_agent("duel")
    async def duel(client, row, base_url, api_key):
        for role in ("white", "black"):
            await client.chat.completions.create(model="any", messages=row["raw_prompt"], **by(role))
        for role, value in posted:
            body = {"reward": value} | ({"role": role} if role else {})
            assert (await post_reward(base_url, api_key, body))[0] == 200
        return returned

    try:
        [result], _ = roll("duel", agent=DUEL, scored=True)
    finally:
        AGENT_LOOPS._items.pop("duel")
    if isinstance(found, str):  # scored by the manager all the same, and said
        assert result.trajectory.stop_reason is StopReason.AGENT_ERROR
    else:
        seen = [
            (each.role, each.rewards.score, sum(value for *_, value in each.rewards.steps)) for each in result.sequences
        ]
        assert seen == found


def test_a_reward_that_is_posted_again_counts_once():
    async def work(stage):
        await stage.chat([USER])
        counts = []
        for once, value in (("a", 1), ("a", 1), ("b", 2), (None, 4), (None, 4)):
            headers = {"Idempotency-Key": once} if once else {}
            _, posted = await post_reward(stage.url, stage.key, {"reward": value}, **headers)
            counts.append(posted["rewards"])
        return counts, stage.session.trajectories()[-1].rewards.total()

    assert talk(work, [says("5")]) == ([1, 1, 2, 3, 4], 11.0)


@pytest.mark.parametrize(
    ("roles", "scores", "words"),
    [
        (("white", "green"), (None, 1.0), "no role 'green'"),
        (("white", "white", "black"), (0.5, 1.0, 1.0), "gave sequence 0"),
        (("white", "black", "white"), (None, None, 1.0), None),
        (("", "black", "white"), (None, 1.0, 1.0), "none to the role ''"),
    ],
)
def test_a_loop_of_ones_own_names_roles_and_rewards_each_or_none(roles, scores, words):
    from etude.agents.validation import _check_roles
    from etude.trajectory import Provenance, Trajectory

    sequences = []
    for role, score in zip(roles, scores):
        made = Trajectory("r", [1], role=role)
        made.append([2], Provenance.SAMPLED)
        made.rewards.score = score
        sequences.append(made)
    if words is None:
        return _check_roles(sequences, "own", DUEL.roles)
    with pytest.raises(EtudeError, match=words):
        _check_roles(sequences, "own", DUEL.roles)
