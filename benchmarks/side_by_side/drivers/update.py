"""Log-probs of a batch and an optimizer step on it, vocabulary 32,000: packed against padded.

`etude` is `PolicyLearner`; `padded` pads rows on both sides and keeps all logits of the responses; `trl` is the same layout
through TRL's fused head. 32 sequences of 64 to 1,024 tokens, of which the first quarter is prompt; with `--group`, so many
sequences in a row share their prompt, as the answers to one question do. `etude` also runs with `--checkpointing` and with
adapters of rank `--lora`:

    PYTHONPATH=benchmarks:. python -m side_by_side.drivers.update etude --checkpointing --lora 16
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from side_by_side.meter import Meter, measured, peak_mib, report, resident_mib

VOCABULARY, MICRO = 32000, 8


def main() -> None:
    """Measures one contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=("etude", "padded", "trl"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch of Étude's")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    options = parser.parse_args()
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    rows = sequences(options.sequences, options.group)
    if options.lora:
        from etude.models.lora import add_adapters
        from etude.options.training import ModelOptions

        add_adapters(model, ModelOptions(lora_rank=options.lora))
    if options.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    before = resident_mib()
    build = {"etude": _etude, "padded": _padded, "trl": _trl}[options.contender]
    log_probs, update = build(model, rows, options.tokens) if build is _etude else build(model, rows)
    total = log_probs()
    readings = measured(log_probs, options.runs)
    after_log_probs = peak_mib() - before
    update()
    steps = []
    for _ in range(options.runs):
        meter = Meter()
        update()
        steps.append(meter.read())
    report(
        {
            "sum_log_probs": total,
            "log_probs_cpu": readings["cpu"],
            "log_probs_wall": readings["wall"],
            "update_cpu": statistics.median(step["cpu"] for step in steps),
            "update_wall": statistics.median(step["wall"] for step in steps),
            "log_probs_memory": after_log_probs,
            "memory": peak_mib() - before,
            "tokens": float(sum(len(prompt) + len(response) for prompt, response in rows)),
        }
    )


def sequences(count: int, group: int) -> list[tuple[Any, Any]]:
    """Returns (prompt ids, response ids) of every row; lengths are skewed: many short ones, few long ones."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = [min(1024, int(64 * 16 ** (((i + 0.5) / (count - 0.5)) ** 2))) for i in range(count)]
    order = torch.randperm(count, generator=generator).tolist()
    rows = []
    for place, number in enumerate(order):
        ids = torch.randint(5, VOCABULARY, (lengths[number],), generator=generator)
        prompt, response = ids[: len(ids) // 4], ids[len(ids) // 4 :]
        if place % group:
            prompt = rows[place - place % group][0]
        rows.append((prompt, response))
    return rows


Work = tuple[Callable[[], float], Callable[[], object]]


def _etude(model: Any, rows: list[tuple[Any, Any]], tokens: int) -> Work:
    import torch

    from etude.algorithms import policy_loss
    from etude.protocol import DataProto
    from etude.training import OptimizerSet, OptimOptions, PolicyLearner

    prompt_width, response_width = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    ids = torch.zeros(len(rows), prompt_width + response_width, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(rows), response_width, dtype=torch.long)
    for i, (prompt, response) in enumerate(rows):
        span = slice(prompt_width - len(prompt), prompt_width + len(response))
        ids[i, span], attention[i, span], mask[i, : len(response)] = torch.cat([prompt, response]), 1, 1
    batch = DataProto.from_single_dict({"input_ids": ids, "attention_mask": attention, "response_mask": mask})
    engine = PolicyLearner(model, max_tokens=tokens, optimizer=OptimizerSet(model, OptimOptions(lr=0.0), None))

    def log_probs() -> float:
        return float(engine.log_probs(batch, 1.0)[0].sum())

    def loss(values: Any, _: Any, micro: Any, scale: Any) -> Any:
        return policy_loss(
            "vanilla",
            old_log_prob=values.detach(),
            log_prob=values,
            advantages=torch.ones_like(values),
            response_mask=micro.batch["response_mask"],
            loss_agg_mode="token-mean",
            clip_ratio=0.2,
            batch_num_tokens=scale.batch_num_tokens,
            global_batch_size=scale.global_batch_size,
        )

    return log_probs, lambda: engine.update(batch, loss, 1.0)


def _padded(model: Any, rows: list[tuple[Any, Any]], fused: bool = False) -> Work:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    micros = [_micro(rows[i : i + MICRO]) for i in range(0, len(rows), MICRO)]
    scored = sum(len(response) for _, response in rows)

    def values(ids: Any, attention: Any, labels: Any, width: int) -> Any:
        if fused:
            output = model(input_ids=ids, attention_mask=attention, labels=labels, fused_lm_head=True)
            return output.log_probs[labels[:, 1:] != -100]
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=width + 1).logits[:, :-1]
        wanted = labels[:, -width:]
        chosen = logits.gather(-1, wanted.clamp(min=0)[..., None]).squeeze(-1)
        normaliser = torch.stack([row.logsumexp(dim=-1) for row in logits])
        return (chosen - normaliser)[wanted != -100]

    def log_probs() -> float:
        with torch.no_grad():
            return sum(float(values(*micro).sum()) for micro in micros)

    def update() -> None:
        for micro in micros:
            found = values(*micro)
            ratio = (found - found.detach()).exp()
            loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).sum() / scored
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return log_probs, update


def _trl(model: Any, rows: list[tuple[Any, Any]]) -> Work:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs",))
    return _padded(model, rows, fused=True)


def _micro(rows: list[tuple[Any, Any]]) -> tuple[Any, Any, Any, int]:
    """Pads prompts on the left and responses on the right; returns ids, attention mask, labels and the responses' width."""
    import torch

    prompt_width, width = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    ids = torch.zeros(len(rows), prompt_width + width, dtype=torch.long)
    attention, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (prompt, response) in enumerate(rows):
        end = prompt_width + len(response)
        ids[i, prompt_width - len(prompt) : end] = torch.cat([prompt, response])
        attention[i, prompt_width - len(prompt) : end] = 1
        labels[i, prompt_width:end] = response
    return ids, attention, labels, width


if __name__ == "__main__":
    main()
