"""Builds an Étude trainer for the task from a configuration, as `etude train` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from side_by_side import task

AGENT = Path(__file__).with_name("agent.py")
latency = task.Latency()  # of the calculator in `agent.py`; a driver may replace it at any time


def rows(count: int, seed: int, system: str, agent: str = "capped_tool_agent") -> list[dict[str, Any]]:
    """Makes rows of the task, in the format of Étude's data files."""
    return [
        {
            "data_source": "benchmark",
            "prompt": task.prompt(question, system),
            "ability": "arithmetic",
            "agent_name": agent,
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"index": number, "split": "train"},
        }
        for number, question in enumerate(task.questions(count, seed))
    ]


def configuration(
    folder: Path,
    checkpoint: Path,
    system: str,
    *,
    threads: int = 1,
    prompts: int = 8,
    agent: str = "capped_tool_agent",
    overrides: Sequence[str] = (),
) -> Any:
    """Returns the resolved configuration of a GRPO run over 512 rows in `folder`: `prompts` × 8 responses per step, 3
    assistant turns, one optimizer step per batch."""
    from etude.config import compose
    from etude.data import write_parquet

    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(rows(512, 7, system, agent), folder / "train.parquet")
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    return compose(
        "grpo_trainer",
        [
            f"plugins=[{AGENT}]",
            f"data.train_files={folder}/train.parquet",
            f"data.train_batch_size={prompts}",
            "data.max_prompt_length=512",
            "data.max_response_length=512",
            "data.shuffle=false",
            f"actor_rollout_ref.model.path={checkpoint}",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            "actor_rollout_ref.rollout.n=8",
            f"{multi_turn}.function_tool_path={AGENT}",
            f"{multi_turn}.max_assistant_turns=3",
            f"custom_reward_function.path={AGENT}",
            "trainer.logger=[]",
            "trainer.report=false",
            "trainer.save_freq=-1",
            f"trainer.num_threads={threads}",
            f"trainer.default_local_dir={folder}/run",
            *overrides,
        ],
    )


def built(config: Any) -> Any:
    """Builds the `PPOTrainer` of a configuration, with its models loaded."""
    from etude.trainer.ppo import PPOTrainer
    from etude.trainer.setup import prepare

    trainer = PPOTrainer(*prepare(config))
    trainer.init_workers()
    return trainer
