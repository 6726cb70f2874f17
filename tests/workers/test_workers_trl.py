"""An update of the actor against TRL 1.16's GRPOTrainer, on the frozen trajectories of `record_trl_grpo.py`."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from batches_stage import update_batches
from record_trl_grpo import PROMPT, WIDTH, batch, log_probs, model, norm_in_float64
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from etude.metrics import add_metrics, finish_metrics
from etude.options import ActorOptions, OptimOptions, RolloutCorrectionOptions
from etude.options.training import PolicyLossOptions
from etude.protocol import DataProto, object_array
from etude.training import OptimizerSet, PolicyLearner
from etude.workers import TrainWorker

TRL = json.loads((Path(__file__).parent / "data" / "trl_grpo.json").read_text())
AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def options_of(given):
    """TRL's configuration as ours."""
    kind, low = given["loss_type"], given.get("epsilon", 0.2)
    bounds = {"clip_ratio_low": low, "clip_ratio_high": given.get("epsilon_high", low)}
    loss, mode = "vanilla", AGGREGATION.get(kind)
    if kind in ("cispo", "sapo", "vespo"):  # as they are by default
        loss, bounds = kind, {}
    elif given.get("importance_sampling_level") == "sequence":
        loss, mode = {"grpo": "gspo", "luspo": "luspo"}[kind], None
    if "delta" in given:
        bounds["clip_ratio_c"] = given["delta"]
    beta = given.get("beta", 0.0)
    return ActorOptions(
        policy_loss=PolicyLossOptions(loss_mode=loss),
        loss_agg_mode=mode,
        use_kl_loss=beta > 0,
        kl_loss_coef=beta,
        kl_loss_type="k3",
        ppo_max_token_len_per_gpu=12,  # several micro-batches
        **bounds,
    )


class Recorder(OptimizerSet):
    """Keeps the gradients, and changes no weight."""

    def step(self):
        self.gradients = [p.grad.clone() for p in self._parameters]
        return 0.0


@pytest.mark.parametrize("recorded", TRL["cases"], ids=lambda recorded: recorded["name"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradients_are_trls(recorded, ranks):
    options, columns = options_of(recorded["given"]), batch()
    worker = object.__new__(TrainWorker)  # not set up: it gets its options and model here
    lengths, correction = SimpleNamespace(response_length=WIDTH), RolloutCorrectionOptions()
    worker.options = SimpleNamespace(
        actor=options, rollout=lengths, algorithm=SimpleNamespace(rollout_correction=correction)
    )
    with mock.patch.object(Qwen3RMSNorm, "forward", norm_in_float64):
        policy = worker.model = model()
        with torch.no_grad():
            current = log_probs(policy, columns)
        mask = columns["completion_mask"] * columns["tool_mask"]
        data = DataProto.from_single_dict(
            {
                "input_ids": torch.cat([columns["prompt_ids"], columns["completion_ids"]], dim=1),
                "attention_mask": torch.cat([columns["prompt_mask"], columns["completion_mask"]], dim=1),
                "response_mask": mask,
                "advantages": columns["advantages"][:, None] * mask,
                "old_log_probs": current + columns["old_shift"],
                "rollout_log_probs": current,
                "ref_log_prob": current + columns["ref_shift"],
                "uid": object_array(["one prompt"] * len(mask)),
            },
            meta_info={"global_step": 0},
        )
        assert data.batch["input_ids"].shape[1] == PROMPT + WIDTH
        (parts,) = update_batches(data, options, shuffle=False, seed=0, ranks=ranks)
        figures, gradients = [], []
        for part in parts:
            optimizer = Recorder(policy, OptimOptions(), None)
            engine = PolicyLearner(policy, max_tokens=options.ppo_max_token_len_per_gpu, optimizer=optimizer)
            figures.append(engine.update(part, worker._loss, 1.0, False, options.aggregation))
            gradients.append(optimizer.gradients)
    assert finish_metrics(add_metrics(figures))["loss"] == pytest.approx(recorded["loss"], rel=1e-6, abs=1e-7)
    names = [name for name, _ in policy.named_parameters()]
    for name, *of_ranks in zip(names, *gradients, strict=True):
        theirs = torch.tensor(recorded["gradients"][name], dtype=torch.float64)
        torch.testing.assert_close(sum(of_ranks).flatten(), theirs, rtol=1e-6, atol=1e-7)
