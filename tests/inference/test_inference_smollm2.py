"""A pretrained model, SmolLM2-135M: greedy decoding is that of Transformers, and docs/engines.md tells how far bfloat16 is
from float32.

Skipped where `etude models get smollm2` was not run.
"""

import asyncio
import copy

import pytest
import torch

from etude.errors import ConfigError
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams
from etude.models import load_causal_lm, load_tokenizer
from etude.options.model_path import named_folder

QUESTIONS = ("What is 17 + 25?", "Name three colours.")


def sample(model, prompts, tokens, temperature, **options):
    engine = NativeEngine(model, NativeEngineOptions(**options))

    async def main():
        asked = (
            engine.generate(f"r{i}", prompt, SamplingParams(temperature=temperature, max_tokens=tokens, seed=i))
            for i, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*asked)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def smollm2():
    try:
        folder = named_folder("smollm2", downloaded=True)
    except ConfigError as error:
        pytest.skip(str(error))
    tokenizer = load_tokenizer(folder)
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]
    return load_causal_lm(folder), [list(prompt) for prompt in prompts]


def test_greedy_equals_generate(smollm2):
    model, prompts = smollm2
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    for prompt, out in zip(prompts, sample(model, prompts, 24, 0.0)):
        ids = torch.tensor([prompt])
        made = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=None
        )
        assert out.token_ids == made[0, len(prompt) :].tolist()


def test_sampling_in_bfloat16_is_this_far_from_a_float32_trainer(smollm2):
    model, prompts = smollm2
    errors, trainer = [], copy.deepcopy(model)
    trainer.set_attn_implementation("sdpa")
    for prompt, out in zip(prompts * 4, sample(model, prompts * 4, 32, 1.0, dtype="bfloat16")):
        with torch.no_grad():
            logits = trainer(input_ids=torch.tensor([prompt + out.token_ids]), use_cache=False).logits[0]
        found = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        errors.append(found - torch.tensor(out.log_probs))
    error = torch.cat(errors)
    print(f"mean {error.abs().mean():.3f}, largest {error.abs().max():.2f} nats, mean ratio {error.exp().mean():.4f}")
    assert error.abs().mean() < 0.07
    assert error.abs().max() < 0.6
