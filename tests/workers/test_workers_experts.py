"""A mixture of experts in the workers: what the engine's tokens went to travels to the update, where that is asked for."""

from dataclasses import replace

import pytest
import torch
from batches_stage import update_batches
from ranks_stage import run_ranks, uneven_batch
from workers_stage import SPEC, TEXTS, WITH_REF, gap, learnable, policy, prompts, tiny_options, update

from etude.checks.setup import check_placement
from etude.errors import ConfigError
from etude.metrics import add_metrics, finish_metrics
from etude.models import build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.models.experts import routers
from etude.options import ActorOptions, OptimOptions
from etude.workers import TrainWorker

REPLAY = {"rollout": {"enable_rollout_routing_replay": True}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("experts"), build_tiny_tokenizer(TEXTS, 400)
    model = build_tiny_model(replace(SPEC, architecture="qwen3_moe", initializer_range=0.2), tokenizer)
    with torch.no_grad():
        for router in routers(model):
            router.weight.mul_(1e-6)  # hardly tells the experts apart
    save_pretrained(model, tokenizer, folder)
    return str(folder)


def round_otherwise(model):
    """From here on the routers choose otherwise between experts that are about equal, as another kernel would."""

    def hook(router, given, output):
        logits, _, _ = output
        kept, chosen = (logits + torch.linspace(-1e-5, 1e-5, router.num_experts)).softmax(-1).topk(router.top_k, dim=-1)
        return logits, kept / kept.sum(-1, keepdim=True), chosen

    return [router.register_forward_hook(hook, prepend=True) for router in routers(model)]


@pytest.mark.parametrize("asked", [True, False])
def test_rollouts_say_where_their_tokens_went_and_the_trainer_repeats_it(path, asked):
    group, worker = policy(path, **(REPLAY if asked else {}))
    hooks = round_otherwise(worker.model)
    rolled = prompts().union(group.generate_sequences(prompts()))
    for hook in hooks:
        hook.remove()
    rolled.meta_info |= {"temperature": 1.0}
    rolled.meta_info.pop("metrics")
    batch = rolled.union(group.compute_log_prob(rolled))
    assert ("routed_experts" in batch.non_tensor_batch) == asked
    assert (gap(batch) <= 1e-4) == asked
    if asked:
        for ids, mask, experts in zip(
            batch.batch["attention_mask"], batch.batch["response_mask"], batch.non_tensor_batch["routed_experts"]
        ):
            assert int(mask.sum()) < len(experts) < int(ids.sum())
            assert experts.array().shape[1:] == (SPEC.num_layers, SPEC.num_experts_per_tok)


def test_the_references_routers_choose_for_themselves(path):
    group, worker = policy(path, algorithm=WITH_REF, **REPLAY)
    hooks = round_otherwise(worker.model)
    rolled = prompts().union(group.generate_sequences(prompts()))
    for hook in hooks:
        hook.remove()
    rolled.meta_info = {"temperature": 1.0}
    found = group.compute_ref_log_prob(rolled).batch["ref_log_prob"]
    rolled.pop(non_tensor_batch_keys=["routed_experts"])
    assert torch.equal(found, group.compute_ref_log_prob(rolled).batch["ref_log_prob"])


def test_updates_of_a_mixture(path):
    group, worker = policy(path, **REPLAY)
    router = routers(worker.model)[0].weight
    before = router.detach().clone()
    for version in (1, 2, 3):
        batch = learnable(group, prompts(seed=version))
        assert gap(batch) <= 1e-4
        figures = update(group, batch, version)
        assert figures["actor/skipped_steps"] == 0
    assert not torch.equal(router, before)


def test_other_engines_and_dense_models_are_refused(path, model_path):
    with pytest.raises(ConfigError, match="'qwen3' has no routers to replay"):
        policy(model_path, **REPLAY)
    with pytest.raises(ConfigError, match=r"needs rollout\.name=native"):
        check_placement(tiny_options(path, rollout={**REPLAY["rollout"], "name": "scripted"}), "cpu")


def test_the_routers_loss_evens_out_what_the_experts_get(path):
    """Updates without advantages: what moves is the routers' loss alone, down to where all experts get the same."""
    evenness = []
    for coef in (0.0, 5.0):
        optim = OptimOptions(lr=2e-2, weight_decay=0.0)
        group, worker = policy(path, actor=ActorOptions(ppo_mini_batch_size=4, router_aux_loss_coef=coef, optim=optim))
        with torch.no_grad():
            for router in routers(worker.model):
                router.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(5))
        batch = learnable(group, prompts())
        batch.batch["advantages"].zero_()
        found = [update(group, batch, step + 1).get("actor/router_aux_loss") for step in range(8)]
        evenness.append(found)
    assert evenness[0] == [None] * 8
    assert SPEC.num_experts_per_tok <= evenness[1][-1] < evenness[1][0] - 0.02


def learn_evenly(rank, ranks, options, batch):
    """One rank of a world of processes; what it reports, and its routers afterwards."""
    worker = TrainWorker(options, rank=rank, world_size=ranks)
    worker.init_model()
    steps = update_batches(batch, options.actor, shuffle=True, seed=3, ranks=ranks)
    metrics = [worker.update_actor(parts[rank]) for parts in steps]
    return metrics, [router.weight.detach() for router in routers(worker.model)]


@pytest.mark.slow
def test_the_routers_loss_is_the_same_however_many_ranks_share_a_mini_batch(path, tmp_path):
    actor = ActorOptions(ppo_mini_batch_size=2, router_aux_loss_coef=0.5, ppo_max_token_len_per_gpu=60)
    options, found = tiny_options(path, actor=actor), []
    for ranks in (1, 2):
        said = run_ranks(ranks, learn_evenly, options, uneven_batch(), folder=tmp_path)
        found.append((finish_metrics(add_metrics(m for metrics, _ in said for m in metrics)), said[0][1]))
    (figures, weights), (others, theirs) = found
    assert others["actor/router_aux_loss"] == pytest.approx(figures["actor/router_aux_loss"], rel=1e-5)
    assert figures["actor/router_aux_loss"] >= SPEC.num_experts_per_tok
    assert others["actor/grad_norm"] == pytest.approx(figures["actor/grad_norm"], rel=1e-4)
    for one, other in zip(weights, theirs):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)
