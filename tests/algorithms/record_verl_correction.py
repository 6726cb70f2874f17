"""Records what verl's rollout correction makes of a few batches, for `test_algorithms_correction.py`. Run by hand, in an
environment with verl 0.9.1:  python tests/algorithms/record_verl_correction.py"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from verl.trainer.ppo import rollout_corr_helper as helper

WEIGHTS = [
    ("token", 2.0, False),
    ("token", 1.1, True),
    ("token", "0.5_1.5", False),
    ("token", "0.8_5.0", True),
    ("sequence", 2.0, False),
    ("sequence", 1.2, True),
    ("sequence", "0.3_3.0", False),
    ("sequence", "0.9_2.0", True),
]
CRITERIA = [
    ("token_k1", "0.6_1.5"),
    ("token_k1", 1.3),
    ("token_k2", 0.1),
    ("token_k3", 0.05),
    ("seq_sum_k1", "0.5_2.0"),
    ("seq_sum_k2", 0.3),
    ("seq_sum_k3", 0.4),
    ("seq_mean_k1", "0.9_1.1"),
    ("seq_mean_k2", 0.06),
    ("seq_mean_k3", 0.05),
    ("seq_max_k2", 0.4),
    ("seq_max_k3", 0.3),
    ("token_k1,seq_max_k3", "0.6_1.5,0.9"),
]


def batch(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(6, 8, generator=generator) < 0.7).double()
    mask[:, 0] = 1.0  # verl averages over rows of padding, too
    rollout = -torch.rand(6, 8, generator=generator).double() * 3
    old = rollout + scale * torch.randn(6, 8, generator=generator).double()
    return old.mul(1e6).round() / 1e6, rollout.mul(1e6).round() / 1e6, mask


def main():
    cases = []
    for seed, scale in ((0, 0.1), (1, 0.4), (2, 1.5)):
        old, rollout, mask = batch(seed, scale)
        case = {"old": old.tolist(), "rollout": rollout.tolist(), "mask": mask.int().tolist()}
        case["measured"] = helper.compute_offpolicy_metrics(old, rollout, mask)
        case["weights"] = []
        for level, threshold, normalize in WEIGHTS:
            try:
                weights, metrics = helper.compute_rollout_correction_weights(
                    old - rollout, mask, level, threshold, normalize
                )
            except ZeroDivisionError:  # where all weights are 0
                continue
            case["weights"].append([level, threshold, normalize, weights.tolist(), metrics])
        case["rejected"] = []
        for names, thresholds in CRITERIA:
            kept, metrics = helper.compute_rollout_rejection_mask(old - rollout, mask, names, thresholds)
            case["rejected"].append([names, thresholds, kept.int().tolist(), metrics])
        cases.append(case)
    made = {
        "verl": version("verl"),
        "recorded_by": "tests/algorithms/record_verl_correction.py",
        "cases": cases,
    }
    text = json.dumps(json.loads(json.dumps(made), parse_float=lambda digits: round(float(digits), 9)))
    (Path(__file__).parent / "data" / "verl_correction.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
