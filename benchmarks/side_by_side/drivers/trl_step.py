"""TRL's `GRPOTrainer`: the same training steps, with Transformers' generation and one asynchronous tool."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import task
from side_by_side.meter import Meter, peak_mib, report, resident_mib


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--system")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted, unless it is the only one")
    parser.add_argument("--micro", type=int, default=64, help="trajectories a micro-batch")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, of 8 answers each")
    parser.add_argument("--turn-tokens", type=int, default=96)
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="median latency of a tool call")
    parser.add_argument("--tool-failures", type=float, default=0.0, help="share of calls that fail")
    parser.add_argument("--rollout-only", action="store_true", help="generate and score, train nothing")
    parser.add_argument("--endless", type=int, default=0, help="one turn of so many tokens instead of the task's turns")
    return parser.parse_args()


def main() -> None:
    """Runs the steps; the first one warms up caches and is not counted."""
    options = arguments()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    tokenizer.response_template = qwen3_template  # how TRL reads tool calls; it knows templates by their exact text
    system = task.system_prompt(options.checkpoint, options.system)
    rows = [{"prompt": task.prompt(question, system), "answer": question.answer} for question in task.questions(512, 7)]
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint)
    before = resident_mib()
    parts: list[dict[str, float]] = []

    class Trainer(GRPOTrainer):
        """Measures the rollout and keeps its output."""

        def _generate(self, prompts: Any) -> Any:
            meter = Meter()
            made = super()._generate(prompts)
            self.rollout, self.made = meter.read(), made
            return made

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.step_meter is None:
                self.step_meter = Meter()
            return super().training_step(*args, **kwargs)

        step_meter: Meter | None = None

    class Measure(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step, trainer.step_meter = trainer.step_meter.read(), None
            parts.append(_figures(trainer.rollout, step, trainer.made))

    size = 8 * options.prompts
    latency = task.Latency(options.tool_seconds, failures=options.tool_failures)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=min(options.micro, size),
            gradient_accumulation_steps=max(1, size // options.micro),
            num_generations=8,
            max_completion_length=max(512, options.endless),
            max_tool_calling_iterations=2,
            generation_kwargs=_lengths(options),
            temperature=1.0,
            learning_rate=1e-5,
            max_steps=options.steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            shuffle_dataset=False,
        )
        trainer = Trainer(
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            reward_funcs=_reward,
            tools=None if options.endless else [_tool(latency)],
            callbacks=[Measure()],
        )
        if options.rollout_only:
            batches = iter(trainer.get_train_dataloader())
            for _ in range(options.steps):
                trainer._generate_and_score_completions(next(batches))
                parts.append(_figures(trainer.rollout, None, trainer.made))
        else:
            trainer.train()
    medians = {name: statistics.median(part[name] for part in parts[1:] or parts) for name in parts[0]}
    report({**medians, "memory": peak_mib() - before})


def _lengths(options: argparse.Namespace) -> dict[str, int]:
    if options.endless:
        return {"max_new_tokens": options.endless, "min_new_tokens": options.endless}
    return {"max_new_tokens": options.turn_tokens}


def _tool(latency: task.Latency) -> Any:
    async def calculator(expression: str):  # type: ignore[no-untyped-def]
        """Evaluate one arithmetic expression.

        Args:
            expression: An expression such as "12 + 7".
        """
        seconds, fails = latency.draw(expression)
        if seconds:
            await asyncio.sleep(seconds)
        if fails:
            raise RuntimeError("the calculator is busy: try again")
        return task.calculate(expression)

    return calculator


def _reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [
        task.score(messages[-1].get("content") or "", any(m["role"] == "tool" for m in messages), expected)
        for messages, expected in zip(completions, answer)
    ]


def _figures(rollout: dict[str, float], step: dict[str, float] | None, made: Any) -> dict[str, float]:
    prompts, completions, masks, conversations = made[:4]
    roles = [message["role"] for conversation in conversations for message in conversation]
    figures = {f"rollout_{kind}": seconds for kind, seconds in rollout.items()}
    if step is not None:
        figures |= {f"step_{kind}": seconds for kind, seconds in step.items()}
        figures |= {f"update_{kind}": step[kind] - rollout[kind] for kind in step}
    return figures | {
        "sampled_tokens": float(sum(map(len, completions) if masks is None else map(sum, masks))),  # None without tools
        "context_tokens": float(sum(map(len, prompts)) + sum(map(len, completions))),
        "tool_calls": float(roles.count("tool")),
        "turns": float(roles.count("assistant")),
    }


if __name__ == "__main__":
    main()
