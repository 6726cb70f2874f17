"""A rollout group of its own: it gets the actor's weights in chunks, and samples what a colocated one samples."""

import asyncio
import json
import pickle
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from options_stage import changed
from serving_stage import serving_in_a_thread
from sglang_server import Network, State, build_app
from wait_stage import until
from workers_stage import Echo, gap, learnable, prompts, started, tiny_options, update, versions_of

from etude.distributed import InProcessWorkerGroup
from etude.errors import EngineError, EtudeError
from etude.inference import StaleCheck, WeightMismatch
from etude.metrics import add_metrics, finish_metrics
from etude.models.named_weights import checksum, full_state, weight_checksums
from etude.options import ActorOptions, ModelOptions, OptimOptions
from etude.protocol import pack_tensor
from etude.workers import RolloutWorker, TrainWorker, weight_chunks
from etude.workers.weight_chunks import pack_chunk, tensors_of

SMALL = 20_000  # bytes of a chunk


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(weight_chunks, "full_state", partial(full_state, bucket_bytes=SMALL))


def groups(options, ranks=2, tools=None):
    """(actor, rollouts) with models, which have not been given weights."""
    options = changed(options, backend="ray", hybrid_engine=False)
    actor, rollout = InProcessWorkerGroup(TrainWorker, 1, options), InProcessWorkerGroup(RolloutWorker, ranks, options)
    for worker in rollout._workers:
        worker.context = replace(worker.context, tools=tools or {})
    actor.init_model()
    rollout.init_model()
    return actor, rollout


def sync_weights(actor, rollout, version, check=None):
    return weight_chunks.sync_weights(actor, rollout, version, check or StaleCheck())


class Both:
    """The two groups as the one that `learnable` and `update` know."""

    def __init__(self, actor, rollout):
        self.actor, self.rollout, self.probed = actor, rollout, StaleCheck()
        self._workers, self.world_size = actor._workers, 1
        self.generate_sequences = rollout.generate_sequences
        self.compute_log_prob, self.update_actor = actor.compute_log_prob, actor.update_actor

    def update_weights(self, version):
        return sync_weights(self.actor, self.rollout, version, self.probed)


LORA = {"model": {"lora_rank": 4, "target_modules": ("q_proj", "v_proj")}}


@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}, LORA["model"]], ids=["whole", "bfloat16", "adapters"])
def test_two_groups_sample_and_learn_what_one_does(model_path, model):
    if "lora_rank" in model:
        pytest.importorskip("peft")
    given = {
        "model": ModelOptions(path=model_path, **model),
        "actor": ActorOptions(ppo_mini_batch_size=2, optim=OptimOptions(lr=1e-2)),
        "deterministic": True,
    }
    alone, _ = started(tiny_options(model_path, **given))
    actor, rollout = groups(tiny_options(model_path, **given))
    both, sizes = Both(actor, rollout), []
    load = rollout.load_weights
    rollout.load_weights = lambda chunk: sizes.append(sum(t.nbytes for _, t in tensors_of(chunk)[0])) or load(chunk)
    both.update_weights(0)
    assert len(sizes) > 2
    whole = sum(sizes)
    assert max(sizes) < whole / 2  # an embedding alone
    for step in range(2):
        one, two = (learnable(group, prompts(seed=step)) for group in (alone, both))
        assert torch.equal(one.batch["responses"], two.batch["responses"])
        if model.get("dtype") is None:
            torch.testing.assert_close(one.batch["rollout_log_probs"], two.batch["rollout_log_probs"])
        sizes.clear()
        ours, theirs = update(both, two, step + 1), update(alone, one, step + 1)
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=1e-5)
        assert ours["weight_sync/largest_difference"] < (1e-3 if model.get("dtype") is None else 0.5)
        assert (sum(sizes) < whole / 5) == ("lora_rank" in model)  # adapters alone, once the others are there
        assert versions_of(two) == {step}
    expected = weight_checksums(actor._workers[0].model)
    found = [worker._manager.engine.checksums() for worker in rollout._workers]
    assert found[0] == found[1]
    if model.get("dtype") is None:
        assert found[0] == expected


def test_a_tensor_that_arrives_changed_or_not_at_all_is_named(model_path, monkeypatch):
    actor, rollout = groups(tiny_options(model_path))
    load = rollout.load_weights
    name = "model.layers.1.mlp.up_proj.weight"

    def flipped(chunk):
        tensors, _ = tensors_of(chunk)
        sent = chunk.non_tensor_batch["weights"][0]
        sent |= {n: (sent[n][0], *pack_tensor(-t)) for n, t in tensors if n == name}
        return load(chunk)

    rollout.load_weights = flipped
    with pytest.raises(EtudeError, match=rf"'{name}' is not in the engine's model what was sent"):
        sync_weights(actor, rollout, 0)
    rollout.load_weights = lambda chunk: (
        load(chunk) if name not in chunk.non_tensor_batch["weights"][0] else load(first)
    )
    first = actor.next_weights(True)[0]
    with pytest.raises(EtudeError, match=rf"'{name}' of the engine's model was not sent"):
        sync_weights(actor, rollout, 0)
    rollout.load_weights = load
    with pytest.raises(EtudeError, match="does not have the current weights"):
        rollout.generate_sequences(prompts(count=1))
    sync_weights(actor, rollout, 0)
    assert rollout.generate_sequences(prompts(count=1)).batch["response_mask"].any()


def test_an_engine_that_samples_from_other_weights_than_it_was_given_is_caught(model_path, monkeypatch):
    actor, rollout = groups(tiny_options(model_path), ranks=1)
    sync_weights(actor, rollout, 0)
    engine = rollout._workers[0]._manager.engine
    with torch.no_grad():
        for parameter in engine._model.parameters():
            parameter.mul_(2.0)
    monkeypatch.setattr(engine, "load_weights", lambda chunk, sums: settled())
    monkeypatch.setattr(engine, "update_weights", lambda source, version: settled(engine, version))
    with pytest.raises(WeightMismatch, match="does not serve version 1 of the weights"):
        sync_weights(actor, rollout, 1)


def test_an_engine_that_keeps_its_weights_is_caught_within_the_tolerance(model_path, monkeypatch):
    """One of two: both are called "the engine"."""
    both = Both(*groups(tiny_options(model_path, rollout={"weight_probe_tolerance": 1.0}), ranks=2))
    both.update_weights(0)
    move(both.actor._workers[0].model)
    both.update_weights(1)
    engine = both.rollout._workers[1]._manager.engine
    monkeypatch.setattr(engine, "load_weights", lambda chunk, sums: settled())
    monkeypatch.setattr(engine, "update_weights", lambda source, version: settled(engine, version))
    move(both.actor._workers[0].model)
    with pytest.raises(WeightMismatch, match="version 2 and still draws as at version 1"):
        both.update_weights(2)


def move(model):
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)


@pytest.mark.parametrize("partial", [True, False])
def test_new_weights_reach_what_streams_or_wait_for_its_end(model_path, partial):
    """A sync of several chunks, begun while trajectories are at their tool."""
    echo = Gated()
    options = tiny_options(model_path, max_staleness=1, rollout={"partial_rollout": partial, "response_length": 200})
    actor, rollout = groups(options, ranks=1, tools={"echo": echo})
    sync_weights(actor, rollout, 0)
    rollout.direct("submit")("mine", prompts(count=1, n=4))
    until(lambda: echo.executing, "no trajectory has called")
    handed = threading.Thread(target=sync_weights, args=(actor, rollout, 1))
    handed.start()
    handed.join(600 if partial else 0.3)
    assert handed.is_alive() != partial
    echo.gate.set()
    handed.join(600)
    assert not handed.is_alive()
    [(_, batch)] = until(lambda: rollout.collect(1.0)[0][0], "nothing was collected")
    rollout.close()
    trajectories = [result.trajectory for result in batch.non_tensor_batch["rollout"]]
    drawn = [[v for s in each.segments for v in s.weight_versions or ()] for each in trajectories]
    assert all(each == sorted(each) for each in drawn)
    assert ({0, 1} in map(set, drawn)) == partial
    assert echo.created == echo.released


def test_what_stands_still_between_two_chunks_is_no_stall(model_path):
    echo = Gated()
    options = tiny_options(model_path, max_staleness=1, rollout={"response_length": 200}, stall_timeout=0.5)
    actor, rollout = groups(options, ranks=1, tools={"echo": echo})
    sync_weights(actor, rollout, 0)
    chunks = []
    load = rollout.load_weights

    def slowly(chunk):
        chunks.append(chunk)
        done = load(chunk)
        if len(chunks) == 1:
            rollout.direct("submit")("mine", prompts(count=1, n=1))  # the engine takes nothing on meanwhile
            time.sleep(1.5)
        return done

    rollout.load_weights = slowly
    sync_weights(actor, rollout, 1)
    assert len(chunks) > 1
    echo.gate.set()
    [(_, batch)] = until(lambda: rollout.collect(1.0)[0][0], "nothing was collected")
    assert [result.stalls for result in batch.non_tensor_batch["rollout"]] == [0]
    rollout.close()


class Gated(Echo):
    """Answers when it is let."""

    def __init__(self):
        super().__init__()
        self.gate, self.executing = threading.Event(), False

    async def execute(self, instance_id, parameters, **kwargs):
        self.executing = True
        while not self.gate.is_set():
            await asyncio.sleep(0.005)
        return await super().execute(instance_id, parameters, **kwargs)


async def settled(engine=None, version=None):
    if engine is not None:
        engine._version = version


@pytest.mark.parametrize("transfer", ["folder", "adapter"])
def test_a_server_of_the_rollout_group_gets_the_chunks_as_files(model_path, transfer):
    pytest.importorskip("peft")
    model = ModelOptions(path=model_path, lora_rank=4, lora_alpha=32.0)
    state = State(Network(model_path), 0.0)
    with serving_in_a_thread(build_app(state)) as url:
        rollout = {
            "name": "sglang",
            "server_urls": [url],
            "server_timeout": 30.0,
            "weight_transfer": transfer,
            "free_cache_engine": True,
        }
        actor, versions = ActorOptions(ppo_mini_batch_size=2, optim=OptimOptions(lr=3e-2)), 1 + (transfer == "adapter")
        options = tiny_options(model_path, model=model, actor=actor, rollout=rollout, max_staleness=versions - 1)
        both = Both(*groups(options, ranks=1))
        both.update_weights(0)
        link = both.rollout._workers[0]._link
        for step in range(2):
            batch = learnable(both, prompts(count=2, seed=step))
            assert gap(batch) < 1e-4
            assert update(both, batch, step + 1)["weight_sync/largest_difference"] < 1e-4
        folders = sorted(link._folder.folder.glob("version-*"))
        assert len(folders) == versions
        names = {file.name for file in folders[-1].iterdir()}
        if transfer == "adapter":
            assert names == {"adapter_config.json", "adapter_model.safetensors"}
        else:
            index = json.loads((folders[-1] / "model.safetensors.index.json").read_text())["weight_map"]
            assert names == {"config.json", "model.safetensors.index.json", *index.values()}
            assert len(set(index.values())) > 3
        both.rollout.generate_sequences(prompts(count=1))
        if transfer == "folder":
            state.fault = "forgets"
            with pytest.raises(WeightMismatch, match="version 2 of the weights"):
                both.rollout.generate_sequences(prompts(count=1))


def test_a_server_that_comes_back_draws_what_the_others_draw_or_stays_out(model_path):
    """No actor is there to say what is right."""
    states = [State(Network(model_path), 0.0) for _ in range(2)]
    with serving_in_a_thread(build_app(states[0])) as first, serving_in_a_thread(build_app(states[1])) as second:
        rollout = {"name": "sglang", "server_urls": [first, second], "server_timeout": 30.0}
        both = Both(*groups(tiny_options(model_path, rollout=rollout), ranks=1))
        both.update_weights(0)
        worker = both.rollout._workers[0]
        router = worker._link.engine
        with torch.no_grad():
            both.actor._workers[0].model.get_input_embeddings().weight.mul_(1.5)
        away = next(each for each in router._replicas if each.name == second)
        for fault, version, back in (("stale", 1, False), ("none", 2, True), ("stale", 2, True)):
            router._eject(away, EngineError("the server has ended"))
            both.update_weights(version)
            states[1].fault = fault
            worker._run(router._bring_back(away))
            assert away.up == back, (fault, version)
        worker._link.drawn = []  # as before the first probe of a version
        router._eject(away, EngineError("the server has ended"))
        worker._run(router._bring_back(away))
        assert not away.up


def test_a_packed_chunk_has_the_tensors_bit_for_bit():
    chunk = [
        ("a", torch.arange(3, dtype=torch.int8)),
        ("b", torch.randn(5, 3, dtype=torch.bfloat16).T),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("empty", torch.zeros(0, 4)),
    ]
    sent = pickle.loads(pickle.dumps(pack_chunk(chunk, {})))
    tensors, sums = tensors_of(sent)
    for (name, before), (other, after) in zip(chunk, tensors):
        assert name == other
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
        assert sums[name] == checksum(after)


def test_metrics_of_two_groups_add_up(model_path):
    actor, rollout = groups(tiny_options(model_path))
    figures = finish_metrics(add_metrics(sync_weights(actor, rollout, 0)))
    assert figures["weight_sync/seconds"] > 0
    silent = groups(tiny_options(model_path, rollout={"weight_probe": False}))
    assert "weight_sync/largest_difference" not in finish_metrics(add_metrics(sync_weights(*silent, 0)))
