"""What the tests of GPUs, pretend and real, compare with the CPU: training in every way, and attention."""

from dataclasses import replace

import torch
from options_stage import changed
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
    "offloaded": {"model": {"enable_activation_offload": True}, "optim": {"offload": True}},
    "half critic, offloaded": {
        "model": {"dtype": "bfloat16"},
        "critic": {"enable_activation_offload": True},
        "optim": {"offload": True},
    },
    "critic": {},
    "half critic lora": {"model": {"dtype": "bfloat16"}, "critic": LORA},
}
"""Optimizers, LoRA, precisions, and the critic."""


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
    """(log-probs or values before, weights after, waits of the host by place, micro-batches and steps, attention calls,
    where the optimizer is and copies to the CPU that nobody waits for)."""
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
    places = {x.device.type for name, x in optimizer.state_dict().items() if "step" not in name and x.ndim}
    offloads = places, sum(gpu.downloads.values())
    return scores, state, waits, (passes.count("backward"), passes.count("step")), calls, offloads


RUNS = CausalSequences([5, 3, 4, 6], [(), (0,), (0, 1), ()])
LIMITS = [{}, {"window": 4}, {"chunk": 3}, {"softcap": 5.0}]


def attend_each(gpu, path, device="gpu", width=8, runs=RUNS):
    """Outputs and gradients of attention on the CPU and on the device."""
    found, tokens = [], sum(runs.lengths)
    for dtype, limits in [(dtype, limits) for dtype in (torch.float32, torch.bfloat16) for limits in LIMITS]:
        torch.manual_seed(0)
        given = [torch.randn(heads, tokens, width).to(dtype) for heads in (4, 2, 2)]
        slopes = torch.randn(tokens, 4, width).to(dtype)
        for on in ("cpu", device):
            own = [tensor.detach().to(on).requires_grad_() for tensor in given]
            out = CausalSequences(runs.lengths, runs.ancestors).attend(0, *own, Scoring(0.35, **limits))
            out.backward(slopes.to(on))
            found.append([tensor.detach().cpu().float() for tensor in (out, *(tensor.grad for tensor in own))])
    return found
