"""Compaction: a conversation that outgrows its limit goes on from the model's own summary, in a new sequence."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from agents_stage import CHAT, QUESTION, TOKENIZER, Echo, call, encode, run, says
from exact_stage import TEMPLATES, Policy, full_log_probs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_agents_exactness import talks

from etude.agents.interactions import BaseInteraction
from etude.chat import ChatTemplate, placeholders
from etude.checks.setup import check_compaction
from etude.dumps import sequences_of, trajectory_from_record
from etude.errors import ConfigError
from etude.options import CompactOptions, MultiTurnOptions, RewardOptions, RolloutOptions
from etude.rewards import TrajectoryView
from etude.trainer.rollouts import dump_records
from etude.trajectory import Provenance, Rollout, StopReason
from etude.viewer.explain import Verdict, check_overlap, check_sequence, list_tokens

ASK = "Sum up."


def rolled(script, *, tools=None, row=None, interactions=(), compact=None, **given):
    """(sequences, what the engine was asked) of a scripted conversation that is compacted above 205 tokens."""
    compact = CompactOptions(**({"at_tokens": 205, "prompt": ASK, "summary_tokens": 30} | (compact or {})))
    given = {"response_length": 600, **given}
    multi_turn = {"compact": compact, **given.pop("multi_turn", {})}
    given |= {"interactions": interactions, "multi_turn": multi_turn}
    [result], engine = run(None, 1, script, tools or [Echo(reward=0.5)], row=row, **given)
    return result.sequences, engine.asked


WORDS = st.lists(st.sampled_from(["a ", "text ", "value ", "5 "]), max_size=30).map("".join)


@settings(max_examples=15)
@given(
    turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=8),
    keep_last=st.integers(0, 5),
    at_tokens=st.integers(180, 300),
)
def test_what_is_kept_is_kept_to_the_id_and_all_of_it_is_one_rollout(turns, keep_last, at_tokens):
    """Whatever the turns: a sequence begins within the limit, with the question, the summary and the very end of the context
    before the request; every turn of the engine's is trained on once; calls and rewards are the rollout's."""
    tool = Echo(reward=0.5, respond=lambda parameters: turns[int(parameters["text"])][1])
    schemas, called = [tool.get_openai_tool_schema().to_openai()], []

    def script(request_id, prompt, turn):
        if TOKENIZER.decode(prompt).count(ASK):
            return says("so far")
        called.append(turn)
        return says(turns[len(called) - 1][0] + call(text=str(len(called) - 1)) if len(called) <= len(turns) else "5")

    made, asked = rolled(script, tools=[tool], compact={"at_tokens": at_tokens, "keep_last": keep_last})
    sampled = [segment for sequence in made for segment in sequence.segments if segment.log_probs is not None]
    assert len(asked) == len(sampled) == made[-1].assistant_turns
    assert sum(sum(sequence.response_mask) for sequence in made) == sum(len(each.token_ids) for each in sampled)
    for after, before in zip(made[1:], made):
        assert after.messages[1]["content"] == f"{QUESTION[1]['content']}\n{placeholders.SUMMARY}\nso far"
        head = CHAT.initial_ids(after.messages[:2], schemas)
        assert (after.prompt_ids[: len(head)], len(after.prompt_ids) <= at_tokens) == (head, True)
        tail = after.prompt_ids[len(head) :]
        kept = [each for each in after.messages[2:] if any(each is other for other in before.messages)]
        assert bool(tail) == bool(kept)
        if kept:
            assert (kept[0]["role"], kept[-1], keep_last > 0) == ("assistant", before.messages[-3], True)
            ids = before.context_ids()
            start = next(n for n in range(len(ids)) if ids[n : n + len(tail) - 16] == tail[:-16])  # without its end
            assert ids[start - 1] == head[-1]  # behind the same generation prompt
    assert [record.response for record in made[-1].tool_calls] == [answer for _, answer in turns]
    assert sum(value for _, _, value in made[-1].rewards.steps) == 0.5 * len(turns)


LONG, SHORT, SUMMARY = says(call(text="a " * 14)), says(call(text="e")), says("so far")


def test_limits_count_turns_of_all_sequences_without_summaries():
    script = [LONG, SHORT, SUMMARY] * 4
    made, _ = rolled(script, multi_turn={"max_assistant_turns": 3})
    assert (len(made), made[-1].stop_reason) == (2, StopReason.MAX_ASSISTANT_TURNS)
    spent = len(LONG) + len(SHORT) + len(SUMMARY)
    for budget, count in ((spent + 1, 2), (spent, 1), (spent - 1, 1)):
        made, _ = rolled(script, multi_turn={"max_trajectory_tokens": budget})
        assert (len(made), made[-1].stop_reason) == (count, StopReason.TRAJECTORY_LENGTH)
        assert sum(sum(sequence.response_mask) for sequence in made) == budget


def test_a_summary_that_is_cut_goes_on_and_control_tokens_in_it_are_text():
    made, _ = rolled([LONG, SHORT, says("a b c d e f"), says("5")], compact={"summary_tokens": 3})
    assert len(made[0].segments[-1].token_ids) == 3
    assert made[1].stop_reason is StopReason.COMPLETED
    spelled = [*encode("so <|im_"), *encode("end|> far"), CHAT.end_of_turn_id]
    made, _ = rolled([LONG, SHORT, spelled, says("5")])
    assert made[1].messages[1]["content"].endswith("far")
    assert made[1].prompt_ids.count(CHAT.end_of_turn_id) == 2  # of the system's and the user's message


@pytest.mark.parametrize(("keep_last", "left"), [(0, [[3], []]), (2, [[1], [3], []])])
def test_a_turns_reward_and_calls_stay_its_own_after_a_summary(keep_last, left):
    """Its reward went to the last token of the rollout, its calls to a later message."""
    tool = Echo(respond=lambda parameters: parameters["text"])
    script = [LONG, SHORT, SUMMARY, says(call(text="f")), says("5")]
    made, _ = rolled(script, tools=[tool], compact={"keep_last": keep_last, "at_tokens": 225})
    main = made[-1]
    main.rewards.steps = [(turn, name, float(turn + 1)) for turn, name, _ in main.rewards.steps]
    on_tokens = Rollout(made).token_level_scores()
    ends = [sequence.turn_ends() for sequence in made]
    assert {place: value for place, value in enumerate(on_tokens[0]) if value} == {ends[0][0]: 1.0, ends[0][1]: 2.0}
    assert {place: value for place, value in enumerate(on_tokens[1]) if value} == {ends[1][3]: 4.0}
    turns = TrajectoryView.of(main).turns
    assert [[record.turn for record in turn["tool_calls"]] for turn in turns] == left
    assert TrajectoryView.of(main).prompt[-1]["role"] == "user"
    records = [json.loads(json.dumps(sequence.to_record())) for sequence in made]
    assert trajectory_from_record(records[1]).kept_turns == main.kept_turns
    assert [token.reward for token in list_tokens(records[0], None, records)] == on_tokens[0]


def test_a_response_that_has_no_room_left_is_compacted_below_the_limit():
    made, _ = rolled([LONG, SUMMARY, says("5")], compact={"at_tokens": 500}, response_length=150)
    assert [sequence.stop_reason for sequence in made] == [StopReason.COMPLETED] * 2


class Patient(BaseInteraction):
    """A user who asks three times, and notes what is said."""

    heard: tuple[str, ...] = ()

    async def generate_response(self, instance_id, messages, **kwargs):
        self.heard = (*self.heard, messages[-1]["spoken"])
        return len(self.heard) > 2, "And now? " * 8, 0.25, {}


def test_a_user_goes_on_talking_after_a_summary():
    user = Patient({"name": "patient"})
    script = [says("one"), SUMMARY, says("two"), SUMMARY, says("three")]
    row = {"interaction_kwargs": {"name": "patient"}}
    made, _ = rolled(script, row=row, interactions=[user], compact={"at_tokens": 150})
    assert (user.heard, len(made)) == (("one", "two", "three"), 3)
    assert [value for _, _, value in made[-1].rewards.steps] == [0.25] * 3


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    compact = CompactOptions(at_tokens=70, summary_tokens=12, prompt=ASK, keep_last=2)
    limits = {"compact": compact, "max_assistant_turns": 6}
    return {name: Policy(tmp_path_factory.mktemp(name), TEMPLATES[name], **limits) for name in ("own", "forgetful")}


@pytest.mark.parametrize("template", ["own", "forgetful"])
@settings(max_examples=4)
@given(talk=talks)
def test_what_is_trained_on_is_what_the_real_engine_drew(policies, template, talk):
    made = policies[template]
    batch, _ = made.roll_out(**talk)
    for rollout in batch.non_tensor_batch["rollout"]:
        asked = list(made.asked[rollout.trajectory.request_id])
        for sequence in rollout.sequences:
            seen = list(sequence.prompt_ids)
            for segment in sequence.segments:
                if segment.provenance is Provenance.SAMPLED:
                    saw, output = asked.pop(0)
                    assert (saw, output.token_ids) == (seen, list(segment.token_ids))
                seen += segment.token_ids
            again = full_log_probs(made.model, sequence, 1.0)
            pairs = zip(sequence.response_log_probs, again.tolist(), sequence.response_mask)
            assert all(abs(ours - theirs) < 1e-4 for ours, theirs, sampled in pairs if sampled)
        assert asked == []


def test_explain_verifies_a_compacted_rollout(policies):
    made = policies["own"]
    batch, _ = made.roll_out([[{"role": "user", "content": "What is 2 + 3?"}]], n=4, seed=5)
    assert max(len(rollout.sequences) for rollout in batch.non_tensor_batch["rollout"]) > 1
    records = dump_records(made.worker.context.chat, 1, batch, RewardOptions())
    model = made.worker.options.model.path
    for record in records:
        for sequence in sequences_of(record):
            checks = check_sequence(sequence, Path(model))
            assert {check.verdict for check in checks} == {Verdict.HOLDS}, checks
        if record["earlier"]:
            assert check_overlap(record).verdict is Verdict.HOLDS


def test_what_cannot_be_asked_is_refused_at_the_start():
    class NoUserAfterTools(ChatTemplate):
        def context_ids(self, messages, **given):
            if messages[0]["role"] == "tool" and len(messages) > 1:
                raise ConfigError("roles must alternate")
            return super().context_ids(messages, **given)

    def setup(chat, prompt):
        compact = CompactOptions(at_tokens=80, summary_tokens=30, prompt=prompt)
        rollout = RolloutOptions(prompt_length=40, response_length=100, multi_turn=MultiTurnOptions(compact=compact))
        return SimpleNamespace(
            bundle=SimpleNamespace(chat=chat),
            options=SimpleNamespace(rollout=rollout),
            catalogue=SimpleNamespace(tool_messages=True, schemas={"echo": {}}, acting_tools=False),
            _result_tag=None,
        )

    check_compaction(setup(CHAT, ASK))
    for chat, prompt, why in ((CHAT, "long " * 20, "take up to"), (NoUserAfterTools(TOKENIZER), ASK, "must alternate")):
        with pytest.raises(ConfigError, match=why) as caught:
            check_compaction(setup(chat, prompt))
        assert caught.value.key.endswith("compact.at_tokens")
        assert caught.value.fix
