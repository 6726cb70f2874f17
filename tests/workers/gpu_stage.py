"""What the tests of GPUs, pretend and real, compare with the CPU: training in every way, and attention."""

import asyncio
from dataclasses import replace

import torch
from options_stage import changed
from ranks_stage import Case, updates
from vision_stage import image
from workers_stage import WITH_REF, objects, tiny_options

from etude.inference import SamplingParams
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
    "half distillation": {"model": {"dtype": "bfloat16"}},
    "critic": {},
    "half critic lora": {"model": {"dtype": "bfloat16"}, "critic": LORA},
    "images of qwen2_5_vl": {},
    "half images of qwen3_vl": {"model": {"dtype": "bfloat16"}},
}
"""Optimizers, LoRA, precisions, distillation, the critic, and models that take images."""


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


def learn(gpu, options, device, name):
    """(log-probs or values before, weights after, waits of the host by place, micro-batches and steps, attention calls,
    where the optimizer is and copies to the CPU that nobody waits for)."""
    worker_cls = CriticWorker if "critic" in name else TrainWorker
    worker = worker_cls(options, Placement(device=device), rank=0, world_size=1)
    worker.init_model()
    batch, passes, optimizer = Case({}, taught="distillation" in name).batch(), [], worker._optimizer
    if "images" in name:
        batch = with_images(batch, worker.bundle.processor)
    batch.meta_info["compare_rollout"] = False
    if "critic" in name:
        scores = worker.compute_values(batch).batch["values"]
    else:
        scores = worker.compute_log_prob(batch).batch["old_log_probs"]
    gpu.reset()
    for call in ("backward", "step"):
        called = getattr(optimizer, call)
        setattr(optimizer, call, lambda *given, call=call, called=called: (passes.append(call), called(*given))[1])
    updates(worker, options, batch)
    waits, calls = dict(gpu.waits), [name for name in gpu.calls if "varlen" in name]
    state = {name: x.detach().cpu().float() for name, x in optimizer.state_dict().items() if name.startswith("model.")}
    places = {x.device.type for name, x in optimizer.state_dict().items() if "step" not in name and x.ndim}
    offloads = places, sum(gpu.downloads.values())
    return scores, state, waits, (passes.count("backward"), passes.count("step")), calls, offloads


def with_images(batch, processor):
    """The prompts of the second group begin with a picture and a word, those of the fourth with two; others are padded."""
    pictures = [image(processor, seed=seed) for seed in range(3)]
    word = [processor.image_token_id] * pictures[0].tokens + [7]
    shown = [{"u1": pictures[:1], "u3": pictures[1:]}.get(uid, []) for uid in batch.non_tensor_batch["uid"]]
    width = 2 * len(word)
    heads = torch.tensor([[0] * (width - len(word) * len(each)) + word * len(each) for each in shown])
    for name, head in {"input_ids": heads, "attention_mask": heads.sign()}.items():
        batch.batch[name] = torch.cat([head, batch.batch[name]], dim=1)
    batch.non_tensor_batch["multi_modal_inputs"] = objects([tuple(each) for each in shown])
    return batch


async def sample(engine, tokens):
    """Greedily, from prompts of which some share a beginning."""
    prompts = [[*range(5, 30), 7 + i % 3, *range(i)] for i in range(6)]
    names = [f"row/{i}" for i in range(len(prompts))]
    engine.open(names)
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    found = await asyncio.gather(*(engine.generate(*each, params) for each in zip(names, prompts)))
    for name in names:
        engine.close(name)
    return [output.token_ids for output in found]


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
