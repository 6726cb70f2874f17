"""The link between worker and engine: weights handed over and probed, for engines in this process and behind HTTP."""

import asyncio
import copy
import gc
import os
from types import SimpleNamespace

import pytest
import torch
from serving_stage import serving_in_a_thread
from sglang_server import Network, State, build_app
from vision_stage import build_vision_stage
from workers_stage import gap, learnable, policy, prompts, started, tiny_options, update, versions_of

from etude.checks.setup import check_placement
from etude.errors import ConfigError, EngineError, EtudeError
from etude.inference import ENGINES, NativeEngine, NativeEngineOptions, OpenAIEngine, Router, WeightMismatch
from etude.models import load_causal_lm
from etude.models.named_weights import full_state
from etude.options import ActorOptions, OptimOptions
from etude.options.training import ModelOptions
from etude.scratch import Scratch
from etude.workers import RolloutWorker, engine_link
from etude.workers.engine_link import EngineLink, WeightSyncError, _memory_folder, build_engine


@pytest.fixture
def server(model_path):
    """A server with SGLang's interface that computes with the model; (address, its state)."""
    state = State(Network(model_path), 0.0)
    with serving_in_a_thread(build_app(state)) as url:
        yield url, state


def served(model_path, url, **rollout):
    return policy(model_path, rollout={"name": "sglang", "server_urls": [url], "server_timeout": 30.0, **rollout})


def test_after_an_update_the_native_engine_is_probed(model_path):
    group, _ = policy(model_path)
    figures = update(group, learnable(group, prompts()))
    assert figures["weight_sync/largest_difference"] < 1e-4
    assert figures["weight_sync/seconds"] > 0
    unprobed, _ = policy(model_path, rollout={"weight_probe": False})
    figures = update(unprobed, learnable(unprobed, prompts()))
    assert "weight_sync/largest_difference" not in figures


def test_the_probe_draws_at_the_temperature_of_the_rollouts(model_path, monkeypatch):
    group, worker = policy(model_path, rollout={"temperature": 0.6})
    batch = learnable(group, prompts())
    engine, temperatures = worker._manager.engine, set()
    generate = engine.generate

    async def watched(request_id, prompt_ids, params, **given):
        temperatures.add(params.temperature)
        return await generate(request_id, prompt_ids, params, **given)

    monkeypatch.setattr(engine, "generate", watched)
    update(group, batch)
    assert temperatures == {0.6}


def test_the_probe_changes_no_rollout_and_no_figure(model_path):
    outcomes = []
    for probe in (True, False):
        group, _ = policy(model_path, rollout={"weight_probe": probe}, deterministic=True)
        update(group, learnable(group, prompts()))
        rolled = group.generate_sequences(prompts(seed=2))
        outcomes.append((rolled.batch["responses"], rolled.batch["rollout_log_probs"], rolled.meta_info["metrics"]))
    (first, probs, metrics), (second, other_probs, other_metrics) = outcomes
    assert torch.equal(first, second)
    assert torch.equal(probs, other_probs)
    tokens = [
        sum(one["sampled_tokens"] for one in m) if isinstance(m, list) else m["sampled_tokens"]
        for m in (metrics, other_metrics)
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("engine", [{"max_num_seqs": 1}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 16}])
def test_in_the_deterministic_mode_a_small_engine_is_probed_and_rolls_out(model_path, engine):
    group, _ = policy(model_path, rollout={"weight_sync_timeout": 20.0, **engine}, deterministic=True)
    figures = update(group, learnable(group, prompts()))
    assert figures["weight_sync/largest_difference"] < 1e-4


def test_a_probe_that_is_not_answered_stops_the_run(model_path):
    @ENGINES.register("workers_test_mute")
    class Mute(NativeEngine):
        async def generate(self, request_id, *arguments, **options):
            if request_id.startswith("probe/"):
                await asyncio.get_running_loop().create_future()
            return await super().generate(request_id, *arguments, **options)

    with pytest.raises(
        WeightSyncError,
        match=r"'workers_test_mute' did not take the weights of version 0: .*0\.3 s \(rollout\.weight_sync_timeout\)",
    ):
        policy(model_path, rollout={"name": "workers_test_mute", "weight_sync_timeout": 0.3})


def test_an_engine_that_silently_keeps_its_weights_stops_the_run(model_path):
    @ENGINES.register("workers_test_stale")
    class Stale(NativeEngine):
        def __init__(self, model, options):
            super().__init__(copy.deepcopy(model), options)

    group, _ = policy(model_path, rollout={"name": "workers_test_stale"})
    batch = learnable(group, prompts())
    with pytest.raises(WeightMismatch, match=r"does not serve version 1 of the weights: .* tolerance is 0\.001"):
        update(group, batch)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_engine_with_its_own_weights_gets_the_actors_by_name(model_path, dtype):
    group, worker = policy(model_path, rollout={"dtype": dtype})
    options = worker.options
    engine = build_engine(options, None, worker.tokenizer)
    link = EngineLink(engine, options.rollout, worker.context.chat, worker._actor, "float32")
    weight, loaded = engine._model.model.norm.weight, engine.checksums()
    worker._run(link.push(0))
    assert engine.checksums() == loaded
    update(group, learnable(group, prompts()))
    kept = engine.checksums()
    assert kept == loaded  # the actor's tensors are not the engine's
    figures = worker._run(link.push(1))
    assert figures["weight_sync/largest_difference"].value < (1e-4 if dtype is None else 0.5)
    assert engine._model.model.norm.weight is weight
    assert all(kept[name] != value for name, value in engine.checksums().items() if "layernorm" in name)
    same = NativeEngine(load_policy_copy(worker), NativeEngineOptions(dtype=dtype))
    assert engine.checksums() == same.checksums()


@pytest.mark.parametrize("streams", [False, True])
def test_a_replica_that_comes_back_is_not_probed_by_an_actor_that_learns_meanwhile(model_path, monkeypatch, streams):
    """Its weights are those of the last sync, and the actor's are in motion."""

    def build(options, _, tokenizer, *place):
        return Router({"one": build_engine(options, load_causal_lm(model_path, dtype="float32"), tokenizer)})

    monkeypatch.setattr("etude.workers.rollout.build_engine", build)
    _, worker = policy(model_path, max_staleness=int(streams))
    worker._actor.model.train()  # as in an update
    router = worker._link.engine
    if router.admit is not None:
        worker._run(router.admit(router.replicas["one"], 0))
    assert worker._actor.model.training == streams
    worker.close()


def load_policy_copy(worker):
    return copy.deepcopy(worker.model).requires_grad_(False)


def test_a_shared_prefix_is_computed_again_after_each_sync_of_an_own_copy(model_path):
    _, worker = policy(model_path)
    engine = build_engine(worker.options, None, worker.tokenizer)
    prompt = list(range(20, 60))

    async def draw(name):
        made = await engine.generate(name, prompt, {"max_tokens": 4, "temperature": 1.0, "seed": 1})
        engine.close(name)
        return made

    before = worker._run(draw("a"))
    for version in (1, 2):
        with torch.no_grad():
            for parameter in worker.model.parameters():
                parameter.mul_(1.3)
        worker._run(engine.update_weights(full_state(worker.model), version))
        after = worker._run(draw("b"))
        fresh = NativeEngine(load_policy_copy(worker))

        async def anew(fresh=fresh):
            return await fresh.generate("c", prompt, {"max_tokens": 4, "temperature": 1.0, "seed": 1})

        expected = worker._run(anew())
        assert after.token_ids == expected.token_ids
        assert after.log_probs == expected.log_probs != before.log_probs
        assert set(after.weight_versions) == {version}
        before = after


def test_an_engine_refuses_what_it_does_not_take(model_path):
    _, worker = policy(model_path)
    own = build_engine(worker.options, None, worker.tokenizer)
    with pytest.raises(ConfigError, match="source=None: this native engine takes chunks of named tensors"):
        worker._run(own.update_weights(None, 1))
    with pytest.raises(ConfigError, match="source=chunks: this native engine takes None"):
        worker._run(worker._manager.engine.update_weights([], 1))
    with pytest.raises(EtudeError, match=r"'model\.embed_tokens\.weight' of the engine's model was not sent"):
        worker._run(own.update_weights([], 1))


def test_a_served_engine_samples_from_the_actors_weights_step_after_step(model_path, server):
    url, state = server
    group, worker = served(model_path, url)
    for step in range(3):
        batch = learnable(group, prompts(seed=step))
        assert gap(batch) < 1e-4
        assert versions_of(batch) == {step}
        figures = update(group, batch, step + 1)
        assert figures["weight_sync/largest_difference"] < 1e-4
        assert state.version == str(step + 1)
    folder = worker._link._folder.folder
    assert [each.name for each in folder.glob("version-*")] == ["version-3"]  # the newest alone
    del group, worker
    gc.collect()
    assert not folder.exists()


def test_servers_get_adapters_alone_and_keep_as_many_versions_as_may_be_in_use(model_path, server):
    pytest.importorskip("peft")
    url, state = server
    base = {name: tensor.clone() for name, tensor in state.model.model.state_dict().items()}
    model = ModelOptions(path=model_path, lora_rank=4, lora_alpha=32.0)
    rollout = {
        "name": "sglang",
        "server_urls": [url],
        "server_timeout": 30.0,
        "weight_transfer": "adapter",
        "response_length": 16,
    }
    actor = ActorOptions(ppo_mini_batch_size=1, optim=OptimOptions(lr=3e-2))
    group, worker = policy(model_path, model=model, actor=actor, rollout=rollout, max_staleness=1)
    first = learnable(group, prompts(count=1, seed=9))
    for step in range(2):
        batch = learnable(group, prompts(count=1, seed=step))
        assert gap(batch) < 1e-4
        assert versions_of(batch) == {step}
        figures = update(group, batch, step + 1)
        assert figures["weight_sync/largest_difference"] < 1e-4
        kept = [int(name.split("-")[2]) for name in state.adapters]
        assert kept == list(range(max(0, step), step + 2))
        folder = worker._link._folder.folder
        assert sorted(each.name for each in folder.glob("version-*")) == [f"version-{number}" for number in kept]
    sizes = {file.name for file in folder.glob("version-2/*")}
    assert sizes == {"adapter_config.json", "adapter_model.safetensors"}
    moved = first.batch["old_log_probs"] - group.compute_log_prob(first).batch["old_log_probs"]
    assert float(moved.abs().max()) > 0.1  # there was something to send
    assert all(torch.equal(base[name], tensor) for name, tensor in state.model.model.state_dict().items())
    state.fault = "stale"
    with pytest.raises(WeightMismatch, match="does not serve version 3"):
        update(group, first, 3)
    state.fault = "refuses weights"
    with pytest.raises(
        WeightSyncError, match=r"did not take the weights of version 4: .*load_lora_adapter: status 400"
    ):
        update(group, first, 4)


def test_a_server_that_keeps_old_weights_or_refuses_new_ones_stops_the_run(model_path, server):
    url, state = server
    group, _ = served(model_path, url)
    batch = learnable(group, prompts())
    state.fault = "stale"
    with pytest.raises(WeightMismatch, match="does not serve version 1"):
        update(group, batch)
    state.fault = "refuses weights"
    with pytest.raises(
        WeightSyncError, match=r"the engine 'sglang' did not take the weights of version 2: .*status 400"
    ):
        update(group, batch, 2)


def test_a_server_with_other_weights_gets_the_trainers_before_the_first_rollout(model_path, server):
    url, state = server
    with torch.no_grad():
        for parameter in state.model.model.parameters():
            parameter.mul_(3.0)
    group, _ = served(model_path, url)
    assert gap(learnable(group, prompts())) < 1e-4


def test_a_server_of_another_dtype_needs_a_tolerance_of_its_own(model_path, server):
    url, state = server
    load = state.model.load
    state.model.load = lambda folder: (load(folder), state.model.model.to(torch.bfloat16))
    with pytest.raises(WeightMismatch, match="tolerance is 1e-06"):
        served(model_path, url, weight_probe_tolerance=1e-6)
    group, _ = served(model_path, url, weight_probe_tolerance=0.5)
    assert group.generate_sequences(prompts()).batch["response_mask"].any()


@pytest.mark.parametrize("free", [True, False])
def test_memory_is_free_between_rollouts(model_path, server, free):
    url, state = server
    group, _ = served(model_path, url, free_cache_engine=free)
    batch = learnable(group, prompts())
    assert state.asleep is free
    figures = update(group, batch)  # wakes it for the new weights
    assert not state.asleep
    assert figures["weight_sync/largest_difference"] < 1e-4


def test_a_server_that_lost_its_weights_in_its_sleep_stops_the_run(model_path, server):
    url, state = server
    group, _ = served(model_path, url, free_cache_engine=True, response_length=16)
    group.generate_sequences(prompts(count=1))
    group.generate_sequences(prompts(count=1))  # woken, and found well
    assert state.asleep
    state.fault = "forgets"
    with pytest.raises(WeightMismatch, match="version 0 of the weights"):
        group.generate_sequences(prompts(count=1))


def test_a_server_that_does_not_wake_is_one_line(model_path, server, monkeypatch):
    url, _ = server
    group, worker = served(model_path, url, free_cache_engine=True)
    batch = learnable(group, prompts())

    async def broken(*parts):
        raise EngineError("no memory left")

    monkeypatch.setattr(worker._link.engine, "wake", broken)
    with pytest.raises(EtudeError, match="the engine 'sglang' did not wake: no memory left"):
        update(group, batch)
    native, worker = policy(model_path, rollout={"free_cache_engine": True})  # has nothing to give back
    assert native.generate_sequences(prompts()).batch["response_mask"].any()


def test_weights_go_where_the_configuration_says(model_path, server, tmp_path):
    url, _ = server
    group, worker = served(model_path, url, weight_sync_dir=str(tmp_path / "shared" / "weights"))
    group.generate_sequences(prompts())
    assert worker._link._folder.folder.parent == tmp_path / "shared" / "weights"
    assert _memory_folder(1 << 60) is None


def test_what_a_killed_trainer_left_in_memory_makes_room_for_the_next(model_path, server, tmp_path, monkeypatch):
    left = Scratch.make("etude-weights-", tmp_path)
    os.close(left.lock)  # as if its process had been killed
    monkeypatch.setattr(engine_link, "_MEMORY_FOLDER", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0 if left.folder.exists() else 1 << 40))
    group, worker = served(model_path, server[0])
    group.generate_sequences(prompts())
    assert worker._link._folder.folder.parent == tmp_path
    assert not left.folder.exists()


def test_a_dead_server_at_the_first_sync_is_one_line(model_path):
    with pytest.raises(WeightSyncError, match=r"did not take the weights of version 0: .*127\.0\.0\.1:9"):
        served(model_path, "http://127.0.0.1:9")


def test_an_evaluating_engine_needs_a_tokenizer_and_no_model(model_path):
    served = {"name": "openai", "server_urls": ["http://127.0.0.1:9"], "infrastructure_retries": 0}
    group, worker = started(tiny_options(model_path, rollout=served), worker_cls=RolloutWorker)
    assert isinstance(worker._manager.engine, OpenAIEngine)
    assert not hasattr(worker, "model")
    results = group.generate_sequences(prompts(count=1)).non_tensor_batch["rollout"]
    assert all("ClientConnectorError" in result.cause for result in results)


def test_rollout_sections_that_cannot_work_are_refused_before_any_model():
    with pytest.raises(ConfigError, match=r"rollout\.name: needs actor_rollout_ref\.rollout\.server_urls"):
        check_placement(tiny_options("nowhere", rollout={"name": "sglang"}), "cpu")
    with pytest.raises(ConfigError, match="weight_transfer=cuda_ipc needs a GPU"):
        check_placement(tiny_options("nowhere", rollout={"weight_transfer": "cuda_ipc"}), "cpu")
    with pytest.raises(ConfigError, match="weight_transfer must be one of folder, adapter, cuda_ipc"):
        tiny_options("nowhere", rollout={"weight_transfer": "pigeon"})
    for name in ("server_timeout", "weight_sync_timeout", "weight_probe_tolerance"):
        with pytest.raises(ConfigError, match=f"{name} must be a number above 0"):
            tiny_options("nowhere", rollout={name: 0.0})


def test_a_vision_model_and_an_engine_that_takes_text_only_are_refused_together():
    model, processor = build_vision_stage("qwen3_vl")
    options = tiny_options("unused", rollout={"name": "sglang", "server_urls": ["http://127.0.0.1:9"]})
    with pytest.raises(ConfigError, match="name=sglang takes text only"):
        build_engine(options, model, processor.tokenizer)
