"""Records what TRL's DPOTrainer makes of a frozen batch, for test_workers_preference.py: the loss and the gradient's norms.

Run by hand in an environment with TRL: python tests/workers/record_trl_dpo.py
"""

import json
import math
import tempfile
from pathlib import Path

CONFIG = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
PAIRS = [  # prompt, chosen and rejected completion, as ids
    ([3, 4, 5], [6, 7, 8, 9], [6, 10, 2]),
    ([11, 12], [13], [14, 15, 16, 17, 18]),
    ([3, 19, 20, 5], [21, 22], [21, 23]),
]
BETA = 0.3


def fill(model, phase):
    """Weights by formula, so that nothing need be stored: 0.4 sin(0.7 i + number + phase) of the i-th weight of each
    parameter; norms are 1 more."""
    import torch

    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            values = [0.4 * math.sin(0.7 * i + number + phase) for i in range(parameter.numel())]
            parameter.copy_(torch.tensor(values, dtype=torch.float64).view_as(parameter) + ("norm" in name))
    return model


def main():
    import torch
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import DPOConfig, DPOTrainer

    words = Tokenizer(models.WordLevel({f"x{n:02d}": n for n in range(CONFIG["vocab_size"])}, unk_token="x00"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="x00", eos_token="x01", unk_token="x00")
    policy, reference = (fill(Qwen3ForCausalLM(Qwen3Config(**CONFIG)), phase) for phase in (0.0, 0.5))
    text = [[" ".join(f"x{n:02d}" for n in part) for part in pair] for pair in PAIRS]
    rows = Dataset.from_list([{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in text])
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            folder, beta=BETA, per_device_train_batch_size=len(PAIRS), report_to=[], use_cpu=True, bf16=False,
            gradient_checkpointing=False, seed=1,
        )  # fmt: skip
        trainer = DPOTrainer(policy, reference, config, train_dataset=rows, processing_class=tokenizer)
        inputs = next(iter(trainer.get_train_dataloader()))
        policy.train()
        loss = trainer.compute_loss(policy, inputs)
        loss.backward()
    masked = [ids[attention.bool()].tolist() for ids, attention in zip(inputs["input_ids"], inputs["attention_mask"])]
    completions = [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["completion_mask"])]
    made = {
        "recorded by": "tests/workers/record_trl_dpo.py",
        "versions": {"trl": trl.__version__, "torch": torch.__version__},
        "sequences": masked,  # the chosen ones first, in TRL's order
        "completions": completions,
        "beta": BETA,
        "loss": float(loss.detach()),
        "margin": trainer._metrics["train"]["rewards/margins"][0],
        "gradient_norms": {n: float(p.grad.norm()) for n, p in sorted(policy.named_parameters())},
    }
    (Path(__file__).parent / "data" / "trl_dpo.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
