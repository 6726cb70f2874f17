"""A model of which each rank has a part, in every way to spread it: it learns and saves what one rank does."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from options_stage import changed
from ranks_stage import (
    Case,
    World,
    assert_alike,
    in_double,
    kept_gradients,
    run_ranks,
    shortened,
    uneven_batch,
    updates,
    whole_weights,
)
from safetensors.torch import load_file
from vision_stage import build_vision_stage
from workers_stage import SPEC, TEXTS, WITH_REF, prompts, save_model, tiny_options

from etude.errors import ConfigError
from etude.metrics import add_metrics, finish_metrics
from etude.models import build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.models.attention import Scoring
from etude.models.packable import enable_packing
from etude.models.packed import CausalSequences
from etude.options import FSDPOptions, ModelOptions, OptimOptions, TrainOptions
from etude.options.training import ValueModelOptions
from etude.training import build_mesh, is_sharded, shard_model
from etude.training.ulysses import SequenceTeam, TeamLayout
from etude.workers import ActorRolloutRefWorker, CriticWorker, TrainWorker

LORA = {"lora_rank": 4, "target_modules": ("q_proj", "v_proj")}
KEY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
WORKERS = {"actor": TrainWorker, "critic": CriticWorker}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Folders of tiny models: with a tied head and with one of its own, Llama's, Gemma's, and a mixture of experts."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), build_tiny_tokenizer(TEXTS, 400)
    made = {"tied": save_model(folder / "tied")}
    for name, architecture in {
        "untied": "qwen3",
        "llama": "llama",
        "gemma": "gemma3_text",
        "mixture": "qwen3_moe",
    }.items():
        model = build_tiny_model(replace(SPEC, architecture=architecture), tokenizer)
        if name == "untied":
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
        save_pretrained(model, tokenizer, folder / name)
        made[name] = str(folder / name)
    return made


def options_of(
    paths, path="tied", model=None, optim=None, fsdp=None, strategy="fsdp2", together=1, aux=0.0, **given
) -> TrainOptions:
    optim = OptimOptions(**{"lr": 1e-2, "clip_grad": 0.05, **(optim or {})})
    options = shortened(
        changed(tiny_options(paths[path]), **given),
        strategy=strategy,
        optim=optim,
        fsdp_config=FSDPOptions(**(fsdp or {})),
        ulysses_sequence_parallel_size=together,
    )
    model = model or {}
    return changed(
        options,
        actor=replace(options.actor, router_aux_loss_coef=aux),
        model=ModelOptions(path=paths[path], **model),
        critic=replace(options.critic, model=ValueModelOptions(path=paths[path], **model)),
    )


TWO = {
    "untied": {"path": "untied"},
    "mixture": {"path": "mixture"},
    "lora": {"model": LORA, "algorithm": WITH_REF},
    "critic lora": {"model": LORA},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "muon": {"optim": {"name": "muon"}},
    "schedule free": {"optim": {"name": "adamw_schedule_free"}},
    "kept after forward": {"fsdp": {"reshard_after_forward": False}},
    "offloaded": {"fsdp": {"param_offload": True}},
    "tensor parallel": {"fsdp": {"tensor_parallel_size": 2}},
    "tensor parallel, gemma": {"path": "gemma", "fsdp": {"tensor_parallel_size": 2}},
    "rows together": {"together": 2, "strategy": "ddp"},
    "rows together, lora": {"together": 2, "strategy": "ddp", "model": LORA, "algorithm": WITH_REF},
    "rows together, mixture": {
        "together": 2,
        "path": "mixture",
        "aux": 0.1,
        "model": {"enable_gradient_checkpointing": True},
    },
    "critic, rows together": {"together": 2, "strategy": "ddp"},
}
FOUR = {
    "hsdp": {"fsdp": {"fsdp_size": 2}},
    "tensor parallel and sharded": {"path": "llama", "fsdp": {"tensor_parallel_size": 2}},
    "critic, tensor parallel and replicated": {"fsdp": {"tensor_parallel_size": 2, "fsdp_size": 1}},
    "rows of two ranks": {"path": "llama", "together": 2},
    "fewer key heads than ranks": {"together": 4, "strategy": "ddp"},
}


def learn_each(rank, ranks, given, folder):
    """Name → (figures, gradients, weights, layout) of each way."""
    in_double()
    gradients, found = kept_gradients(), {}
    for name, options in given.items():
        worker = WORKERS["critic" if "critic" in name else "actor"](options, rank=rank, world_size=ranks)
        worker.init_model()
        batch, scores = uneven_batch(), None
        if options.needs_ref:  # the first pass of all is one without adapters
            scores = [worker.compute_ref_log_prob(batch).batch["ref_log_prob"]]
            scores.append(worker.compute_log_prob(batch).batch["old_log_probs"])
        gradients.clear()
        metrics, weights = updates(worker, options, batch), whole_weights(worker)
        parameter, layout = next(worker.model.parameters()), None
        if options.actor.strategy != "ddp":
            layout = [tuple(parameter.device_mesh.shape), parameter.to_local().numel() / parameter.numel()]
        worker.save_checkpoint(str(folder / name))
        found[name] = metrics, [*gradients], weights if rank == 0 else None, layout, scores
    return found


def learned(ranks, given, folder):
    first, *others = run_ranks(ranks, learn_each, given, folder, folder=folder)
    return {
        name: (
            finish_metrics(add_metrics([*metrics, *(m for other in others for m in other[name][0])])),
            gradients,
            weights,
            layout,
            scores,
        )
        for name, (metrics, gradients, weights, layout, scores) in first.items()
    }


@pytest.fixture(scope="module")
def ways(paths, tmp_path_factory):
    """What two and four ranks make of the batch in each way, and the folder of their checkpoints."""
    folder, found = tmp_path_factory.mktemp("ways"), {}
    for ranks, given in ((2, TWO), (4, FOUR)):
        found |= learned(ranks, {name: options_of(paths, **way) for name, way in given.items()}, folder)
    return found, folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_every_way_learns_as_one_rank(monkeypatch, paths, ways, name, tmp_path):
    found, folder = ways
    figures, gradients, weights, layout, scores = found[name]
    options = options_of(paths, **{**TWO, **FOUR}[name])
    role = "critic" if "critic" in name else "actor"
    world = World(WORKERS[role], options, 1, short=False)
    worker = world.workers[0]
    if scores is not None:
        expected = [worker.compute_ref_log_prob(uneven_batch()).batch["ref_log_prob"]]
        expected.append(worker.compute_log_prob(uneven_batch()).batch["old_log_probs"])
        for ours, theirs in zip(scores, expected):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    alone = world.learn(monkeypatch, Case({}, role=role))
    # Gemma's norms sum their gradients in float32, whatever the model's dtype.
    assert_alike(alone, (figures, gradients, weights), tolerance=1e-8 if "gemma" in name else 1e-9)
    if name == "hsdp":
        assert layout == [(2, 2), 0.5]
    if name == "tensor parallel and sharded":
        assert layout == [(2,), 0.5]
    saved = load_file(folder / name / role / "huggingface" / "model.safetensors")
    worker.save_model(str(tmp_path))
    whole = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == whole.keys()
    assert all(torch.allclose(whole[key], tensor, rtol=0, atol=1e-6) for key, tensor in saved.items())
    if name == "lora":
        adapters = load_file(folder / name / "actor" / "lora_adapter" / "adapter_model.safetensors")
        for key, tensor in adapters.items():
            own = key.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            assert torch.allclose(weights[own], tensor.double(), rtol=0, atol=1e-6)


SCORINGS = {
    "causal": Scoring(0.4),
    "window": Scoring(0.4, window=5),
    "chunk": Scoring(0.4, chunk=7),
    "soft cap": Scoring(0.4, softcap=2.0),
    "sinks": Scoring(0.4, sinks=torch.linspace(-1, 1, 12).double().requires_grad_()),
}


def attend_together(rank, ranks):
    """The largest differences of outputs and gradients from one rank's attention, over a tree of odd lengths."""
    team, layout = SequenceTeam.join(ranks, "key"), CausalSequences([9, 4, 6], [[], [0], [0]])
    generator, worst = torch.Generator().manual_seed(0), {}
    for groups in (1, 3, 6):  # of 12 heads
        inputs = [
            torch.randn(n, 19, 8, generator=generator, dtype=torch.double).requires_grad_()
            for n in (12, groups, groups)
        ]
        wanted = torch.randn(19, 12, 8, generator=generator, dtype=torch.double)
        for name, scoring in SCORINGS.items():
            leaves = [*inputs, *([] if scoring.sinks is None else [scoring.sinks])]
            whole = layout.attend(0, *inputs, scoring)
            expected = torch.autograd.grad((whole * wanted).sum(), leaves)
            parts = [team.own(x.transpose(0, 1)).transpose(0, 1) for x in inputs]
            out = TeamLayout(layout, team, 19).attend(0, *parts, scoring)
            found = torch.autograd.grad((out * team.own(wanted)).sum(), leaves)
            for gradient in found:
                dist.all_reduce(gradient)
            pairs = [(out[: len(whole[rank::ranks])], whole[rank::ranks]), *zip(found, expected)]
            worst[name, groups] = max(float((a - b).detach().abs().max()) for a, b in pairs)
            assert len(out) == -(-19 // ranks)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_rows_attend_as_one(ranks, tmp_path):
    for worst in run_ranks(ranks, attend_together, folder=tmp_path):
        assert len(worst) == 3 * len(SCORINGS)
        assert max(worst.values()) < 1e-12


def test_what_a_team_cannot_share_is_one_line():
    team, key = SequenceTeam(3, 0, None, KEY), "does not divide"
    model = build_tiny_model(SPEC, build_tiny_tokenizer(TEXTS, 400))
    refused = {"computes one sequence": model, "vision-language models": build_vision_stage("qwen3_vl")[0]}
    packed = copy.deepcopy(model)
    enable_packing(packed)
    for reason, given in {**refused, key: packed}.items():
        with pytest.raises(ConfigError, match=reason) as failed:
            team.check(given)
        assert failed.value.key == KEY


def roll_out_and_learn(rank, ranks, options):
    """A sharded actor whose engine has a copy of its own: (rollouts, differences found by the probe, layout, precision)."""
    worker = ActorRolloutRefWorker(options, rank=rank, world_size=ranks)
    worker.init_model()
    figures = [worker.update_weights(0)]
    rolled = worker.generate_sequences(prompts()).batch["responses"]
    updates(worker, options, uneven_batch())
    figures.append(worker.update_weights(1))
    again = worker.generate_sequences(prompts()).batch["responses"]
    differences = [each["weight_sync/largest_difference"].value for each in figures]
    kinds = {parameter.dtype for parameter in worker.model.parameters()}
    return (rolled, again), differences, worker._manager.engine.shares_weights, kinds


@pytest.mark.slow
def test_the_engine_of_a_sharded_actor_samples_from_its_weights(paths, tmp_path):
    """In bfloat16, too, where the shards that learn are float32."""
    exact = options_of(paths)
    for options, tolerance in ((exact, 1e-4), (changed(exact, model=replace(exact.model, dtype="bfloat16")), 0.3)):
        ranks = run_ranks(2, roll_out_and_learn, options, folder=tmp_path)
        [alone] = run_ranks(1, roll_out_and_learn, options, folder=tmp_path)
        for rolled, differences, shares, kinds in ranks:
            assert not shares
            assert max(differences) < tolerance
            assert kinds == {torch.float32}
            assert torch.equal(rolled[0], alone[0][0])
            assert not torch.equal(rolled[0], rolled[1])
            if options is exact:
                assert torch.equal(rolled[1], alone[0][1])
        assert alone[2]


def spread(rank, ranks, given):
    """How each worker's model lies on the ranks."""
    found = []
    for role, options in given:
        worker = WORKERS[role](options, rank=rank, world_size=ranks)
        worker.init_model()
        first = next(worker.model.parameters())
        if not is_sharded(worker.model):
            found.append(None)
            continue
        layer = getattr(worker.model, "backbone", worker.model).get_decoder().layers[0]
        group = layer._get_fsdp_state()._fsdp_param_group
        split = [p for p in layer.parameters() if p.device_mesh.ndim > first.device_mesh.ndim]
        found.append(
            (
                tuple(first.device_mesh.shape),
                len(split),
                group.fsdp_params[0].offload_to_cpu,
                group.post_forward_mesh_info is not None,
            )
        )
    return found


@pytest.mark.slow
def test_the_keys_choose_how_a_model_is_spread(paths, tmp_path):
    """(mesh of the data-parallel ranks, tensors of a layer that are split, offloaded, resharded after forward)."""
    expected = {
        "ddp": None,
        "fsdp2": ((2,), 0, False, True),
        "fsdp": ((2,), 0, False, True),
        "fsdp_size": ((2, 1), 0, False, True),
        "tensor_parallel_size": ((1,), 7, False, True),
        "param_offload": ((2,), 0, True, True),
        "offload": ((2,), 0, True, True),
        "reshard_after_forward": ((2,), 0, False, False),
    }
    ways = {"fsdp_size": 1, "tensor_parallel_size": 2, "param_offload": True, "reshard_after_forward": False}
    given = [
        (role, options_of(paths, path="llama", fsdp={name: ways[name]}))
        if name in ways
        else (role, options_of(paths, path="llama", strategy="fsdp2", optim={"offload": True}))
        if name == "offload"
        else (role, options_of(paths, path="llama", strategy=name))
        for role in WORKERS
        for name in expected
    ]
    assert run_ranks(2, spread, given, folder=tmp_path) == [[*expected.values()] * 2] * 2


def refusals(rank, ranks, given):
    found = []
    for options in given:
        try:
            TrainWorker(options, rank=rank, world_size=ranks).init_model()
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_what_cannot_be_sharded_is_one_line(paths, tmp_path):
    expected = {
        "fsdp_config.fsdp_size=3 and tensor_parallel_size=1 do not divide 2 ranks": {"fsdp": {"fsdp_size": 3}},
        "fsdp_config.tensor_parallel_size=2 does not go with LoRA: write 1": {
            "fsdp": {"tensor_parallel_size": 2},
            "model": LORA,
        },
        "fsdp_config.tensor_parallel_size=2: Transformers' plan for type 'qwen3_moe' has moe_tp_experts: write 1": {
            "fsdp": {"tensor_parallel_size": 2},
            "path": "mixture",
        },
        f"{KEY}=3 does not divide 2 ranks; write {KEY}=1": {"together": 3},
        f"{KEY}=2 does not go with fsdp_config.tensor_parallel_size above 1; write {KEY}=1": {
            "together": 2,
            "fsdp": {"tensor_parallel_size": 2},
        },
        "optim.name=adamw_8bit does not go with strategy=fsdp2: write strategy=ddp, or change it": {
            "optim": {"name": "adamw_8bit"}
        },
        "model.quantization=nf4 does not go with strategy=fsdp2: write strategy=ddp, or change it": {
            "model": {**LORA, "quantization": "nf4"}
        },
    }
    given = [options_of(paths, **way) for way in expected.values()]
    assert run_ranks(2, refusals, given, folder=tmp_path) == [[*expected]] * 2


def test_a_model_that_sees_is_not_sharded():
    model, _ = build_vision_stage("qwen3_vl")
    with pytest.raises(ConfigError, match="vision-language models cannot be sharded yet: write strategy=ddp"):
        shard_model(model, FSDPOptions(), None, torch.float32)


def test_a_mesh_needs_processes():
    with pytest.raises(RuntimeError, match="several ranks cannot share a model in one process"):
        build_mesh(FSDPOptions(), 2, torch.device("cpu"))


def test_ranks_of_a_team_get_the_same_rows(paths):
    options = options_of(paths, fsdp={"tensor_parallel_size": 2})
    places = [ActorRolloutRefWorker(options, rank=rank, world_size=4).mesh_place("train") for rank in range(4)]
    assert [(p.dp_rank, p.dp_size, p.collects) for p in places] == [
        *((0, 2, True), (0, 2, False)),
        *((1, 2, True), (1, 2, False)),
    ]
    own = ActorRolloutRefWorker(options, rank=3, world_size=4).mesh_place("rollout")
    assert (own.dp_rank, own.dp_size, own.collects) == (3, 4, True)
    alone = ActorRolloutRefWorker(options, rank=0, world_size=1).mesh_place("train")
    assert alone.dp_size == 1
    options = options_of(paths, strategy="ddp", together=2)
    for worker in (ActorRolloutRefWorker, CriticWorker):
        places = [worker(options, rank=rank, world_size=4).mesh_place("train") for rank in range(4)]
        assert [(p.dp_rank, p.collects) for p in places] == [(0, True), (0, False), (1, True), (1, False)]
