"""One, two and three ranks make the same gradients, weights and figures of the same batch."""

import typing
from dataclasses import replace

import pytest
import torch
from batches_stage import update_batches
from options_stage import changed
from ranks_stage import Case, World, assert_alike, learn_in_shards, shortened, uneven_batch
from workers_stage import tiny_options

from etude.algorithms import POLICY_LOSSES
from etude.options.training import KLLossKind, LossAggMode, PolicyLossOptions
from etude.workers import CriticWorker, TrainWorker

MODES, KINDS = typing.get_args(LossAggMode), sorted({*typing.get_args(KLLossKind)})


SELECTS = {"clip_cov_lb": 0.001, "clip_cov_ratio": 0.3}
OF_LOSSES = {"dro": {"dro_beta": 0.5}, "clip_cov": SELECTS, "kl_cov": {"kl_cov_ratio": 0.3}}


def losing(loss, mode):
    chosen = PolicyLossOptions(loss_mode=loss, **OF_LOSSES.get(loss, {}))
    return {"policy_loss": chosen, "loss_agg_mode": mode, "ppo_mini_batch_size": 2}


CASES = {
    "broken": Case({"ppo_mini_batch_size": 1}, broken=True),
    # With one prompt a mini-batch, some have fewer rows than there are ranks.
    **{
        f"{mode}, {size}": Case(
            {"loss_agg_mode": mode, "entropy_coeff": 0.02, "ppo_mini_batch_size": size, "ppo_epochs": 2},
            sharded=size == 1,
        )
        for mode in MODES
        for size in (1, 2)
    },
    **{
        f"kl {kind}": Case(
            {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind, "ppo_mini_batch_size": 3},
            seed=1,
            sharded=kind == "low_var_kl",
        )
        for kind in KINDS
    },
    # With its own aggregation, and with one that divides by a rollout's tokens, which are spread over ranks.
    **{
        f"loss {loss}, {mode}": Case(losing(loss, mode), seed=2, sharded=mode is None)
        for loss in POLICY_LOSSES.built_in
        for mode in (None, "seq-mean-token-mean")
    },
    **{f"critic {mode}": Case({"loss_agg_mode": mode, "ppo_mini_batch_size": 2}, role="critic") for mode in MODES},
    **{
        f"correction {name}": Case(
            {
                "ppo_mini_batch_size": 2,
                "policy_loss": PolicyLossOptions("reinforce" if "reinforce" in name else "vanilla"),
            },
            correction=given,
        )
        for name, given in {
            "weights": {},
            "off-policy mask": {"off_policy_mask_threshold": 0.05},
            "bypass": {"bypass_mode": True, "rollout_rs": "token_k2", "rollout_rs_threshold": 0.1},
            "bypass, reinforce": {"bypass_mode": True, "rollout_is": "sequence", "rollout_is_threshold": "0.7_1.5"},
        }.items()
    },
}
CASES |= {
    f"teacher {mode}": Case(
        {"loss_agg_mode": mode, "ppo_mini_batch_size": 2}, seed=3, taught=True, sharded=mode == MODES[0]
    )
    for mode in MODES
}
SHARDED = {
    2: {name: case for name, case in CASES.items() if case.sharded},
    3: {name: CASES[name] for name in ("broken", "token-mean, 1", "loss vanilla, None", "critic token-mean")},
}


def cases(beginning):
    return pytest.mark.parametrize("name", [name for name in CASES if name.startswith(beginning)])


@pytest.fixture(scope="module")
def worlds(model_path):
    """Worlds of one, two and three ranks, by role."""
    return {
        role: [World(worker, tiny_options(model_path), ranks) for ranks in (1, 2, 3)]
        for role, worker in {"actor": TrainWorker, "critic": CriticWorker}.items()
    }


@pytest.fixture(scope="module")
def shards(model_path, tmp_path_factory):
    """What two and three ranks make of all cases with a model of which each has a part."""
    options, folder = shortened(tiny_options(model_path), strategy="fsdp2"), tmp_path_factory.mktemp("shards")
    return [learn_in_shards(ranks, options, given, folder) for ranks, given in SHARDED.items()]


def agree(monkeypatch, worlds, shards, name):
    """What one rank makes of the case, after others, with whole models and with parts, were seen to make the same."""
    case = CASES[name]
    alone, *shared = [world.learn(monkeypatch, case) for world in worlds[case.role]]
    for each in (*shared, *(made[name] for made in shards if name in made)):
        assert_alike(alone, each)
    return alone


@cases(tuple(MODES))
def test_ranks_make_one_update_of_an_uneven_batch(monkeypatch, worlds, shards, name):
    figures, gradients, _ = agree(monkeypatch, worlds, shards, name)
    size = CASES[name].changed["ppo_mini_batch_size"]
    assert figures["actor/optimizer_steps"] == len(gradients) == 2 * -(-5 // size)
    assert figures["actor/skipped_steps"] == 0
    assert figures["actor/entropy"] > 1
    assert "actor/grad_norm" in figures


@cases("kl")
def test_ranks_make_one_update_with_every_kl(monkeypatch, worlds, shards, name):
    figures, _, _ = agree(monkeypatch, worlds, shards, name)
    assert "actor/kl_loss" in figures


@cases("loss")
def test_ranks_make_one_update_with_every_loss(monkeypatch, worlds, shards, name):
    figures, *_ = agree(monkeypatch, worlds, shards, name)
    assert "actor/ppo_kl" in figures


@cases("teacher")
def test_ranks_make_one_update_towards_a_teachers_distribution(monkeypatch, worlds, shards, name):
    figures, taught, _ = agree(monkeypatch, worlds, shards, name)
    assert figures["distillation/forward_kl"] > 1
    assert 0 < figures["distillation/student_mass"] < figures["distillation/teacher_mass"] < 1
    _, alone, _ = worlds["actor"][0].learn(monkeypatch, replace(CASES[name], taught=False))
    assert any(not torch.allclose(one, other) for one, other in zip(taught[0], alone[0]) if one is not None)


@cases("critic")
def test_ranks_make_one_update_of_the_critic(monkeypatch, worlds, shards, name):
    figures, _, _ = agree(monkeypatch, worlds, shards, name)
    assert figures["critic/optimizer_steps"] == 3
    assert figures["critic/vf_loss"] > 0


def test_ranks_make_one_update_of_actor_and_critic_on_one_trunk(monkeypatch, model_path):
    options = tiny_options(model_path)
    batch, found = uneven_batch(5), {}
    batch.batch["old_values"], batch.batch["value_targets"] = batch.batch["values"], batch.batch["returns"]
    for ranks, weight in ((1, 0.5), (2, 0.5), (3, 0.5), (1, 0.0)):
        critic = replace(options.critic, share_trunk=True, vf_coef=weight)
        world = World(TrainWorker, changed(options, critic=critic), ranks)
        heads = [worker._actor.critic.model.double() for worker in world.workers]
        made = world.learn(monkeypatch, Case({"ppo_mini_batch_size": 2, "ppo_epochs": 2}), batch)
        assert all(torch.equal(heads[0].head.weight, head.head.weight) for head in heads)
        found[ranks, weight] = made, heads[0].head.weight.detach()
    alone, head = found.pop((1, 0.5))
    unvalued, unmoved = found.pop((1, 0.0))
    assert alone[0]["critic/optimizer_steps"] == alone[0]["actor/optimizer_steps"] == 6
    assert head.any()
    assert not unmoved.any()
    assert not all(torch.allclose(one, other) for one, other in zip(alone[1][-1], unvalued[1][-1]) if one is not None)
    for each, its_head in found.values():
        assert_alike(alone, each)
        torch.testing.assert_close(its_head, head, rtol=0, atol=1e-9)


@cases("correction")
def test_ranks_make_one_update_with_every_correction(monkeypatch, worlds, shards, name):
    figures, _, _ = agree(monkeypatch, worlds, shards, name)
    which = name.removeprefix("correction ")
    assert figures["rollout_corr/eff_sample_size"] < 1
    share = {"off-policy mask": "off_policy_masked_fraction", "bypass": "rollout_rs_masked_fraction"}.get(which)
    if share or "reinforce" in which:
        assert 0 < figures[f"rollout_corr/{share or 'rollout_is_oob_ratio'}"] < 1


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(monkeypatch, worlds, shards):
    made = [world.learn(monkeypatch, CASES["broken"]) for world in worlds["actor"]]
    (_, _, weights), *others = [*made, *(each["broken"] for each in shards)]
    for figures, _, theirs in others:
        assert (figures["actor/skipped_steps"], figures["actor/optimizer_steps"]) == (1, 5)
        assert all(torch.allclose(weights[name], tensor, rtol=0, atol=1e-6) for name, tensor in theirs.items())


def test_ranks_that_cannot_reach_each_other_refuse_to_learn(worlds):
    batch, worker = uneven_batch(), worlds["actor"][1].workers[0]
    first, *_ = update_batches(batch, worker.options.actor, shuffle=True, seed=3, ranks=2)
    with pytest.raises(RuntimeError, match="several ranks cannot learn together in one process"):
        worker.update_actor(first[0])
