"""Tokens in, tokens out, with the real engine and the real update: over random conversations, templates and words of
tools and users, spelled-out control tokens among them.

- What is trained on is what the engine drew, behind what the engine saw; the mask is who wrote it, and nothing else.
- A full forward pass gives the engine's log-probs.
- Whatever stands at a masked position, as a label or in any column of the batch, changes no bit of loss and gradient.
"""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from batches_stage import update_batches
from exact_stage import BUDGET, TEMPLATES, Policy, full_log_probs
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.metrics import add_metrics, finish_metrics
from etude.training import OptimizerSet, OptimOptions, PolicyLearner, microbatches
from etude.training.packing import pack
from etude.trajectory import Provenance

SPELLED = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|endoftext|>",
    "<|call|>",
    "<|observation|>",
    "</tool_response>",
    "<start>",
    "<end>",
    "<|im_",
    "_end|>",
]
words = st.lists(
    st.sampled_from([*SPELLED, "value ", "7", "é", "日本", "🙂", "\n", " ", "assistant"]), min_size=1, max_size=12
).map("".join)
plain = st.lists(
    st.sampled_from(["What is ", "2", " + ", "3", "?", " é", "日本", "\n", "capital "]), min_size=1, max_size=8
)
question = st.builds(
    lambda system, text: [*system, {"role": "user", "content": "".join(text)}],
    st.sampled_from([[], [{"role": "system", "content": "Be brief."}]]),
    plain,
)
talks = st.fixed_dictionaries(
    {
        "conversations": st.lists(question, min_size=1, max_size=3),
        "words": st.lists(words, min_size=1, max_size=3),
        "user_words": words,
        "seed": st.integers(0, 1000),
    }
)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return {name: Policy(tmp_path_factory.mktemp(name), template) for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=20)
@given(talk=talks, temperature=st.sampled_from([1.0, 0.6]))
def test_what_is_trained_on_is_what_the_engine_drew_behind_what_it_saw(policies, template, talk, temperature):
    made = policies[template]
    batch, trajectories = made.roll_out(**talk, temperature=temperature)
    controls = {*made.tokenizer.all_special_ids}
    for row, trajectory in enumerate(trajectories):
        asked = list(made.asked[trajectory.request_id])
        seen, mask, drawn = list(trajectory.prompt_ids), [], []
        for segment in trajectory.segments:
            ids = list(segment.token_ids)
            if segment.provenance is Provenance.SAMPLED:
                saw, output = asked.pop(0)
                assert saw == seen
                assert ids == output.token_ids
                assert list(segment.log_probs) == output.log_probs
                drawn += ids
            elif segment.provenance is not Provenance.TEMPLATE:  # what others wrote is plain characters
                assert not controls & set(ids)
            mask += [int(segment.provenance is Provenance.SAMPLED)] * len(ids)
            seen += ids
        assert asked == []
        assert (trajectory.response_mask, len(mask) <= BUDGET) == (mask, True)

        columns = {name: column[row] for name, column in batch.batch.items()}
        real = columns["attention_mask"].bool()
        assert columns["input_ids"][real].tolist() == seen
        scored = columns["response_mask"].bool()
        assert columns["responses"][scored].tolist() == drawn
        assert columns["response_mask"][: len(mask)].tolist() == mask
        assert not columns["response_mask"][len(mask) :].any()

        again = full_log_probs(made.model, trajectory, temperature)[torch.tensor(mask).bool()]
        sampled = columns["rollout_log_probs"][scored].double()
        torch.testing.assert_close(sampled, again, rtol=0, atol=1e-4)
    recomputed = made.group.compute_log_prob(batch).batch["old_log_probs"]
    scored = batch.batch["response_mask"].bool()
    torch.testing.assert_close(recomputed[scored], batch.batch["rollout_log_probs"][scored], rtol=0, atol=1e-4)
    assert not recomputed[~scored].any()


def test_the_conversations_have_turns_of_everybody(policies):
    """The property above would hold of rollouts in which nothing happens; these are not such."""
    for made in policies.values():
        question = [{"role": "user", "content": "What is 2 + 3?"}]
        _, trajectories = made.roll_out([question] * 3, words=["5 <|im_end|>", "value"], n=4)
        owners = [s.provenance for trajectory in trajectories for s in trajectory.segments]
        assert min(owners.count(owner) for owner in Provenance) >= 5
        assert max(trajectory.assistant_turns for trajectory in trajectories) >= 3
        shown = "".join(m["content"] for t in trajectories for m in t.messages if m["role"] == "tool")
        assert "<|im_end|>" in shown


# -- masked positions ----------------------------------------------------------------------------------------------


class Recorder(OptimizerSet):
    """Keeps every gradient that it is given."""

    def step(self):
        self.gradients = [*getattr(self, "gradients", []), *(p.grad.clone() for p in self._parameters)]
        return super().step()


def update(made, batch):
    """Figures, gradients and new weights of `update_actor`, from the same weights each time."""
    worker, actor = made.worker, made.worker._actor
    model = copy.deepcopy(made.model)
    optimizer = Recorder(model, OptimOptions(lr=1e-2), None)
    # Straight to the worker: the group would not send the column `labels`.
    minis = update_batches(batch, worker.options.actor, shuffle=True, seed=1, ranks=1)
    worker._actor = PolicyLearner(model, max_tokens=200, optimizer=optimizer)
    try:
        figures = finish_metrics(add_metrics(worker.update_actor(part) for (part,) in minis))
    finally:
        worker._actor, worker._link.is_current = actor, True  # it was a copy that learned
    figures = {name: value for name, value in figures.items() if name.startswith("actor/")}  # not how long it took
    return figures, [*optimizer.gradients, *(p.detach() for p in model.parameters())]


def assert_same_bits(one, other):
    assert one[0] == other[0]
    assert len(one[1]) == len(other[1])
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1]))


@contextmanager
def labels_of_their_own():
    """The labels are read from the column `labels`, the context from `input_ids`, whatever `pack` makes of either."""

    def with_labels(batch, rows, device, vision, team):
        labelled = batch.select_idxs(list(range(len(batch))))
        labelled.batch["input_ids"] = batch.batch.get("labels", batch.batch["input_ids"])  # the weights' probe has none
        return replace(pack(batch, rows, device, vision, team), labels=pack(labelled, rows, device).labels)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(microbatches, "pack", with_labels)
        yield


def rolled(made, talk):
    batch, _ = made.roll_out(**talk)
    batch = made.learnable(batch)
    batch.batch["labels"] = batch.batch["input_ids"].clone()
    return batch


def whole_mask(batch):
    """(rows, prompt + response) of the sampled positions."""
    mask = batch.batch["response_mask"].bool()
    return torch.nn.functional.pad(mask, (batch.batch["input_ids"].shape[1] - mask.shape[1], 0))


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=8)
@given(talk=talks, junk=st.integers(0, 2**31), number=st.sampled_from([1e4, float("inf"), float("nan")]))
def test_whatever_stands_at_masked_positions_changes_no_bit(policies, template, talk, junk, number):
    made = policies[template]
    batch = rolled(made, talk)
    with labels_of_their_own():
        before = update(made, batch)
        sampled = whole_mask(batch)
        generator = torch.Generator().manual_seed(junk)
        noise = torch.randint(0, len(made.tokenizer), sampled.shape, generator=generator)
        batch.batch["labels"] = torch.where(sampled, batch.batch["labels"], noise)
        mask = batch.batch["response_mask"].bool()
        width = mask.shape[1]
        batch.batch["responses"] = torch.where(mask, batch.batch["responses"], noise[:, -width:])
        for name in ("advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs"):
            batch.batch[name] = batch.batch[name].masked_fill(~mask, number)
        assert_same_bits(update(made, batch), before)


@pytest.mark.parametrize("template", TEMPLATES)
def test_any_other_label_at_a_sampled_position_changes_the_gradient(policies, template):
    """The guard of the property above: it would see a label that counts, at every position that does."""
    made = policies[template]
    talk = {
        "conversations": [[{"role": "user", "content": "2 + 3?"}]],
        "words": ["value"],
        "user_words": "And?",
        "seed": 4,
    }
    batch = rolled(made, talk)
    with labels_of_their_own():
        before = update(made, batch)
        places = whole_mask(batch).nonzero().tolist()
        assert len(places) > 20
        for row, column in places[:: len(places) // 5]:
            changed = batch.select_idxs(list(range(len(batch))))
            changed.batch["labels"] = batch.batch["labels"].clone()
            changed.batch["labels"][row, column] = (int(batch.batch["labels"][row, column]) + 1) % len(made.tokenizer)
            assert not all(torch.equal(a, b) for a, b in zip(update(made, changed)[1], before[1]))


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_update_without_tricks_ignores_what_follows_the_last_sampled_token(policies, template):
    """No position there is anybody's context, so the ids themselves may change, and do, in the unaltered update."""
    made = policies[template]
    talk = {
        "conversations": [[{"role": "user", "content": "2 + 3?"}]] * 2,
        "words": ["value"],
        "user_words": "And?",
        "seed": 5,
    }
    batch = rolled(made, talk)
    before = update(made, batch)
    sampled = whole_mask(batch)
    last = (sampled * torch.arange(sampled.shape[1])).amax(dim=1)
    after = torch.arange(sampled.shape[1]) > last[:, None]
    assert after.any()
    batch.batch["input_ids"] = torch.where(after, 7, batch.batch["input_ids"])
    assert_same_bits(update(made, batch), before)
