"""The official SDK against the server: its own client trains, samples, saves and loads."""

import pytest

pytest.importorskip("tinker.types")
import numpy as np
import tinker
import torch
from tinker import types
from tinker_stage import TOKENS, datum, weighted


@pytest.fixture
def trainer(client):
    return client.create_lora_training_client("tiny", rank=4, seed=3).result()


def test_a_supervised_loop_learns_and_its_weights_sample_what_was_taught(client, trainer):
    losses = []
    for _ in range(40):
        done = trainer.forward_backward([weighted(TOKENS)], "cross_entropy")
        step = trainer.optim_step(types.AdamParams(learning_rate=0.02))
        losses.append(done.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[-1] < 1 < losses[0]
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, temperature=0)
    assert sampler.sample(types.ModelInput.from_ints(TOKENS[:2]), 1, params).result().sequences[0].tokens == TOKENS[2:]
    untrained = client.create_sampling_client(base_model="tiny").result()
    assert (
        untrained.sample(types.ModelInput.from_ints(TOKENS[:2]), 1, params).result().sequences[0].tokens != TOKENS[2:]
    )


def test_a_reinforcement_loop_raises_what_is_rewarded(trainer):
    prompt, share = types.ModelInput.from_ints([7, 8]), []
    for step in range(12):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, seed=step * 100)
        drawn = sampler.sample(prompt, 16, params).result().sequences
        rewards = np.array([sum(token % 2 == 0 for token in each.tokens) / len(each.tokens) for each in drawn])
        share.append(rewards.mean())
        data = [
            datum(
                [7, 8, *each.tokens], logprobs=[0.0, *each.logprobs], advantages=[0.0] + [float(a)] * len(each.tokens)
            )
            for each, a in zip(drawn, rewards - rewards.mean())
        ]
        done = trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=0.02)).result()
        for each, output in zip(drawn, done.result().loss_fn_outputs):
            assert np.allclose(output["logprobs"].data[1:], each.logprobs, atol=1e-4)  # sampler = trainer
    assert np.mean(share[-3:]) > np.mean(share[:3]) + 0.2


def test_a_custom_loss_gives_the_gradient_of_the_built_in_one(client):
    def norm(run):
        trainer = client.create_lora_training_client("tiny", rank=4, seed=3).result()
        run(trainer).result()
        return trainer.optim_step(types.AdamParams(learning_rate=0.1, grad_clip_norm=1.0)).result().metrics["grad_norm"]

    def negative(data, log_probs):
        return -sum(each[1:].sum() for each in log_probs), {"mine": 1.0}

    data = [weighted(TOKENS, 2)]
    built_in = norm(lambda trainer: trainer.forward_backward(data, "cross_entropy"))
    assert norm(lambda trainer: trainer.forward_backward_custom(data, negative)) == pytest.approx(built_in, rel=1e-5)


def test_several_targets_a_token_are_weighted_each(trainer):
    targets, weights = [[9, 1], [3, 2], [17, 6]], [[0.5, 0.5], [1.0, 0.0], [0.0, 2.0]]
    several = types.Datum(types.ModelInput.from_ints(TOKENS[:3]), {"target_tokens": targets, "weights": weights})
    found = trainer.forward([several], "cross_entropy").result()
    log_probs = found.loss_fn_outputs[0]["logprobs"].to_torch()
    assert log_probs.shape == (3, 2)
    assert found.metrics["loss:sum"] == pytest.approx(-float((log_probs * torch.tensor(weights)).sum()), rel=1e-5)
    single = trainer.forward([weighted(TOKENS[:4])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    assert torch.allclose(single, log_probs[:, 0], atol=1e-6)


def test_a_state_is_loaded_with_its_optimizer_or_without(client, trainer):
    def step(model):
        model.forward_backward([weighted(TOKENS)], "cross_entropy")
        return model.optim_step(types.AdamParams(learning_rate=0.01)).result()

    def loss(model):
        return model.forward([weighted(TOKENS)], "cross_entropy").result().metrics["loss:sum"]

    step(trainer)
    step(trainer)
    path = trainer.save_state("two", user_metadata={"note": "x"}).result().path
    after_two = loss(trainer)
    step(trainer)
    went_on = client.create_training_client_from_state_with_optimizer(path).result()
    afresh = client.create_training_client_from_state(path).result()
    assert loss(went_on) == loss(afresh) == after_two
    step(went_on)
    step(afresh)
    assert loss(went_on) == loss(trainer) != loss(afresh)
    trainer.forward_backward([weighted(TOKENS)], "cross_entropy").result()
    trainer.load_state(path).result()
    assert loss(trainer) == after_two
    assert (
        trainer.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"] == 0
    )  # nothing of before
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        trainer.save_state("two").result()


def test_checkpoints_and_runs_are_listed(client, trainer):
    rest = client.create_rest_client()
    path = trainer.save_weights_for_sampler("final", ttl_seconds=3600).result().path
    assert path == f"tinker://{trainer.model_id}/sampler_weights/final"
    about = rest.get_weights_info_by_tinker_path(path).result()
    assert (about.lora_rank, about.train_unembed, about.base_model) == (4, False, client_name(trainer))
    run = rest.get_training_run(trainer.model_id).result()
    assert run.last_sampler_checkpoint.tinker_path == path
    assert trainer.model_id in [each.training_run_id for each in rest.list_training_runs().result().training_runs]
    assert [each.tinker_path for each in rest.list_checkpoints(trainer.model_id).result().checkpoints] == [path]
    sampler = client.create_sampling_client(model_path=path).result()
    assert sampler.get_base_model() == client_name(trainer)
    assert trainer.get_tokenizer().encode("a cat") == sampler.get_tokenizer().encode("a cat")
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []


def client_name(trainer):
    return trainer.get_info().model_data.model_name


def test_sampling_stops_scores_and_repeats(trainer):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(TOKENS), types.SamplingParams(max_tokens=20, seed=5)
    once, again = (sampler.sample(prompt, 3, params).result().sequences for _ in range(2))
    assert [each.tokens for each in once] == [each.tokens for each in again]
    assert len({tuple(each.tokens) for each in once}) == 3
    assert once[0].sequence_id != again[0].sequence_id
    stop = once[0].tokens[3]
    stopped = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=20, seed=5, stop=[stop])).result().sequences[0]
    first = once[0].tokens.index(stop)
    assert (stopped.tokens, stopped.stop_reason) == (once[0].tokens[: first + 1], "stop")
    text = trainer.get_tokenizer().decode(once[0].tokens[:4])
    by_text = types.SamplingParams(max_tokens=20, seed=5, stop=[text])
    assert sampler.sample(prompt, 1, by_text).result().sequences[0].stop_reason == "stop"
    scored = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert scored.prompt_logprobs[0] is None
    assert scored.topk_prompt_logprobs[0] is None
    assert all(len(each) == 2 and each[0][1] >= each[1][1] for each in scored.topk_prompt_logprobs[1:])
    forward = trainer.forward([weighted(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert np.allclose(scored.prompt_logprobs[1:], forward, atol=1e-4)
    assert np.allclose(sampler.compute_logprobs(prompt).result()[1:], forward, atol=1e-4)
    for temperature in (1.0, 0.5):
        drawn = types.SamplingParams(max_tokens=20, seed=5, temperature=temperature)
        top = sampler.sample(prompt, 1, drawn, topk_sample_logprobs=len(trainer.get_tokenizer())).result().sequences[0]
        likely = dict(top.topk_logprobs[0])
        assert likely[top.tokens[0]] == pytest.approx(top.logprobs[0], abs=1e-4)
    last = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    suffix = sampler.sample(prompt, 1, params, **last, prompt_logprobs_last_n=3).result()
    assert suffix.prompt_logprobs == [None] * 5 + scored.prompt_logprobs[5:]
    assert suffix.topk_prompt_logprobs == [None] * 5 + scored.topk_prompt_logprobs[5:]
    with pytest.raises(tinker.BadRequestError, match="1 to 7 for this prompt, not 10"):
        sampler.sample(prompt, 1, params, **last, prompt_logprobs_last_n=10).result()


def test_samples_of_neighbouring_seeds_are_not_the_same(trainer):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    drawn = [
        sampler.sample(types.ModelInput.from_ints(TOKENS), 2, types.SamplingParams(max_tokens=8, seed=seed)).result()
        for seed in range(3)
    ]
    assert len({tuple(each.tokens) for sample in drawn for each in sample.sequences}) == 6
