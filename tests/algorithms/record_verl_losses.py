"""Records what verl 0.9.1's policy losses, KL penalties, value loss and top-k distillation loss make of fixed inputs:
values, gradients, metrics.

    <python with verl 0.9.1> tests/algorithms/record_verl_losses.py

writes tests/algorithms/data/verl_losses.json, which test_algorithms_policy_losses.py and test_algorithms_distillation.py
compare with. Everything is float64 but the distillation loss, which computes in float32.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch

ROWS, WIDTH = 5, 7
CASES = [  # (loss, aggregation, what the configuration sets)
    ("vanilla", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}),
    ("vanilla", "token-sum", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 3.0}),
    ("vanilla", "seq-mean-token-sum", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}),
    ("vanilla", "seq-mean-token-sum-norm", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}),
    ("vanilla", "seq-mean-token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}),
    ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    ("gspo", "token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    ("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("sapo", "seq-mean-token-mean", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("geo_mean", "seq-mean-token-mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    ("cispo", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}),
    ("cispo", "token-mean", {"clip_ratio_low": 10.0, "clip_ratio_high": 0.2}),
    ("dppo_tv", "token-mean", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.3}),
    ("dppo_kl", "token-mean", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.02, "clip_ratio_c": 1.3}),
    ("gpg", "token-mean", {}),
    ("dro", "token-mean", {"policy_loss": {"dro_beta": 0.7}}),
    ("kl_cov", "token-mean", {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}}),
    (
        "clip_cov",
        "token-mean",
        {
            "clip_ratio_low": 50.0,
            "clip_ratio_high": 50.0,
            "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 0.9},
        },
    ),
    ("reinforce", "seq-mean-token-sum", {}),
]


def inputs() -> dict[str, torch.Tensor]:
    """Numbers that no random generator makes: (rows, width) each, with holes in the mask. No row is all masked, since verl's
    geo_mean counts it; one advantage a row, since its product is over one sign."""
    place = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    old = -0.1 - 2 * torch.sin(1.7 * place + 0.3) ** 2
    log_prob = (old + 0.6 * torch.sin(2.3 * place + 1.1)).clamp(max=-0.01)
    advantages = torch.cos(1.3 * torch.arange(ROWS, dtype=torch.float64) + 0.4)[:, None].expand(ROWS, WIDTH).clone()
    mask = (torch.sin(3.1 * place) > -0.6).long()
    mask[:, 0] = 1
    weights = 1 + 0.4 * torch.cos(0.9 * place)
    return {
        "old_log_prob": old,
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": mask,
        "weights": weights,
    }


def record() -> list[dict]:
    from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce, get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    found = []
    for name, mode, given in CASES:
        for weighted in (False, True):
            case = inputs()
            weights = case.pop("weights") if weighted else None
            case.pop("weights", None)
            case["log_prob"].requires_grad_()
            options = dict(given)
            policy_loss = PolicyLossConfig(loss_mode="vanilla", **options.pop("policy_loss", {}))
            config = ActorConfig(
                strategy="fsdp",
                rollout_n=1,
                ppo_mini_batch_size=4,
                ppo_micro_batch_size_per_gpu=4,
                policy_loss=policy_loss,
                **options,
            )
            if name == "reinforce":
                case["rollout_log_prob"] = case.pop("old_log_prob")
            function = compute_policy_loss_reinforce if name == "reinforce" else get_policy_loss_fn(name)
            loss, metrics = function(**case, loss_agg_mode=mode, config=config, rollout_is_weights=weights)
            (gradient,) = torch.autograd.grad(loss, case["log_prob"])
            assert math.isfinite(loss.item())
            found.append(
                {
                    "loss": name,
                    "mode": mode,
                    "options": given,
                    "weighted": weighted,
                    "value": loss.item(),
                    "gradient": gradient.tolist(),
                    "metrics": {key: float(value) for key, value in metrics.items()},
                }
            )
    return found


def record_kl() -> list[dict]:
    from verl.trainer.ppo.core_algos import kl_penalty

    found = []
    for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k3+"):
        case = inputs()
        log_prob = case["log_prob"].requires_grad_()
        value = kl_penalty(log_prob, case["old_log_prob"], kind)
        (gradient,) = torch.autograd.grad(value.sum(), log_prob)
        found.append({"kind": kind, "value": value.tolist(), "gradient": gradient.tolist()})
    return found


def record_values() -> list[dict]:
    from verl.trainer.ppo.core_algos import compute_value_loss

    found = []
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        case = inputs()
        vpreds = case["log_prob"].requires_grad_()
        columns = {"values": case["old_log_prob"], "returns": case["weights"], "response_mask": case["response_mask"]}
        loss, clipped = compute_value_loss(vpreds, **columns, cliprange_value=0.3, loss_agg_mode=mode)
        (gradient,) = torch.autograd.grad(loss, vpreds)
        found.append({"mode": mode, "value": loss.item(), "gradient": gradient.tolist(), "clipped": clipped.item()})
    return found


def record_coefficients() -> list[float]:
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    controller, found = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.5, horizon=1000), []
    for current in (0.55, 50.0, 0.0, 0.5):
        controller.update(current, 100)
        found.append(controller.value)
    return found


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, vocabulary) log-probs of a teacher and of a policy near it."""
    place = torch.arange(6 * 11, dtype=torch.float64).view(6, 11)
    teacher, policy = 3 * torch.sin(1.9 * place), 3 * torch.sin(1.9 * place) + torch.cos(2.7 * place)
    return teacher.log_softmax(dim=-1), policy.log_softmax(dim=-1)


def record_distillation() -> dict:
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

    teacher, policy = distributions()
    log_probs, ids = teacher.topk(4, dim=-1)
    logits = policy[None].float().requires_grad_()
    nested = [torch.nested.nested_tensor([each], layout=torch.jagged) for each in (log_probs.float(), ids)]
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))
    found = compute_forward_kl_topk(logits, *nested, config, "thd")
    (gradient,) = torch.autograd.grad(found["distillation_losses"].sum(), logits)
    names = ("distillation_losses", "student_mass", "teacher_mass")
    return {name: found[name][0].tolist() for name in names} | {"gradient": gradient[0].tolist()}


if __name__ == "__main__":
    import verl

    recorded = {"made by": "tests/algorithms/record_verl_losses.py", "verl": verl.__version__, "cases": record()}
    recorded |= {"kl": record_kl(), "value loss": record_values(), "adaptive kl": record_coefficients()}
    recorded["distillation"] = record_distillation()
    path = Path(__file__).parent / "data" / "verl_losses.json"
    path.write_text(json.dumps(recorded, indent=None, separators=(",", ":")).replace('{"loss"', '\n{"loss"') + "\n")
