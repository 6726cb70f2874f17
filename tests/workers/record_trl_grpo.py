"""Records what TRL 1.16's GRPOTrainer makes of a frozen batch and a tiny model: losses and gradients of its weights.

    <python with trl 1.16> tests/workers/record_trl_grpo.py

writes tests/workers/data/trl_grpo.json, which test_workers_trl.py compares with. The arithmetic is float64, but for what
Transformers does in float32 whatever it is given (rotary angles).
"""

import json
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import rms_norm
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

VOCABULARY, ROWS, PROMPT, WIDTH = 17, 4, 4, 6
PROMPT_LENGTHS, LENGTHS = [4, 4, 3, 2], [6, 3, 5, 6]
HOLES = [(0, 2), (0, 3), (2, 1)]  # (row, column) of tokens that a tool wrote
ADVANTAGES = [1.1, -0.7, 0.4, -0.9]
# name → what GRPOConfig is given
CASES = {
    "grpo": {"loss_type": "grpo"},
    "dapo, clip-higher": {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo", "epsilon": 0.05},
    "grpo with a reference": {"loss_type": "grpo", "beta": 0.3},
    "dapo with a reference, clip-higher": {"loss_type": "dapo", "epsilon_high": 0.4, "beta": 0.04},
    "dr_grpo with a reference": {"loss_type": "dr_grpo", "beta": 0.04, "epsilon": 0.05},
    "two-sided": {"loss_type": "dapo", "epsilon": 0.1, "delta": 1.15},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}


def norm_in_float64(self, hidden):
    return rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)


def model() -> Qwen3ForCausalLM:
    """In float64, with weights that no random generator makes."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    made = Qwen3ForCausalLM(config).double()
    with torch.no_grad():
        for number, (name, weight) in enumerate(sorted(made.named_parameters())):
            place = torch.arange(weight.numel(), dtype=torch.float64)
            waves = 0.6 * torch.sin(2.1 * place + number)
            weight.copy_((1 + 0.2 * waves if "norm" in name else waves).view_as(weight))
    return made


def batch() -> dict[str, torch.Tensor]:
    """Ids, masks and log-probs of the four answers; prompts are padded on the left, answers on the right."""
    place = torch.arange(ROWS * (PROMPT + WIDTH)).view(ROWS, -1)
    ids = 1 + (place * place + 3 * place) % (VOCABULARY - 1)
    columns = torch.arange(WIDTH)
    answer = torch.stack([columns < length for length in LENGTHS]).long()
    tools = torch.ones(ROWS, WIDTH, dtype=torch.long)
    for row, column in HOLES:
        tools[row, column] = 0
    prompt = torch.stack([torch.arange(PROMPT) >= PROMPT - length for length in PROMPT_LENGTHS]).long()
    wave = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    return {
        "prompt_ids": ids[:, :PROMPT] * prompt,
        "prompt_mask": prompt,
        "completion_ids": ids[:, PROMPT:] * answer,
        "completion_mask": answer,
        "tool_mask": tools,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_shift": 0.25 * torch.sin(1.9 * wave),  # added to the model's own log-probs
        "ref_shift": 0.5 * torch.cos(2.7 * wave),
    }


def log_probs(policy, columns) -> torch.Tensor:
    """(rows, width) of the answers, a row at a time and without padding."""
    found = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, (before, length) in enumerate(zip(PROMPT_LENGTHS, LENGTHS)):
        prompt, answer = columns["prompt_ids"][row, PROMPT - before :], columns["completion_ids"][row, :length]
        logits = policy(input_ids=torch.cat([prompt, answer])[None]).logits[0, before - 1 : -1]
        found[row, :length] = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
    return found


def trainer(folder, given):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    options = {"epsilon": 0.2, "max_completion_length": WIDTH, "use_bias_correction_kl": False} | given
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        **options,
    )
    data = Dataset.from_list([{"prompt": "2"}] * ROWS)
    return GRPOTrainer(
        model(), reward_funcs=lambda **_: [0.0] * ROWS, args=config, train_dataset=data, processing_class=tokenizer
    )


def record(folder) -> list[dict]:
    found = []
    for name, given in CASES.items():
        made, columns = trainer(folder, {key: value for key, value in given.items() if key != "beta"}), batch()
        made.beta = given.get("beta", 0.0)  # set here, so that no reference model is loaded: its log-probs are given
        made.model.train()
        made.current_gradient_accumulation_steps = 1
        with torch.no_grad():
            current = log_probs(made.model, columns)
        inputs = {key: columns[key] for key in columns if not key.endswith("_shift")}
        inputs["old_per_token_logps"] = current + columns["old_shift"]
        inputs["ref_per_token_logps"] = current + columns["ref_shift"]
        inputs["num_items_in_batch"] = (columns["completion_mask"] * columns["tool_mask"]).sum()
        loss = made._compute_loss(made.model, inputs)
        loss.backward()
        gradients = {
            key: [float(f"{x:.9g}") for x in weight.grad.flatten().tolist()]
            for key, weight in sorted(made.model.named_parameters())
        }
        found.append({"name": name, "given": given, "loss": loss.item(), "gradients": gradients})
    return found


if __name__ == "__main__":
    import trl

    modeling_qwen3.Qwen3RMSNorm.forward = norm_in_float64
    with tempfile.TemporaryDirectory() as folder:
        recorded = {"made by": "tests/workers/record_trl_grpo.py", "trl": trl.__version__, "cases": record(folder)}
    path = Path(__file__).parent / "data" / "trl_grpo.json"
    path.write_text(json.dumps(recorded, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")
