"""A mixture of experts in the workers: what the engine's tokens went to travels to the update, where that is asked for."""

from dataclasses import replace

import pytest
import torch
from workers_stage import SPEC, TEXTS, learnable, policy, prompts, update

from etude.errors import ConfigError
from etude.models import build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.models.experts import routers

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


def gap(batch):
    mask = batch.batch["response_mask"].bool()
    return float((batch.batch["rollout_log_probs"] - batch.batch["old_log_probs"])[mask].abs().max())


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
    group, worker = policy(path, needs_ref=True, **REPLAY)
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
        policy(path, rollout={"enable_rollout_routing_replay": True, "name": "scripted"})
