"""The policy worker through its group: what it samples, what it computes, what it learns, what it writes and reads."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
import torch
from workers_stage import (
    WITH_REF,
    Echo,
    gap,
    learnable,
    policy,
    prompts,
    started,
    tiny_options,
    update,
    versions_of,
    weights_of,
)

from etude.agents import ValSamplingOptions
from etude.agents.batch import rows_of
from etude.errors import ConfigError, EtudeError
from etude.options import ActorOptions, CriticOptions
from etude.trajectory import Provenance, StopReason


@pytest.fixture(scope="module")
def rolled(model_path):
    """(worker, a batch rolled out with tools and made ready for an update, the tool)."""
    tool = Echo()
    group, worker = policy(model_path, {"echo": tool}, algorithm=WITH_REF)
    return group, worker, learnable(group, prompts(count=6, n=2)), tool


def test_a_rollout_has_its_columns_in_the_rows_order(rolled):
    _, worker, batch, tool = rolled
    columns = batch.batch
    assert columns["input_ids"].shape[1] == columns["prompts"].shape[1] + columns["responses"].shape[1]
    for row, result in zip(rows_of(batch), batch.non_tensor_batch["rollout"]):
        trajectory = result.trajectory
        assert trajectory.request_id == f"{row['uid']}/{row['rollout_index']}/0"
        shown = [t.get_openai_tool_schema().to_openai() for t in worker.context.tools.values()]
        assert trajectory.prompt_ids == worker.context.chat.initial_ids(row["raw_prompt"], shown)
        assert trajectory.rewards.score is not None
    kinds = Counter(s.provenance for t in batch.non_tensor_batch["rollout"] for s in t.trajectory.segments)
    assert kinds[Provenance.TOOL] >= 5
    assert tool.created == tool.released > 0
    assert worker._manager.engine._rows == {}


def test_log_probs_of_the_actor_are_those_of_the_engine(rolled):
    _, _, batch, _ = rolled
    mask = batch.batch["response_mask"].bool()
    sampled, computed = batch.batch["rollout_log_probs"], batch.batch["old_log_probs"]
    assert (sampled[mask] < -0.5).any()
    assert torch.allclose(computed[mask], sampled[mask], atol=1e-4)
    assert not computed[~mask].any()
    assert batch.batch["entropys"][mask].min() > 0


def test_the_reference_is_the_model_at_the_start(rolled):
    group, _, batch, _ = rolled
    ref = group.compute_ref_log_prob(batch).batch["ref_log_prob"]
    assert torch.equal(ref, batch.batch["old_log_probs"])


def test_an_update_changes_the_weights_and_the_engine_samples_from_the_new_ones(model_path):
    group, worker = policy(model_path, {"echo": Echo()}, algorithm=WITH_REF)
    before = weights_of(worker.model)
    batch = learnable(group, prompts())
    ref = group.compute_ref_log_prob(batch).batch["ref_log_prob"]
    figures = update(group, batch)
    assert {"actor/loss", "actor/grad_norm", "actor/lr", "actor/entropy", "actor/pg_clipfrac"} <= figures.keys()
    assert figures["actor/grad_norm"] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in worker.model.state_dict().items())
    assert torch.equal(group.compute_ref_log_prob(batch).batch["ref_log_prob"], ref)
    again = learnable(group, prompts(seed=2))
    assert gap(again) < 1e-4
    assert versions_of(again) == {1}


def test_equal_seeds_equal_rollouts_and_validation_is_greedy(model_path):
    group, _ = policy(model_path, rollout={"val_kwargs": ValSamplingOptions(temperature=2.0, do_sample=False)})
    one, two, other = (group.generate_sequences(prompts(seed=s)).batch["responses"] for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert one.shape != other.shape or not torch.equal(one, other)
    greedy = group.generate_sequences(prompts(n=2, seed=9, validate=True))
    assert torch.equal(greedy.batch["responses"][0::2], greedy.batch["responses"][1::2])
    assert not greedy.batch["rollout_log_probs"].any()


def test_a_row_selects_among_the_configured_tools(model_path):
    tools = {"echo": Echo()}
    group, _ = policy(model_path, tools)
    selections = [{"index": i, "tool_selection": ["echo"] if i % 2 else []} for i in range(4)]
    batch = group.generate_sequences(prompts(count=4, n=1, extra_info=selections))
    lengths = [len(r.trajectory.prompt_ids) for r in batch.non_tensor_batch["rollout"]]
    assert lengths[0] == lengths[2] < lengths[1] == lengths[3]  # without schemas, with them
    assert all(not r.trajectory.tool_calls for r in batch.non_tensor_batch["rollout"][0::2])


def test_all_rows_dropped_is_a_batch_without_a_mask(model_path):
    group, _ = policy(model_path)
    batch = prompts(raw_prompt=[[{"role": "user", "content": "long " * 200}]] * 8)
    out = batch.union(group.generate_sequences(batch))
    assert {r.dropped for r in out.non_tensor_batch["rollout"]} == {StopReason.PROMPT_TOO_LONG}
    out.meta_info["temperature"] = 1.0
    assert out.batch["response_mask"].sum() == 0
    assert not group.compute_log_prob(out).batch["old_log_probs"].any()


def test_an_interrupt_releases_the_tools_before_it_is_raised(model_path):
    class Interrupted(Echo):
        pressed = 0

        async def execute(self, instance_id, parameters, **kwargs):
            self.pressed += 1
            if self.pressed == 3:
                raise KeyboardInterrupt
            await asyncio.sleep(60)

        async def release(self, instance_id, **kwargs):
            await asyncio.sleep(0.005)
            await super().release(instance_id)

    tool = Interrupted()
    group, worker = policy(model_path, {"echo": tool})
    kwargs = [{"echo": {"create_kwargs": {}}}] * 12
    with pytest.raises(KeyboardInterrupt):
        group.generate_sequences(prompts(count=6, n=2, tools_kwargs=kwargs))
    assert tool.created == tool.released == 12
    assert worker._manager.engine._rows == {}
    assert not asyncio.all_tasks(worker._loop)
    assert group.generate_sequences(prompts(count=1, n=1, extra_info=[{"tool_selection": []}])).batch is not None


def test_a_group_that_ends_leaves_nothing_running(model_path):
    group, worker = policy(model_path)
    ended = []

    async def connection():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    task = worker._loop.create_task(connection())
    group.generate_sequences(prompts(count=1, n=1))
    assert not task.done()
    group.close()
    assert (task.done(), ended) == (True, [True])
    assert not group._workers


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_worker_goes_on_bit_for_bit(model_path, tmp_path, optimizer):
    actor = tiny_options(model_path).actor
    given = {"actor": replace(actor, optim=replace(actor.optim, name=optimizer)), "deterministic": True}

    def step(group, seed):
        batch = learnable(group, prompts(seed=seed))
        update(group, batch, seed)
        return batch

    group, worker = policy(model_path, **given)
    step(group, 1)
    group.save_checkpoint(str(tmp_path))
    saved = weights_of(worker.model)
    first = step(group, 2)
    went_on = weights_of(worker.model)

    other, restored = policy(model_path, **given)
    tensors = {name: tensor.data_ptr() for name, tensor in restored.model.state_dict().items()}
    other.load_checkpoint(str(tmp_path))
    with pytest.raises(EtudeError, match=r"call update_weights\(version\) first"):
        other.generate_sequences(prompts(seed=2))
    other.update_weights(1)
    assert tensors == {name: tensor.data_ptr() for name, tensor in restored.model.state_dict().items()}  # in place
    assert all(torch.equal(saved[name], tensor) for name, tensor in restored.model.state_dict().items())
    second = step(other, 2)
    assert torch.equal(first.batch["rollout_log_probs"], second.batch["rollout_log_probs"])
    assert all(torch.equal(went_on[name], tensor) for name, tensor in restored.model.state_dict().items())
    assert any(not torch.equal(saved[name], went_on[name]) for name in saved)


# -- what is wrong with a configuration ----------------------------------------------------------------------------


def test_wrong_settings_are_named(model_path, rolled):
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.path is not set"):
        started(tiny_options(None))
    plain, _ = policy(model_path)
    with pytest.raises(ConfigError, match="no reference policy was loaded"):
        plain.compute_ref_log_prob(rolled[2])
    for options in (ActorOptions, CriticOptions):
        with pytest.raises(ConfigError, match=r"^ppo_mini_batch_size must be a whole number of at least 1, got 0"):
            options(ppo_mini_batch_size=0)
        with pytest.raises(ConfigError, match=r"^loss_agg_mode must be one of .*; did you mean 'token-mean'"):
            options(loss_agg_mode="token-maen")
