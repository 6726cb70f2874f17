"""Records what verl's advantage estimators return: run by hand, in an environment that has verl 0.9.1.

    python tests/algorithms/record_verl_advantages.py > tests/algorithms/data/verl_advantages.json

Inputs and outputs go into the file, float64, so that the comparison needs no verl.
"""

import json
import sys
from importlib.metadata import version

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

UIDS = ["a", "b", "a", "c", "b", "a", "b", "alone"]


def inputs(seed, outcome, holes):
    """Rows of three groups and one alone; a step's rewards are on sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(UIDS), 9

    def draw(low=0.0, high=1.0):
        return (low + (high - low) * torch.rand(rows, width, generator=generator, dtype=torch.float64)).round(
            decimals=4
        )

    mask = (torch.rand(rows, width, generator=generator) < (0.7 if holes else 2)).long()
    mask[:, 0] = 1
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    mask[torch.arange(width) >= lengths[:, None]] = 0
    last = width - 1 - mask.flip(1).argmax(1)
    rewards = torch.zeros(rows, width, dtype=torch.float64) if outcome else draw(-0.5, 0.5) * mask
    rewards[torch.arange(rows), last] += torch.randn(rows, generator=generator, dtype=torch.float64).round(decimals=4)
    old_log_probs = draw(-3, -0.1)
    chosen = old_log_probs.exp()
    squares = (chosen.square() + draw() * (1 - chosen).square()).round(decimals=4)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": draw(-1, 1),
        "old_log_probs": old_log_probs,
        "sum_pi_squared": squares,
        "reward_baselines": draw()[:, 0],
        "format": (8 * draw()[:, 0]).round() / 8,  # verl computes these in float32
        "accuracy": (draw()[:, 0] > 0.5).double(),
    }


def cases():
    """(name, options, inputs, advantages, returns)."""
    for seed, (outcome, holes) in enumerate([(True, False), (False, True), (True, True)]):
        given = inputs(seed, outcome, holes)
        for name, function in core_algos.ADV_ESTIMATOR_REGISTRY.items():
            for options in ({"gamma": 0.9, "lam": 0.8}, {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": False}):
                yield name, options, given, call(name, function, given, options)


def call(name, function, given, options):
    rewards, mask, index = given["token_level_rewards"].clone(), given["response_mask"], np.array(UIDS, dtype=object)
    if name == "gae":
        return function(rewards, given["values"], mask, options["gamma"], options["lam"])
    config = AlgoConfig(
        gamma=options["gamma"],
        norm_adv_by_std_in_grpo=options.get("norm_adv_by_std_in_grpo", True),
        gdpo_reward_keys=["format", "accuracy"],
        gdpo_reward_weights=[1.0, 0.5],
    )
    more = {"norm_adv_by_std_in_grpo": options.get("norm_adv_by_std_in_grpo", True)} if "grpo" in name else {}
    keep = torch.ones(len(UIDS), dtype=torch.bool)
    if name == "grpo_passk":  # it refuses groups of one
        keep = torch.tensor([UIDS.count(uid) > 1 for uid in UIDS])
    if name == "gdpo":
        more["non_tensor_batch"] = {key: given[key].numpy() for key in ("format", "accuracy")}
        seen = torch.ones(len(UIDS), 1 + mask.shape[1], dtype=torch.long)
        more |= {"batch": {"prompts": torch.zeros(len(UIDS), 1), "attention_mask": seen}}
        more["norm_adv_by_std_in_grpo"] = options.get("norm_adv_by_std_in_grpo", True)
    for column in ("old_log_probs", "sum_pi_squared", "reward_baselines"):
        if "optimal" in name or (name == "remax" and column == "reward_baselines"):
            more[column] = given[column]
    index = index if name != "reinforce_plus_plus" else None
    found = torch.zeros(2, *mask.shape, dtype=torch.float64)
    results = function(
        token_level_rewards=rewards[keep],
        response_mask=mask[keep],
        **({} if index is None else {"index": index[keep.numpy()]}),
        **({} if "optimal" in name or "vectorized" in name else {"config": config}),
        **more,
    )
    for place, part in enumerate(results):
        found[place, keep] = part.double()
    return tuple(found)


def main():
    given, results = [], []
    for name, options, each, (advantages, returns) in cases():
        if not given or given[-1] is not each:
            given.append(each)
        values = [
            part.double().mul(given[-1]["response_mask"]).round(decimals=9).tolist() for part in (advantages, returns)
        ]
        results.append({"name": str(name), "options": options, "case": len(given) - 1, "returned": values})
    json.dump(
        {
            "made_by": "tests/algorithms/record_verl_advantages.py",
            "verl": version("verl"),
            "uids": UIDS,
            "cases": [{name: tensor.tolist() for name, tensor in each.items()} for each in given],
            "results": results,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
