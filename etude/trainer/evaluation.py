"""What an evaluation says: figures over all prompts and by data source, each prompt counted once.

Invariant: samples of one prompt are averaged before prompts are, and intervals count prompts; a trajectory that
infrastructure broke is in no figure, and is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from etude.options import RewardOptions
from etude.protocol import DataProto
from etude.trainer.metrics import is_success, prompt_mean
from etude.trainer.rollouts import rollouts_of
from etude.trajectory import Trajectory

Pair = tuple[str, Trajectory | None]  # (uid of the prompt, what came of one sample)


def evaluation_figures(batch: DataProto, options: RewardOptions) -> dict[str, Any]:
    """`prompts`, `samples`, `dropped`, `success` and `tool_use` with `…_low` and `…_high`, `reward`; and under `sources` the
    same of each data source. A source all of whose samples were dropped has counts alone."""
    pairs = [(str(uid), r.trajectory) for uid, r in zip(batch.non_tensor_batch["uid"].tolist(), rollouts_of(batch))]
    sources: dict[str, list[Pair]] = defaultdict(list)
    for source, pair in zip(batch.non_tensor_batch["data_source"].tolist(), pairs):
        sources[str(source)].append(pair)
    each = {source: _figures(own, options) for source, own in sorted(sources.items())}
    return _figures(pairs, options) | {"sources": each}


def _figures(pairs: Sequence[Pair], options: RewardOptions) -> dict[str, Any]:
    weights = (options.tool_reward_weight, options.score_weight)
    prompts: dict[str, list[Trajectory]] = defaultdict(list)
    for uid, trajectory in pairs:
        if trajectory is not None:
            prompts[uid].append(trajectory)
    kept = sum(map(len, prompts.values()))
    figures: dict[str, Any] = {"prompts": len(prompts), "samples": kept, "dropped": len(pairs) - kept}
    if not prompts:
        return figures
    values = {
        "success": [[float(is_success(t.rewards, *weights)) for t in own] for own in prompts.values()],
        "tool_use": [
            [float(any(call.error is None for call in t.tool_calls)) for t in own] for own in prompts.values()
        ],
    }
    for name, by_prompt in values.items():
        figures[name], figures[f"{name}_low"], figures[f"{name}_high"] = prompt_mean(by_prompt)
    figures["reward"] = prompt_mean([[t.rewards.total(*weights) for t in own] for own in prompts.values()])[0]
    return figures
