"""The policy losses as their papers write them, for one sequence at a time: vectors (T,) over its sampled tokens.

    PPO     arXiv 1707.06347   eq. 7         DAPO    arXiv 2503.14476   eq. 8      Dual clip  arXiv 1912.09729  eq. 5
    GSPO    arXiv 2507.18071   eq. 5, 13     LUSPO   arXiv 2602.05261              GMPO       arXiv 2507.20673  eq. 4
    CISPO   arXiv 2506.13585   eq. 4, 5      SAPO    arXiv 2511.20347   eq. 5, 6   DPPO       arXiv 2602.04879
    VESPO   arXiv 2602.10693                 DRO     arXiv 2405.19107   eq. 8      GPG        arXiv 2504.02546  eq. 6
    Clip-Cov, KL-Cov   arXiv 2505.22617      eq. 10 to 13

A loss is a function of log π (T,), which has a gradient, of a row with `old` and `advantages` (T,), and of its options; it
returns the loss of each token, and flags (T,) by the names of their figures.
"""

from __future__ import annotations

import math

import torch

BOUNDS = ("clip_ratio_low", "clip_ratio_high")
OWN = {  # the losses' own aggregation, bounds, and other options
    "vanilla": ("token-mean", (0.2, 0.2), {"clip_ratio_c": 3}),
    "gspo": ("seq-mean-token-mean", (3e-4, 4e-4), {}),
    "luspo": ("seq-mean-token-sum", (2e-3, 2.5e-3), {}),
    "geo_mean": ("seq-mean-token-mean", (0.4, 0.4), {}),
    "cispo": ("token-mean", (1, 4), {}),
    "sapo": ("seq-mean-token-mean", None, {"tau_pos": 1, "tau_neg": 1.05}),
    "dppo_tv": ("token-mean", (0.2, 0.2), {"clip_ratio_c": 20}),
    "dppo_kl": ("token-mean", (0.05, 0.05), {"clip_ratio_c": 20}),
    "vespo": ("token-mean", None, {"k_pos": 2, "lambda_pos": 3, "k_neg": 3, "lambda_neg": 2}),
    "clip_cov": ("token-mean", (1, 1), {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1, "clip_cov_ub": 5}),
    "kl_cov": ("token-mean", None, {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1}),
    "dro": ("token-mean", None, {"dro_beta": 0}),
    "gpg": ("token-mean", None, {}),
    "reinforce": ("token-mean", None, {}),
}


def name_of(actor):
    """The loss, where a test's own loss is the vanilla one under another name."""
    name = actor["policy_loss"]["loss_mode"]
    return name if name in OWN else "vanilla"


def aggregation_of(actor):
    """The aggregation mode: as configured, or the loss's own."""
    return actor["loss_agg_mode"] or OWN[name_of(actor)][0]


def options_of(actor):
    """The loss's options: as configured, or its own. `clip_ratio` stands for both bounds."""
    _, bounds, options = OWN[name_of(actor)]
    given = {**actor, **actor["policy_loss"], **actor["policy_loss"]["loss_kwargs"]}
    found = {name: given.get(name) if given.get(name) is not None else own for name, own in options.items()}
    for name, own in zip(BOUNDS, bounds or ()):
        found[name] = next(value for value in (actor[name], actor["clip_ratio"], own) if value is not None)
    return found


def plain_policy_loss(actor, log_probs, row):
    """Losses and flags of a row under the configuration `actor`; `row.selected` are the places chosen by `select`."""
    return LOSSES[name_of(actor)](log_probs, row, options_of(actor))


def log_ratio(log_probs, row):
    return (log_probs - row.old).clamp(-20, 20)


def clip(ratio, advantages, o):
    """min(r A, clip(r) A), and where the clipped one is the smaller."""
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - o["clip_ratio_low"], 1 + o["clip_ratio_high"]) * advantages
    return torch.minimum(unclipped, clipped), clipped < unclipped


def vanilla(log_probs, row, o):
    surrogate, clipped = clip(log_ratio(log_probs, row).exp(), row.advantages, o)
    bounded = torch.maximum(surrogate, o["clip_ratio_c"] * row.advantages)
    negative = row.advantages < 0
    flags = {"pg_clipfrac": clipped, "pg_clipfrac_lower": negative & (bounded > surrogate)}
    return -torch.where(negative, bounded, surrogate), flags


def gspo(log_probs, row, o):
    """Eq. 13: sg(s) π / sg(π) for each token, with s the geometric mean of the sequence's ratios."""
    sequence = log_ratio(log_probs, row).detach().exp().prod() ** (1 / max(len(log_probs), 1))
    surrogate, clipped = clip(sequence * (log_probs - log_probs.detach()).exp(), row.advantages, o)
    return -surrogate, {"pg_clipfrac": clipped}


def geo_mean(log_probs, row, o):
    ratio, sign = log_ratio(log_probs, row).exp(), row.advantages.sign()
    near = ratio.clamp(math.exp(-o["clip_ratio_low"]), math.exp(o["clip_ratio_high"]))
    product = (torch.minimum(ratio**sign, near**sign) ** sign).prod() ** (1 / max(len(log_probs), 1))
    clipped = (ratio - near).abs() > 1e-12
    flags = {"pg_clipfrac": clipped & (row.advantages > 0), "pg_clipfrac_lower": clipped & (row.advantages < 0)}
    return -product * row.advantages, flags


def cispo(log_probs, row, o):
    ratio = log_ratio(log_probs, row).detach().exp()
    low, high = 1 - o["clip_ratio_low"], 1 + o["clip_ratio_high"]
    return -ratio.clamp(low, high) * row.advantages * log_probs, {"pg_clipfrac": (ratio < low) | (ratio > high)}


def sapo(log_probs, row, o):
    tau = torch.tensor([o["tau_pos"] if a > 0 else o["tau_neg"] for a in row.advantages.tolist()], dtype=torch.float64)
    gate = 4 / tau / (1 + torch.exp(-tau * (log_ratio(log_probs, row).exp() - 1)))
    return -gate * row.advantages, {}


def dppo_tv(log_probs, row, o):
    return dppo(log_probs, row, o, lambda p, q: abs(p - q))


def dppo_kl(log_probs, row, o):
    def divergence(p, q):
        """KL of two coins that fall on this token with probability q and p."""
        return q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))

    return dppo(log_probs, row, o, divergence)


def dppo(log_probs, row, o, divergence):
    """Without tokens that are further than δ already, where the advantage would move them further."""
    losses, far, truncated = [], [], []
    for log_p, log_q, advantage in zip(log_probs, row.old.tolist(), row.advantages.tolist()):
        p, q = math.exp(float(log_p.detach())), math.exp(log_q)
        up = advantage > 0
        beyond = divergence(p, q) > o["clip_ratio_high" if up else "clip_ratio_low"]
        far.append(beyond and (p > q if up else p < q))
        truncated.append(not far[-1] and p / q > o["clip_ratio_c"])
        losses.append(-advantage * min(p / q, o["clip_ratio_c"]) * log_p * (not far[-1]))
    flags = {"pg_clipfrac": torch.tensor(far), "pg_clipfrac_lower": torch.tensor(truncated)}
    return torch.stack(losses) if losses else log_probs, flags


def vespo(log_probs, row, o):
    total = min(max(float(log_ratio(log_probs, row).detach().sum()), math.log(1e-8)), 20.0)
    weights = []
    for advantage in row.advantages.tolist():
        k, decay = (o["k_pos"], o["lambda_pos"]) if advantage >= 0 else (o["k_neg"], o["lambda_neg"])
        weights.append(math.exp(decay) * math.exp(total) ** k * math.exp(-decay * math.exp(total)))
    return -torch.tensor(weights, dtype=torch.float64) * row.advantages * log_probs, {}


def dro(log_probs, row, o):
    return -(row.advantages * log_probs - o["dro_beta"] / 2 * log_ratio(log_probs, row) ** 2), {}


def reinforce(log_probs, row, o):
    return -row.advantages * log_probs, {}


def clip_cov(log_probs, row, o):
    surrogate, _ = clip(log_ratio(log_probs, row).exp(), row.advantages, o)
    return -surrogate * ~row.selected, {"pg_clipfrac": row.selected}


def kl_cov(log_probs, row, o):
    """Where a ratio is 1 but for rounding, |log r| has no slope."""
    distance = log_ratio(log_probs, row).abs()
    penalty = row.selected * (distance > 1e-4) * o["ppo_kl_coef"] * distance
    return -log_ratio(log_probs, row).exp() * row.advantages + penalty, {}


LOSSES = {
    "vanilla": vanilla,
    "gspo": gspo,
    "luspo": gspo,
    "geo_mean": geo_mean,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "vespo": vespo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dro": dro,
    "gpg": reinforce,
    "reinforce": reinforce,
}
SELECTING = ("clip_cov", "kl_cov")


def select(actor, rows):
    """Marks in `row.selected` the tokens of a mini-batch that a loss chooses by covariance: `kl_cov` the largest, `clip_cov`
    evenly spread ones of those between its bounds."""
    for row in rows:
        row.selected = torch.zeros(len(row.advantages), dtype=torch.bool)
    name, o = name_of(actor), options_of(actor)
    if name not in SELECTING:
        return
    mean_log = float(torch.cat([row.old for row in rows]).mean())
    mean_advantage = float(torch.cat([row.advantages for row in rows]).mean())
    tokens = [
        ((float(log) - mean_log) * (float(advantage) - mean_advantage), row, place)
        for row in rows
        for place, (log, advantage) in enumerate(zip(row.old, row.advantages))
    ]
    share = o[f"{name}_ratio"]
    count = max(math.floor(share * len(tokens)), 1)
    if name == "clip_cov":
        tokens = [token for token in tokens if o["clip_cov_lb"] < token[0] < o["clip_cov_ub"]]
    tokens.sort(key=lambda token: -round(token[0], 6))  # ties, which rounding tells apart, in their order
    count = min(count, len(tokens))
    spread = len(tokens) / count if count and name == "clip_cov" else 1
    for number in range(count):
        _, row, place = tokens[math.floor((number + 0.5) * spread)]
        row.selected[place] = True


def token_weights(mode, rows, scale):
    """The weight of each row's tokens such that Σ weight · loss is the aggregate over the mini-batch `rows`. A rollout of
    several sequences counts once, and its tokens as if they stood in one."""
    lengths = {}
    for row in rows:
        lengths[id(row.rollout)] = lengths.get(id(row.rollout), 0) + len(row)
    tokens, rollouts = sum(lengths.values()), len(lengths)
    return {
        "token-mean": [1 / tokens for _ in rows],
        "token-sum": [1.0 for _ in rows],
        "seq-mean-token-sum": [1 / rollouts for _ in rows],
        "seq-mean-token-sum-norm": [1 / rollouts / scale for _ in rows],
        "seq-mean-token-mean": [1 / rollouts / lengths[id(row.rollout)] for row in rows],
    }[mode]


def counted_by(mode, rows):
    """What a mini-batch's loss was normalised by: tokens, rollouts, nothing."""
    rollouts = len({id(row.rollout) for row in rows})
    return {"token-mean": sum(map(len, rows)), "token-sum": 1}.get(mode, rollouts)


def plain_forward_kl(teacher, policy, k):
    """(T,) Σ_i p_i log(p_i / q_i) over the teacher's k likeliest tokens and all others as one, and the masses of the former;
    `teacher` and `policy` are (T, vocabulary) log-probs."""
    found, masses = [], {"teacher_mass": [], "student_mass": []}
    for p, q in zip(teacher.exp(), policy.exp()):
        order = p.argsort(descending=True)
        top, rest = order[:k], order[k:]
        p_rest, q_rest = p[rest].sum(), q[rest].sum()
        found.append((p[top] * (p[top] / q[top]).log()).sum() + p_rest * (p_rest / q_rest).log())
        masses["teacher_mass"].append(float(p[top].sum()))
        masses["student_mass"].append(float(q[top].sum().detach()))
    return torch.stack(found), masses


K3_IS_TEN = (-2.6108686381498756, 10.999983298020254)  # where exp(−d) − 1 + d = 10


def kl_estimate(kind, log_probs, ref):
    """KL(π ‖ π_ref) a token from samples of π; a trailing `+` keeps the value and takes the gradient of k2."""
    d = log_probs - ref
    base = kind.removesuffix("+")
    if base in ("kl", "k1"):
        value = d
    elif base == "abs":
        value = d.abs()
    elif base in ("mse", "k2"):
        value = d**2 / 2
    else:  # low_var_kl, k3: at most 10, where the gradient stays that at the bound
        exact = (torch.exp(-d.clamp(-20, 20)) - 1 + d.clamp(-20, 20)).clamp(max=10)
        slope = 1 - torch.exp(-d.clamp(*K3_IS_TEN))
        value = exact.detach() + slope.detach() * (d - d.detach())
    if kind.endswith("+"):
        return value.detach() + d**2 / 2 - (d**2 / 2).detach()
    return value
