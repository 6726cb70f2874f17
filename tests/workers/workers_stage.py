"""The stage of the workers' tests: a tiny model in a folder, a parser that makes a random model call a tool, batches."""

import asyncio
import json
import re
from dataclasses import replace

import numpy as np
import torch
from batches_stage import update_batches
from options_stage import changed

from etude.agents import MultiTurnOptions, RolloutOptions
from etude.chat import ParsedResponse, ToolParser
from etude.distributed import InProcessWorkerGroup
from etude.metrics import add_metrics, finish_metrics
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.options import ActorOptions, AlgorithmOptions, CriticOptions, ModelOptions, TrainOptions
from etude.protocol import DataProto
from etude.schemas import FunctionCall
from etude.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from etude.training import OptimOptions
from etude.workers import ActorRolloutRefWorker

TEXTS = ["What is 2 + 3? The answer is 5. tool call name arguments text value country capital"] * 4
WITH_REF = AlgorithmOptions(use_kl_in_reward=True)
SPEC = TinyModelSpec(hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400, seed=3)


@ToolParser.register("workers_stage")
class EagerParser(ToolParser):
    """Every third token id ends a turn, and a turn with a vowel in it is a call."""

    @property
    def stop_token_ids(self):
        return tuple(range(10, 400, 9))

    def parse(self, text, tools=None):
        calls = [FunctionCall(name="echo", arguments=json.dumps({"text": "ok"}))] if re.search("[aeiou]", text) else []
        return ParsedResponse(text, calls, [])


class Echo(BaseTool):
    """Answers after a moment, and pays for it."""

    def __init__(self):
        function = {"name": "echo", "description": "", "parameters": {"type": "object", "properties": {}}}
        super().__init__({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))
        self.created = self.released = 0

    async def create(self, instance_id=None, **kwargs):
        self.created += 1
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(0.001)
        return ToolResponse(text=parameters["text"]), 0.25, {}

    async def release(self, instance_id, **kwargs):
        self.released += 1


def save_model(folder):
    tokenizer = build_tiny_tokenizer(TEXTS, 400)
    save_pretrained(build_tiny_model(SPEC, tokenizer), tokenizer, folder)
    return str(folder)


def tiny_options(path, **given):
    """Options of a tiny run, with other ones as `changed` takes them; `rollout` are those of its rollout section."""
    multi_turn = MultiTurnOptions(format="workers_stage")
    rollout = RolloutOptions(
        **{"prompt_length": 64, "response_length": 64, "multi_turn": multi_turn, **given.pop("rollout", {})}
    )
    return changed(
        TrainOptions(),
        **{
            "model": ModelOptions(path=path),
            "actor": ActorOptions(ppo_mini_batch_size=2, optim=OptimOptions(lr=1e-2)),
            "rollout": rollout,
            "critic": CriticOptions(ppo_mini_batch_size=2, optim=OptimOptions(lr=1e-2)),
            **given,
        },
    )


def objects(values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def prompts(count=4, n=2, seed=1, validate=False, **columns):
    """`count` questions, each `n` times, as `generate_sequences` takes them."""
    rows = [
        {
            "raw_prompt": [{"role": "user", "content": f"What is {i} + 3?"}],
            "data_source": "etude/arithmetic",
            "reward_model": {"ground_truth": str(i + 3)},
            "extra_info": {"index": i},
            "tools_kwargs": {},
            "uid": f"u{i}",
            "rollout_index": i * n + k,
        }
        for i in range(count)
        for k in range(n)
    ]
    data = {key: objects([row[key] for row in rows]) for key in rows[0]}
    data |= {key: objects(list(values)) for key, values in columns.items()}
    batch = DataProto.from_single_dict(data)
    batch.meta_info = {"seed": seed, "validate": validate}
    return batch


def policy(path, tools=None, **given):
    """(group, its only worker), with the model loaded."""
    return started(tiny_options(path, **given), tools)


def started(options, tools=None, worker_cls=ActorRolloutRefWorker):
    """(group, its only worker) whose agents have `tools` in place of the configured ones, with the model loaded."""
    group = InProcessWorkerGroup(worker_cls, 1, options)
    worker = group._workers[0]
    if tools is not None:
        worker.context = replace(worker.context, tools=tools)
    group.init_model()
    group.update_weights(0)
    return group, worker


def learnable(group, batch):
    """`batch` rolled out and ready for an update: made-up advantages, and what the trainer adds."""
    rolled = batch.union(group.generate_sequences(batch))
    rolled.meta_info |= {"temperature": 1.0, "global_step": 0}
    rolled.meta_info.pop("metrics", None)
    mask = rolled.batch["response_mask"]
    generator = torch.Generator().manual_seed(0)
    rolled.batch["advantages"] = torch.randn(mask.shape[0], 1, generator=generator) * mask
    return rolled.union(group.compute_log_prob(rolled))


def update(group, batch, version=1):
    """What a training step does with a batch ready to learn from; the figures of the update and of the new weights."""
    return finish_metrics(add_metrics([*learn(group, batch), *group.update_weights(version)]))


def learn(group, batch, role="actor"):
    """The metrics of each step of `update_actor` or `update_critic` on the batch's mini-batches, one a rank."""
    options = group._workers[0].options
    shuffle, seed = options.actor.shuffle, options.actor.data_loader_seed
    minis = update_batches(batch, getattr(options, role), shuffle=shuffle, seed=seed, ranks=group.world_size)
    update = getattr(group, f"update_{role}")
    return [metrics for parts in minis for metrics in update(parts)]


def gap(batch):
    """How far the engine's log-probs of a learnable batch are from the actor's, at most."""
    mask = batch.batch["response_mask"].bool()
    return float((batch.batch["rollout_log_probs"] - batch.batch["old_log_probs"])[mask].abs().max())


def versions_of(batch):
    """The versions of the weights that any token of a rolled-out batch was drawn from."""
    segments = [segment for result in batch.non_tensor_batch["rollout"] for segment in result.trajectory.segments]
    return {version for segment in segments for version in segment.weight_versions or ()}


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
