"""One, two and three ranks make the same gradients, weights and figures of the same batch."""

import typing
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from ranks_stage import World, assert_alike, uneven_batch
from workers_stage import roles, save_model

from etude.algorithms import POLICY_LOSSES
from etude.metrics import add_metrics, finish_metrics
from etude.options import DistillationOptions, RolloutCorrectionOptions
from etude.options.training import KLLossKind, LossAggMode, PolicyLossOptions
from etude.trainer.minibatches import update_batches
from etude.workers import CriticWorker, TrainWorker

MODES, KINDS = typing.get_args(LossAggMode), sorted({*typing.get_args(KLLossKind)})


@pytest.fixture(scope="module")
def actors(model_path):
    """Worlds of one, two and three actors."""
    return [World(TrainWorker, roles(model_path), ranks) for ranks in (1, 2, 3)]


@pytest.fixture(scope="module")
def critics(model_path):
    return [World(CriticWorker, roles(model_path), ranks) for ranks in (1, 2, 3)]


def agree(monkeypatch, worlds, batch, **changed):
    """What one rank makes of the batch, after others were seen to make the same."""
    alone, *shared = [world.learn(monkeypatch, batch, **changed) for world in worlds]
    for each in shared:
        assert_alike(alone, each)
    return alone


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_make_one_update_of_an_uneven_batch(monkeypatch, actors, mode, size):
    """With one prompt a mini-batch, some have fewer rows than there are ranks."""
    changed = {"loss_agg_mode": mode, "entropy_coeff": 0.02, "ppo_mini_batch_size": size, "ppo_epochs": 2}
    figures, gradients, _ = agree(monkeypatch, actors, uneven_batch(), **changed)
    assert figures["actor/optimizer_steps"] == len(gradients) == 2 * -(-5 // size)
    assert figures["actor/skipped_steps"] == 0
    assert figures["actor/entropy"] > 1
    assert "actor/grad_norm" in figures


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_one_update_with_every_kl(monkeypatch, actors, kind):
    changed = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind, "ppo_mini_batch_size": 3}
    figures, _, _ = agree(monkeypatch, actors, uneven_batch(1), **changed)
    assert "actor/kl_loss" in figures


SELECTS = {"clip_cov_lb": 0.001, "clip_cov_ratio": 0.3}
OF_LOSSES = {"dro": {"dro_beta": 0.5}, "clip_cov": SELECTS, "kl_cov": {"kl_cov_ratio": 0.3}}


@pytest.mark.parametrize("loss", POLICY_LOSSES.built_in)
@pytest.mark.parametrize("mode", [None, "seq-mean-token-mean"])
def test_ranks_make_one_update_with_every_loss(monkeypatch, actors, loss, mode):
    """With its own aggregation, and with one that divides by a rollout's tokens, which are spread over ranks."""
    chosen = PolicyLossOptions(loss_mode=loss, **OF_LOSSES.get(loss, {}))
    figures, *_ = agree(
        monkeypatch, actors, uneven_batch(2), policy_loss=chosen, loss_agg_mode=mode, ppo_mini_batch_size=2
    )
    assert "actor/ppo_kl" in figures


@pytest.mark.parametrize("mode", MODES)
def test_ranks_make_one_update_towards_a_teachers_distribution(monkeypatch, actors, mode):
    batch = uneven_batch(3)
    shape, generator = batch.batch["response_mask"].shape, torch.Generator().manual_seed(4)
    batch.batch["teacher_topk_ids"] = torch.rand(*shape, 250, generator=generator).topk(5).indices.int()
    top = torch.randn(*shape, 6, generator=generator).double().log_softmax(dim=-1)[..., :5]
    batch.batch["teacher_topk_log_probs"] = top
    figures, taught, _ = agree(monkeypatch, actors, batch, loss_agg_mode=mode, ppo_mini_batch_size=2)
    assert figures["distillation/forward_kl"] > 1
    assert 0 < figures["distillation/student_mass"] < figures["distillation/teacher_mass"] < 1
    monkeypatch.setattr(actors[0], "options", replace(actors[0].options, distillation=DistillationOptions(coef=0.5)))
    _, half, _ = actors[0].learn(monkeypatch, batch, loss_agg_mode=mode, ppo_mini_batch_size=2)
    assert any(not torch.allclose(one, other) for one, other in zip(taught[0], half[0]) if one is not None)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_make_one_update_of_the_critic(monkeypatch, critics, mode):
    figures, _, _ = agree(monkeypatch, critics, uneven_batch(), loss_agg_mode=mode, ppo_mini_batch_size=2)
    assert figures["critic/optimizer_steps"] == 3
    assert figures["critic/vf_loss"] > 0


CORRECTIONS = {
    "weights": {},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "bypass": {"bypass_mode": True, "rollout_rs": "token_k2", "rollout_rs_threshold": 0.1},
    "bypass, reinforce": {"bypass_mode": True, "rollout_is": "sequence", "rollout_is_threshold": "0.7_1.5"},
}


@pytest.mark.parametrize("which", CORRECTIONS)
def test_ranks_make_one_update_with_every_correction(monkeypatch, actors, which):
    batch = uneven_batch()
    batch.meta_info["compare_rollout"] = True
    batch.batch["rollout_log_probs"] += 0.5 * batch.batch["response_mask"]  # about what the policy's are
    if which == "weights":
        batch.batch["rollout_is_weights"] = torch.rand(batch.batch["advantages"].shape).double()
    correction = RolloutCorrectionOptions(**CORRECTIONS[which])
    for world in actors:
        monkeypatch.setattr(world, "options", replace(world.options, correction=correction))
    loss = "reinforce" if "reinforce" in which else "vanilla"
    figures, _, _ = agree(monkeypatch, actors, batch, ppo_mini_batch_size=2, policy_loss=PolicyLossOptions(loss))
    assert figures["rollout_corr/eff_sample_size"] < 1
    share = {"off-policy mask": "off_policy_masked_fraction", "bypass": "rollout_rs_masked_fraction"}.get(which)
    if share or "reinforce" in which:
        assert 0 < figures[f"rollout_corr/{share or 'rollout_is_oob_ratio'}"] < 1


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(monkeypatch, actors):
    batch = uneven_batch()
    batch.batch["advantages"][0] = float("nan")  # of the only row of its prompt
    for world in actors:
        figures, _, _ = world.learn(monkeypatch, batch, ppo_mini_batch_size=1)
        assert (figures["actor/skipped_steps"], figures["actor/optimizer_steps"]) == (1, 5)


def test_ranks_that_cannot_reach_each_other_refuse_to_learn(actors):
    batch = uneven_batch()
    first, *_ = update_batches(batch, actors[1].workers[0].options.actor, shuffle=True, seed=3, ranks=2)
    with pytest.raises(RuntimeError, match="several ranks cannot learn together in one process"):
        actors[1].workers[0].update_actor(first[0])


# -- processes ---------------------------------------------------------------------------------------------------


def learn_as_a_rank(rank, ranks, options, batch, meeting, answers):
    """One rank of a world of processes, with everything real."""
    torch.set_num_threads(1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    worker = TrainWorker(options, rank=rank, world_size=ranks)
    worker.init_model()
    worker.model.double()
    steps = update_batches(batch, options.actor, shuffle=True, seed=3, ranks=ranks)
    metrics = [worker.update_actor(parts[rank]) for parts in steps]
    answers.put((rank, metrics, {name: tensor.numpy() for name, tensor in worker.model.state_dict().items()}))
    if ranks > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_make_one_update(tmp_path):
    options = roles(save_model(tmp_path / "model"))
    context = get_context("forkserver")  # imports once
    context.set_forkserver_preload(["test_workers_ranks", "etude.trainer.run", "house_stage"])
    found = {}
    for ranks in (1, 2, 3):
        answers = context.Queue()
        given = (ranks, options, uneven_batch(), tmp_path / f"meeting-{ranks}", answers)
        processes = [context.Process(target=learn_as_a_rank, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        said = sorted((answers.get(timeout=300) for _ in processes), key=lambda answer: answer[0])
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        figures = finish_metrics(add_metrics(made for _, metrics, _ in said for made in metrics))
        weights = [{name: torch.from_numpy(array) for name, array in state.items()} for _, _, state in said]
        assert all(torch.equal(weights[0][name], other[name]) for other in weights for name in other)
        found[ranks] = figures, weights[0]
    figures, weights = found[1]
    assert figures["actor/optimizer_steps"] == 3
    for ranks in (2, 3):
        others, theirs = found[ranks]
        assert others == pytest.approx(figures, rel=1e-6, abs=1e-9)
        assert all(torch.allclose(theirs[name], tensor, rtol=0, atol=1e-6) for name, tensor in weights.items())
