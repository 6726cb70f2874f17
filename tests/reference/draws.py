"""What the comparison of the two trainers draws: configurations away from their defaults, and shapes of batches."""

import random
from dataclasses import replace

from reference_stage import Shape

from etude.plain.losses import BOUNDS, LOSSES, OWN

AGGREGATIONS = ["token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
REJECTION = [
    "[seq_sum_k1]",
    "[token_k1]",
    "[seq_mean_k1,token_k3]",
    "[token_k2]",
    "[seq_max_k2,seq_sum_k3]",
    "[seq_max_k3]",
]
LOSS = f"{ACTOR}.policy_loss"


def _optimizer(section):
    return {
        f"{section}.name": ["muon", "adamw_schedule_free"],
        f"{section}.lr": [1e-2],
        f"{section}.betas": ["[0.8,0.95]"],
        f"{section}.weight_decay": [0.3],
        f"{section}.muon_lr_multiplier": [2.0],
        f"{section}.lr_warmup_steps": [2, 3],
        f"{section}.lr_scheduler_type": ["linear", "cosine"],
        f"{section}.lr_decay_ratio": [0.5],
        f"{section}.min_lr_ratio": [0.2],
        f"{section}.clip_grad": [0.05, 50.0],
    }


ESTIMATORS = {  # beside gae and grpo: their own options
    "grpo_passk": "",
    "rloo": "",
    "opo": "",
    "gpg": "f_norm:2.0",
    "max_rl": "",
    "rae": "decay:0.8",
    "hierarchical_grpo": "",
    "reinforce_plus_plus": "",
    "reinforce_plus_plus_baseline": "",
    "remax": "",
    "gdpo": "",
    "optimal_token_baseline": "",
    "tir_optimal_token_baseline": "handle_zero_tail:false",
    "turn_grpo": "step_advantage_w:0.5",
    "gigpo": "",
}
TIES_TEACH = (None, "rae", "hierarchical_grpo", "reinforce_plus_plus", "remax", "gdpo", "turn_grpo", "gigpo")

# Values beside the default (of the configuration, or of the stage where that sets the key).
CHOICES = {
    "algorithm.adv_estimator": ["grpo", *ESTIMATORS],
    "algorithm.gae_timestep_unit": ["turn"],
    "algorithm.singleton_advantage": ["raw"],
    "algorithm.zero_variance": ["mask", "refill", "keep"],
    "algorithm.gdpo_reward_keys": ["[step,score]", "[final,step]"],
    "algorithm.gdpo_reward_weights": ["[1.0,0.25]"],
    "algorithm.gamma": [0.9],
    "algorithm.lam": [0.8],
    "algorithm.norm_adv_by_std_in_grpo": ["false"],
    "algorithm.use_kl_in_reward": ["true"],
    "algorithm.kl_penalty": ["abs", "mse", "k3", "k1", "k2", "low_var_kl", "k3+"],
    "algorithm.kl_ctrl.type": ["adaptive"],
    "algorithm.kl_ctrl.kl_coef": [0.3],
    "algorithm.kl_ctrl.horizon": [20],
    "algorithm.kl_ctrl.target_kl": [5.0, 0.01],
    "algorithm.filter_groups.enable": ["true"],
    "algorithm.filter_groups.metric": ["score"],
    "algorithm.filter_groups.max_num_gen_batches": [3],
    f"{CORRECTION}.bypass_mode": ["true"],
    f"{CORRECTION}.loss_type": ["reinforce"],
    f"{CORRECTION}.rollout_is": ["token", "sequence"],
    f"{CORRECTION}.rollout_is_threshold": ["0.995_1.01", "1.002"],
    f"{CORRECTION}.rollout_is_batch_normalize": ["true"],
    f"{CORRECTION}.rollout_rs": REJECTION,
    f"{CORRECTION}.rollout_rs_threshold": ["1.01"],
    f"{CORRECTION}.off_policy_mask_threshold": [1e-4],
    f"{CORRECTION}.score_centering_topk": [3, 16],
    "distillation.teachers": ["{{default: {folder}/other}}"],
    "distillation.coef": [0.3],
    "distillation.task_coef": [0.7],
    "distillation.distillation_loss.loss_mode": ["forward_kl_topk", "k1"],
    "distillation.distillation_loss.topk": [3],
    f"{ACTOR}.ppo_mini_batch_size": [1, 2],
    f"{ACTOR}.ppo_max_token_len_per_gpu": [40],
    f"{ACTOR}.ppo_epochs": [2],
    f"{ACTOR}.clip_ratio": [0.05],
    f"{ACTOR}.clip_ratio_low": [0.01],
    f"{ACTOR}.clip_ratio_high": [0.4],
    f"{ACTOR}.clip_ratio_c": [1.1],
    f"{ACTOR}.tau_pos": [3.0],
    f"{ACTOR}.tau_neg": [0.3],
    f"{ACTOR}.entropy_coeff": [0.05],
    f"{ACTOR}.use_kl_loss": ["true"],
    f"{ACTOR}.kl_loss_coef": [0.5],
    f"{ACTOR}.kl_loss_type": ["mse", "k2", "k3", "k3+", "kl+"],
    f"{ACTOR}.loss_agg_mode": [*AGGREGATIONS, "token-mean"],
    f"{ACTOR}.loss_scale_factor": [7],
    f"{ACTOR}.shuffle": ["false"],
    f"{ACTOR}.data_loader_seed": [7],
    f"{LOSS}.loss_mode": [name for name in LOSSES if name != "vanilla"] + ["reference_recorded"] * 8,
    f"{LOSS}.loss_kwargs": ["{{k_pos: 1, lambda_neg: 0.5}}"],
    f"{LOSS}.clip_cov_ratio": [0.1],
    f"{LOSS}.clip_cov_lb": [0.01],
    f"{LOSS}.clip_cov_ub": [1.5],
    f"{LOSS}.kl_cov_ratio": [0.3],
    f"{LOSS}.ppo_kl_coef": [0.2],
    f"{LOSS}.dro_beta": [0.7],
    **_optimizer(f"{ACTOR}.optim"),
    "critic.share_trunk": ["true"],
    "critic.vf_coef": [0.7],
    "critic.model.path": ["{folder}/other"],
    "critic.ppo_mini_batch_size": [1],
    "critic.ppo_epochs": [2],
    "critic.ppo_max_token_len_per_gpu": [40],
    "critic.cliprange_value": [0.02],
    "critic.loss_agg_mode": AGGREGATIONS,
    **_optimizer("critic.optim"),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": [40],
    f"{ROLLOUT}.mode": ["sync"],
    f"{ROLLOUT}.n": [2, 4],
    f"{ROLLOUT}.temperature": [0.7, 1.3],
    f"{ROLLOUT}.top_p": [0.8],
    f"{ROLLOUT}.top_k": [20],
    f"{ROLLOUT}.dtype": ["bfloat16"],  # then the engine's log-probs differ from the trainer's
    "reward_model.enable": ["false"],
    "reward_model.tool_reward_weight": [0.5],
    "reward_model.score_weight": [2.0],
    "trainer.critic_warmup": [1],
    "trainer.total_training_steps": [2, 3],
    "data.train_batch_size": [2],
}


CRITIC = {"algorithm.adv_estimator": None}
GRPO = {"algorithm.adv_estimator": "grpo"}
KL_IN_REWARD = {"algorithm.use_kl_in_reward": "true", "trainer.total_training_steps": 3}
KL_IN_LOSS = {f"{ACTOR}.use_kl_loss": "true", f"{ACTOR}.ppo_epochs": 2}
TEACHER = {"distillation.teachers": "{{default: {folder}/other}}"}
TOP_K = {"distillation.distillation_loss.loss_mode": "forward_kl_topk"}
ADAPTIVE = KL_IN_REWARD | {"algorithm.kl_ctrl.type": "adaptive"}
MOVING = {f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.optim.lr": 1e-2}
DIFFERS = {f"{ROLLOUT}.dtype": "bfloat16", f"{CORRECTION}.bypass_mode": None}
WEIGHTED = DIFFERS | {f"{CORRECTION}.rollout_is": "token"}
CLIP_COV = {f"{LOSS}.loss_mode": "clip_cov", f"{LOSS}.clip_cov_lb": 0.01, f"{LOSS}.clip_cov_ratio": 0.3}
KL_COV = MOVING | {f"{LOSS}.loss_mode": "kl_cov", f"{LOSS}.kl_cov_ratio": 0.2}
SAPO = MOVING | {f"{LOSS}.loss_mode": "sapo"}
CLIPPED = MOVING | {f"{LOSS}.loss_mode": "reference_recorded"}
ORDERED = {f"{ACTOR}.ppo_mini_batch_size": 1, "algorithm.filter_groups.enable": None}


def _schedule(section):
    return {f"{section}.lr_scheduler_type": "linear", "trainer.total_training_steps": 3}


# What a key needs beside it before it matters; None is the default.
NEEDS = {
    "algorithm.gamma": CRITIC,
    "algorithm.lam": CRITIC,
    "algorithm.gae_timestep_unit": CRITIC,
    "algorithm.norm_adv_by_std_in_grpo": GRPO,
    "algorithm.singleton_advantage": GRPO,
    "algorithm.zero_variance": GRPO | {"algorithm.filter_groups.enable": None},
    "algorithm.gdpo_reward_keys": {"algorithm.adv_estimator": "gdpo"},
    "algorithm.gdpo_reward_weights": {
        "algorithm.adv_estimator": "gdpo",
        "algorithm.gdpo_reward_keys": "[score,step]",
    },
    "algorithm.use_kl_in_reward": {  # in a single update, whose own log-probs come too late for it
        f"{ACTOR}.ppo_epochs": None,
        f"{ACTOR}.ppo_mini_batch_size": None,
        f"{CORRECTION}.bypass_mode": None,
        f"{CORRECTION}.rollout_is": None,
        f"{CORRECTION}.rollout_rs": None,
    },
    "distillation.coef": TEACHER,
    "distillation.task_coef": TEACHER,
    "distillation.distillation_loss.loss_mode": TEACHER,
    "distillation.distillation_loss.topk": TEACHER | TOP_K,
    f"{CORRECTION}.loss_type": MOVING | {f"{CORRECTION}.bypass_mode": "true", f"{LOSS}.loss_mode": None},
    f"{CORRECTION}.rollout_is": DIFFERS,
    f"{CORRECTION}.rollout_is_threshold": WEIGHTED,
    f"{CORRECTION}.rollout_is_batch_normalize": WEIGHTED,
    f"{CORRECTION}.rollout_rs": DIFFERS | {f"{CORRECTION}.rollout_rs_threshold": "1.01"},
    f"{CORRECTION}.rollout_rs_threshold": DIFFERS | {f"{CORRECTION}.rollout_rs": "[seq_sum_k1]"},
    f"{CORRECTION}.off_policy_mask_threshold": DIFFERS,
    f"{CORRECTION}.score_centering_topk": DIFFERS,
    "algorithm.kl_penalty": KL_IN_REWARD,
    "algorithm.kl_ctrl.type": KL_IN_REWARD,
    "algorithm.kl_ctrl.kl_coef": KL_IN_REWARD,
    "algorithm.kl_ctrl.horizon": ADAPTIVE,
    "algorithm.kl_ctrl.target_kl": ADAPTIVE,
    "algorithm.filter_groups.enable": GRPO,
    "algorithm.filter_groups.metric": GRPO | {"algorithm.filter_groups.enable": "true", "reward_model.enable": None},
    "algorithm.filter_groups.max_num_gen_batches": GRPO | {"algorithm.filter_groups.enable": "true"},
    f"{ACTOR}.clip_ratio": CLIPPED | {f"{ACTOR}.clip_ratio_low": None, f"{ACTOR}.clip_ratio_high": None},
    f"{ACTOR}.clip_ratio_low": CLIPPED,
    f"{ACTOR}.clip_ratio_high": CLIPPED,
    f"{ACTOR}.clip_ratio_c": CLIPPED,
    f"{ACTOR}.tau_pos": SAPO,
    f"{ACTOR}.tau_neg": SAPO,
    f"{LOSS}.loss_mode": MOVING,
    f"{LOSS}.loss_kwargs": MOVING | {f"{LOSS}.loss_mode": "vespo"},
    **{f"{LOSS}.{name}": CLIP_COV for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
    **{f"{LOSS}.{name}": KL_COV for name in ("kl_cov_ratio", "ppo_kl_coef")},
    f"{LOSS}.dro_beta": MOVING | {f"{LOSS}.loss_mode": "dro"},
    f"{ACTOR}.kl_loss_coef": KL_IN_LOSS,
    f"{ACTOR}.kl_loss_type": KL_IN_LOSS,
    f"{ACTOR}.loss_scale_factor": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
    f"{ACTOR}.shuffle": ORDERED | {f"{ACTOR}.data_loader_seed": None},
    f"{ACTOR}.data_loader_seed": ORDERED | {f"{ACTOR}.shuffle": None},
    **{key: CRITIC for key in CHOICES if key.startswith("critic.")},
    "critic.cliprange_value": CRITIC | {"critic.ppo_epochs": 2, "critic.optim.lr": 1e-2, "critic.share_trunk": None},
    "critic.share_trunk": CRITIC,
    "critic.vf_coef": CRITIC | {"critic.share_trunk": "true"},
    **{
        f"critic.{name}": CRITIC | {"critic.share_trunk": None}
        for name in ("model.path", "ppo_mini_batch_size", "ppo_epochs")
    },
    "trainer.critic_warmup": CRITIC,
    "trainer.total_training_steps": _schedule(f"{ACTOR}.optim"),
    **{
        f"{section}.{key}": needs | (CRITIC if section == "critic.optim" else {})
        for section in (f"{ACTOR}.optim", "critic.optim")
        for key, needs in {
            "betas": {f"{section}.name": None, "trainer.total_training_steps": 3},
            "muon_lr_multiplier": {f"{section}.name": "muon"},
            "lr_scheduler_type": {"trainer.total_training_steps": 3},
            "lr_decay_ratio": _schedule(section),
            "min_lr_ratio": _schedule(section),
        }.items()
    },
}


def configuration(seed):
    """Settings by key: of about half of all keys, and of some of them with what they need before they matter."""
    dice = random.Random(seed)
    drawn = {key: dice.choice(values) for key, values in CHOICES.items() if dice.random() < 0.5}
    matter = dict(dice.choice([CRITIC, GRPO, {"algorithm.adv_estimator": dice.choice(list(ESTIMATORS))}]))
    for key in dice.sample(sorted(CHOICES), 16):
        wanted = {key: dice.choice(CHOICES[key])} | NEEDS.get(key, {})
        if all(matter.get(other, value) == value for other, value in wanted.items()):
            matter |= wanted
    return allowed({key: value for key, value in (drawn | matter).items() if value is not None})


def allowed(chosen):
    """`chosen` without what is refused together with the rest of it (docs/training.md says why), and with something to
    learn beside the KL of policies that are equal as yet: its gradient is rounding, which optimizers make large."""
    if f"{CORRECTION}.bypass_mode" in chosen:
        chosen.pop(f"{CORRECTION}.rollout_is_batch_normalize", None)
        if f"{CORRECTION}.loss_type" in chosen:
            chosen.pop(f"{LOSS}.loss_mode", None)
        elif chosen.get(f"{LOSS}.loss_mode") not in ("gpg", "reinforce"):  # the loss's ratio is the weight
            chosen.pop(f"{CORRECTION}.rollout_is", None)
    of_tokens = chosen.get(f"{CORRECTION}.rollout_is", "token") == "token"
    reinforces = f"{CORRECTION}.loss_type" in chosen or chosen.get(f"{LOSS}.loss_mode") in ("gpg", "reinforce")
    normalised = f"{CORRECTION}.rollout_is" in chosen and f"{CORRECTION}.rollout_is_batch_normalize" in chosen
    if not of_tokens or normalised or (f"{CORRECTION}.bypass_mode" in chosen and not reinforces):
        chosen.pop(f"{CORRECTION}.score_centering_topk", None)
    if f"{CORRECTION}.rollout_rs" in chosen:
        chosen[f"{CORRECTION}.rollout_rs_threshold"] = thresholds(chosen[f"{CORRECTION}.rollout_rs"])
    corrections = ("rollout_is", "rollout_rs", "off_policy_mask_threshold")
    if any(f"{CORRECTION}.{name}" in chosen for name in corrections) and chosen.get(f"{LOSS}.loss_mode") == "vespo":
        chosen.pop(f"{LOSS}.loss_mode")  # whose weight of a sequence takes them in; its own tests see it
    for section in (f"{ACTOR}.optim", "critic.optim"):
        if chosen.get(f"{section}.name") == "adamw_schedule_free":
            for name in ("lr_scheduler_type", "lr_decay_ratio", "min_lr_ratio", "muon_lr_multiplier"):
                chosen.pop(f"{section}.{name}", None)
    if "distillation.teachers" in chosen:  # equal groups have a gradient
        chosen.pop("algorithm.filter_groups.enable", None)
        chosen.pop("algorithm.zero_variance", None)
        if TOP_K.items() <= chosen.items():  # over the whole vocabulary
            chosen.pop(f"{ROLLOUT}.top_p", None)
            chosen.pop(f"{ROLLOUT}.top_k", None)
    estimator = chosen.get("algorithm.adv_estimator")
    allow_estimator(chosen, estimator)
    if estimator is not None and f"{ACTOR}.use_kl_loss" in chosen:  # of groups with equal scores
        chosen[f"{ACTOR}.entropy_coeff"] = 0.05
    _keep_to_the_loss(chosen)
    chosen.pop("custom_reward_function.path", None)
    if "reward_model.enable" in chosen:
        chosen["custom_reward_function.path"] = "null"
        chosen.pop("algorithm.filter_groups.metric", None)  # nothing is reported
    return chosen


def allow_estimator(chosen, estimator):
    """Leaves out of `chosen` what does not go with the estimator, and adds what it needs."""
    chosen.pop("algorithm.adv_estimator_kwargs", None)
    if own := ESTIMATORS.get(estimator):
        chosen["algorithm.adv_estimator_kwargs"] = f"{{{{{own}}}}}"
    if estimator in TIES_TEACH:  # groups of equal scores have a gradient
        chosen.pop("algorithm.filter_groups.enable", None)
        chosen.pop("algorithm.zero_variance", None)
    if "algorithm.zero_variance" in chosen:
        chosen.pop("algorithm.filter_groups.enable", None)
        if chosen["algorithm.zero_variance"] == "refill":
            chosen["algorithm.filter_groups.max_num_gen_batches"] = 3
    if estimator == "gdpo" or "algorithm.gdpo_reward_weights" in chosen:
        chosen.setdefault("algorithm.gdpo_reward_keys", "[score,final]")
    if estimator == "gdpo":
        chosen.pop("algorithm.use_kl_in_reward", None)
        if "reward_model.enable" in chosen:
            chosen["algorithm.gdpo_reward_keys"] = "[final,step]"


def thresholds(criteria):
    """Bounds that an engine in bfloat16 is sometimes within."""
    kinds = [name.rpartition("_")[2] for name in criteria.strip("[]").split(",")]
    return "[" + ",".join({"k1": "0.99_1.01", "k2": "1e-4", "k3": "1e-4"}[kind] for kind in kinds) + "]"


def _keep_to_the_loss(chosen):
    """Leaves out the options of other losses, which are refused."""
    loss = chosen.get(f"{LOSS}.loss_mode", "vanilla")
    _, bounds, options = OWN.get(loss, OWN["vanilla"])
    read = {*options, *((*BOUNDS, "clip_ratio") if bounds else ())} | ({"loss_kwargs"} if loss == "vespo" else set())
    of_losses = {name for _, _, others in OWN.values() for name in others} | {*BOUNDS, "clip_ratio", "loss_kwargs"}
    for name in of_losses - read:
        chosen.pop(f"{ACTOR}.{name}", None)
        chosen.pop(f"{LOSS}.{name}", None)
    if loss == "dro":
        chosen.setdefault(f"{LOSS}.dro_beta", 0.7)


def shape(seed):
    dice = random.Random(seed)
    return Shape(
        seed=seed,
        sequences=dice.choice([1, 3]),
        holes=dice.choice([0.0, 0.3]),
        silent=dice.choice([0.0, 0.2]),
        broken=dice.choice([0.0, 0.4]),
        levels=dice.choice([(0.0, 0.25, 1.25), (0.0, 0.1, 0.7, 3.0), (1.1,)]),
        tool_rewards=dice.choice([False, True]),
    )


def draw(seed):
    """A configuration, and the shape of its batches."""
    chosen, made = configuration(seed), shape(seed)
    if "reward_model.enable" in chosen:  # then tools alone tell answers apart; where nothing does, a step is rounding
        made = replace(made, tool_rewards=True)
    return chosen, made
