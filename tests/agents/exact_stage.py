"""The stage of the exactness properties: the policy worker with its real engine, tiny models with chat templates of
several kinds, tools and a user who say what they are told to, and a witness at the engine."""

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch
from options_stage import changed
from turn_templates import HARMONY, HARMONY_TOKENS, ROLES, ROLES_TOKENS

from etude.agents import MultiTurnOptions, RolloutOptions
from etude.agents.interactions import BaseInteraction
from etude.chat import ParsedResponse, ToolParser
from etude.distributed import InProcessWorkerGroup
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.options import (
    ActorOptions,
    ModelOptions,
    RewardOptions,
    TrainOptions,
)
from etude.protocol import DataProto
from etude.schemas import FunctionCall
from etude.tools import BaseTool, OpenAIFunctionToolSchema
from etude.training import OptimOptions
from etude.workers import ActorRolloutRefWorker

TEXTS = ["What is 2 + 3? The answer is 5. user assistant tool system value country capital"] * 4
SPEC = TinyModelSpec(hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400, initializer_range=0.2, seed=3)
BUDGET = 120

HEADERS = """{%- for m in messages %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {{- '<start>' + role + '<end>\n\n' + (m.content | trim) + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start>assistant<end>\n\n' }}{%- endif %}"""
"""Turns begin with headers, and what is inside them is trimmed."""

FORGETFUL = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + ('' if loop.last else '(earlier)') + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
"""Writes earlier turns of the model differently than the last one, groups tools' messages, and opens a thought."""

TEMPLATES = {"own": None, "headers": HEADERS, "forgetful": FORGETFUL, "harmony": HARMONY, "roles": ROLES}
SPECIAL = {HEADERS: ("<start>", "<end>"), HARMONY: HARMONY_TOKENS, ROLES: ROLES_TOKENS}


def tokenizer_of(template):
    """A tiny tokenizer with a chat template, or its own, and that one's special tokens."""
    tokenizer = build_tiny_tokenizer(TEXTS, 380)
    if template in SPECIAL:
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[template])})
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@ToolParser.register("exact_stage")
class EveryOther(ToolParser):
    """Many ids end a turn, so that an untrained model has some; a turn with a vowel in it calls."""

    @property
    def stop_token_ids(self):
        return tuple(range(10, 390, 9))

    def parse(self, text, tools=None):
        count = min(len(re.findall("[aeiou]", text)), 2)
        return ParsedResponse(text, [FunctionCall(name="say", arguments="{}")] * count, [])


class Say(BaseTool):
    """Says the next of `words`, over and over."""

    words: tuple[str, ...] = ("5",)

    def __init__(self):
        function = {"name": "say", "description": "", "parameters": {"type": "object", "properties": {}}}
        super().__init__({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))
        self.count = 0

    async def execute(self, instance_id, parameters, **kwargs):
        self.count += 1
        return self.words[self.count % len(self.words)], 0.0, {}


class Ask(BaseInteraction):
    """A user who says the same words, three times."""

    words = "And now?"

    async def generate_response(self, instance_id, messages, **kwargs):
        return sum(message["role"] == "assistant" for message in messages) > 3, self.words, 0.0, {}


def full_log_probs(model, trajectory, temperature):
    """Log-probs of the response's ids by one unpadded, uncached forward pass through eager attention."""
    ids = torch.tensor(trajectory.prompt_ids + trajectory.response_ids)
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[None]).logits[0].double() / temperature
    model.set_attn_implementation(attention)
    first = len(trajectory.prompt_ids)
    return torch.log_softmax(logits[first - 1 : -1], -1).gather(1, ids[first:, None])[:, 0]


class Policy:
    """The policy worker over a model with one of the templates; `asked` has what the engine was asked and gave."""

    def __init__(self, folder, template, **multi_turn):
        tokenizer = tokenizer_of(template)
        save_pretrained(build_tiny_model(SPEC, tokenizer), tokenizer, folder)
        self.tool, self.user = Say(), Ask({"name": "ask"})
        options = changed(
            TrainOptions(),
            model=ModelOptions(path=str(folder)),
            actor=ActorOptions(
                ppo_mini_batch_size=2, use_kl_loss=True, entropy_coeff=0.01, optim=OptimOptions(lr=1e-2)
            ),
            rollout=RolloutOptions(
                prompt_length=400,
                response_length=BUDGET,
                multi_turn=MultiTurnOptions(format="exact_stage", **multi_turn),
            ),
            reward_model=RewardOptions(enable=False),
        )
        self.group = InProcessWorkerGroup(ActorRolloutRefWorker, 1, options)
        self.worker = self.group._workers[0]
        self.worker.context = replace(self.worker.context, tools={"say": self.tool}, interactions={"ask": self.user})
        self.group.init_model()
        self.group.update_weights(0)
        self.tokenizer, self.model = self.worker.tokenizer, self.worker.model
        self.asked = defaultdict(list)
        self._watch(self.worker._manager.engine)

    def _watch(self, engine):
        generate = engine.generate

        async def witnessed(request_id, prompt_ids, sampling_params, **media):
            output = await generate(request_id, prompt_ids, sampling_params, **media)
            self.asked[request_id].append((list(prompt_ids), output))
            return output

        engine.generate = witnessed

    def roll_out(self, conversations, *, words=("5",), user_words="And now?", seed=1, n=2, temperature=1.0, top_k=-1):
        """(batch, trajectories) of each conversation's `n` answers."""
        self.tool.words, self.tool.count, self.user.words = tuple(words), 0, user_words
        self.asked.clear()
        manager = self.worker._manager
        self.worker.options = changed(
            self.worker.options,
            rollout=replace(self.worker.options.rollout, temperature=temperature, top_k=top_k),
        )
        rows = [
            {
                # names the tool, which most of these templates do not show
                "raw_prompt": [*messages[:-1], messages[-1] | {"content": f"{messages[-1]['content']} (say)"}],
                "extra_info": {},
                "uid": f"u{i}",
                "rollout_index": i * n + k,
                "tools_kwargs": {},
                "interaction_kwargs": {"name": "ask"},
                "reward_model": {},
                "data_source": "exact",
            }
            for i, messages in enumerate(conversations)
            for k in range(n)
        ]
        data = {}
        for name in rows[0]:
            data[name] = np.empty(len(rows), dtype=object)
            data[name][:] = [row[name] for row in rows]
        batch = DataProto.from_single_dict(data)
        batch.meta_info = {"seed": seed, "validate": False}
        batch = batch.union(self.group.generate_sequences(batch))
        assert manager.engine._rows == {}
        trajectories = [result.trajectory for result in batch.non_tensor_batch["rollout"]]
        assert all(trajectory is not None for trajectory in trajectories)
        batch.meta_info = {"temperature": temperature, "global_step": 0}
        return batch, trajectories

    def learnable(self, batch, seed=0):
        """The batch with what an update needs besides: made-up advantages, and log-probs of actor and reference."""
        mask = batch.batch["response_mask"]
        generator = torch.Generator().manual_seed(seed)
        batch.batch["advantages"] = torch.randn(mask.shape[0], 1, generator=generator) * mask
        batch.batch["old_log_probs"] = self.group.compute_log_prob(batch).batch["old_log_probs"]
        batch.batch["ref_log_prob"] = self.group.compute_ref_log_prob(batch).batch["ref_log_prob"]
        return batch
