"""Training on the pretend GPU (`pretend_gpu`): nothing mixes its tensors with the CPU's, results are the CPU's, and the host
seldom waits for it."""

from dataclasses import replace

import pytest
import torch
from options_stage import changed
from pretend_gpu import in_a_process
from ranks_stage import uneven_batch, updates
from workers_stage import WITH_REF, tiny_options

from etude.models.attention import Scoring
from etude.models.packed import CausalSequences
from etude.options import OptimOptions
from etude.workers import CriticWorker, TrainWorker
from etude.workers.role import Placement

LORA = {"lora_rank": 4, "target_modules": ("q_proj", "v_proj")}
WAYS = {
    "adamw": {},
    "muon": {"optim": {"name": "muon"}},
    "schedule free": {"optim": {"name": "adamw_schedule_free"}},
    "lora, checkpointing": {"model": {**LORA, "enable_gradient_checkpointing": True}, "algorithm": WITH_REF},
    "half, by default": {"model": {"dtype": "auto"}},
    "half lora muon": {"model": {"dtype": "bfloat16", **LORA}, "optim": {"name": "muon"}},
    "float16": {"model": {"dtype": "float16"}},
    "critic": {},
    "half critic lora": {"model": {"dtype": "bfloat16"}, "critic": LORA},
}
"""Optimizers, LoRA, precisions, and the critic."""

MICRO_BATCH, STEP = 12, 3
"""Waits of the host for the GPU in a micro-batch, and in an optimizer step."""


def options_of(path, model=None, optim=None, critic=None, **given):
    options = tiny_options(path, **given)
    learns = {"optim": OptimOptions(**{"lr": 1e-2, "clip_grad": 0.05, **(optim or {})})}
    short = {**learns, "ppo_max_token_len_per_gpu": 60}
    return changed(
        options,
        model=replace(options.model, **{"dtype": "float32", **(model or {})}),
        actor=replace(options.actor, **short, use_kl_loss=True, entropy_coeff=0.01),
        critic=replace(options.critic, **short, model=replace(options.critic.model, path=path, **(critic or {}))),
    )


def learn(gpu, options, device, role):
    """(log-probs or values before, weights after, waits of the host by place, micro-batches and steps, attention calls)."""
    worker = {"actor": TrainWorker, "critic": CriticWorker}[role](
        options, Placement(device=device), rank=0, world_size=1
    )
    worker.init_model()
    batch, passes, optimizer = uneven_batch(), [], worker._optimizer
    batch.meta_info["compare_rollout"] = False
    if role == "critic":
        scores = worker.compute_values(batch).batch["values"]
    else:
        scores = worker.compute_log_prob(batch).batch["old_log_probs"]
    gpu.reset()
    for name in ("backward", "step"):
        called = getattr(optimizer, name)
        setattr(optimizer, name, lambda *given, name=name, called=called: (passes.append(name), called(*given))[1])
    updates(worker, options, batch)
    waits, calls = dict(gpu.waits), [name for name in gpu.calls if "varlen" in name]
    state = {name: x.detach().cpu().float() for name, x in optimizer.state_dict().items() if name.startswith("model.")}
    return scores, state, waits, (passes.count("backward"), passes.count("step")), calls


def learn_each(gpu, path):
    found = {}
    for name, way in WAYS.items():
        role, options = "critic" if "critic" in name else "actor", options_of(path, **way)
        found[name] = [learn(gpu, options, device, role) for device in ("cpu", "gpu")]
    return found


@pytest.fixture(scope="module")
def ways(model_path):
    return in_a_process(learn_each, model_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_every_way_learns_as_on_the_cpu_and_seldom_waits(ways, name):
    (scores, weights, *_), (ours, own, waits, (micros, steps), attention) = ways[name]
    half = "half" in name or name == "float16"
    assert torch.allclose(scores, ours, atol=0.05 if half else 1e-5)
    assert weights.keys() == own.keys()
    for key, tensor in weights.items():
        difference = (tensor - own[key]).abs()
        assert difference.mean() < 0.02 if half else difference.max() < 2e-4, key
    assert sum(waits.values()) <= MICRO_BATCH * micros + STEP * steps, waits
    assert len(attention) == (2 if half else 0)


# -- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", [Scoring(0.1), Scoring(0.1, window=4096), Scoring(0.1, chunk=8192)])
def test_attention_keeps_little_for_the_backward_pass(scoring):
    """A response of 30 k tokens after a prompt of 2 k, in a model of 7 B parameters: a mask alone would be 1 GiB."""
    prompt, response, kept = 2048, 30720, {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    query, key, value = (
        torch.empty(heads, prompt + response, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (28, 4, 4)
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        CausalSequences([prompt, response], [(), (0,)]).attend(0, query, key, value, scoring)
    assert sum(each.untyped_storage().nbytes() for each in kept.values()) < 4 * query.untyped_storage().nbytes()


RUNS = CausalSequences([5, 3, 4, 6], [(), (0,), (0, 1), ()])
LIMITS = [{}, {"window": 4}, {"chunk": 3}, {"softcap": 5.0}]


def attend_each(gpu, path):
    """Outputs and gradients of attention on the CPU and on the device."""
    found = []
    for dtype, limits in [(dtype, limits) for dtype in (torch.float32, torch.bfloat16) for limits in LIMITS]:
        torch.manual_seed(0)
        given, slopes = [torch.randn(heads, 18, 8).to(dtype) for heads in (4, 2, 2)], torch.randn(18, 4, 8).to(dtype)
        for device in ("cpu", "gpu"):
            own = [tensor.detach().to(device).requires_grad_() for tensor in given]
            out = CausalSequences(RUNS.lengths, RUNS.ancestors).attend(0, *own, Scoring(0.35, **limits))
            out.backward(slopes.to(device))
            found.append([tensor.detach().cpu().float() for tensor in (out, *(tensor.grad for tensor in own))])
    return found


def test_attention_of_rows_that_share_a_prompt_is_the_cpus(model_path):
    """By flash attention in half precision, else by blocks of queries; with windows, chunks and soft caps."""
    found = in_a_process(attend_each, model_path)
    for number, (cpu, gpu) in enumerate(zip(found[::2], found[1::2])):
        bounds = {"atol": 1e-5} if number < len(LIMITS) else {"atol": 0.03, "rtol": 0.02}
        assert all(torch.allclose(a, b, **bounds) for a, b in zip(cpu, gpu)), number
