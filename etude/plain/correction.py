"""The mismatch between the engine that sampled and the policy that learns, token by token.

Truncated importance sampling  Ionides 2008          IcePop  arXiv 2510.18855
Off-policy sequence masking    arXiv 2512.02556      k1, k2, k3  Schulman 2020, of KL(engine ‖ policy)

A row has `current` or `old` and `engine` log-probs, (T,) each; `sequences_of` says which rows are one sequence.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch

FAR = 20.0  # log-ratios are clipped to this


def sequences_of(rows, together):
    """Lists of rows: one a rollout, or one a row."""
    found = defaultdict(list)
    for row in rows:
        found[id(row.rollout) if together else id(row)].append(row)
    return list(found.values())


def bounded_exp(value):
    return math.exp(max(-FAR, min(FAR, value)))


def effective_share(weights):
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def mismatch(rows):
    """How far the policy's log-probs of the sampled tokens are from those that the engine drew them with."""
    pairs = [pair for row in rows for pair in zip(row.current.tolist(), row.engine.tolist())]
    gaps = [abs(math.exp(p) - math.exp(q)) for p, q in pairs]
    deltas = [p - q for p, q in pairs]
    ratios = [bounded_exp(d) for d in deltas]
    sizes = sorted(abs(d) for d in deltas)
    tail = sizes[math.ceil(0.99 * len(sizes)) - 1]  # rounded up to a twentieth of a decade
    figures = {
        "kl": mean(-d for d in deltas),
        "k3_kl": mean(r - 1 - max(-FAR, min(FAR, d)) for r, d in zip(ratios, deltas)),
        "chi2_token": mean(r * r for r in ratios) - 1,
        "log_prob_diff_max": sizes[-1],
        "log_prob_diff_p99": 10 ** (max(-180, min(40, math.ceil(20 * math.log10(tail)))) / 20) if tail else 1e-9,
        "eff_sample_size": effective_share(ratios),
    }
    ours, theirs = ([float(getattr(row, name).mean()) for row in rows] for name in ("current", "engine"))
    figures |= {
        "training_ppl": mean(bounded_exp(-p) for p in ours),
        "rollout_ppl": mean(bounded_exp(-q) for q in theirs),
        "ppl_ratio": mean(bounded_exp(q - p) for p, q in zip(ours, theirs)),
        "log_ppl_diff": mean(q - p for p, q in zip(ours, theirs)),
        "log_ppl_abs_diff": mean(abs(q - p) for p, q in zip(ours, theirs)),
        "chi2_seq": mean(bounded_exp(float((row.current - row.engine).sum())) ** 2 - 1 for row in rows),
    }
    name = "training/rollout_probs_diff"
    return {f"{name}_mean": mean(gaps), f"{name}_max": max(gaps)} | {f"rollout_corr/{n}": v for n, v in figures.items()}


def parse_bounds(text):
    """(low or None, high)"""
    low, _, high = str(text).rpartition("_")
    return (float(low) if low else None), float(high)


def weigh(sequences, log_ratios, options):
    """(weights of each row's tokens by row, figures); `log_ratios` maps a row to its (T,) list."""
    low, high = parse_bounds(options["rollout_is_threshold"])
    weights, raws = {}, []
    for rows in sequences:
        whole = sum(sum(log_ratios[row]) for row in rows)
        for row in rows:
            logs = [whole] * len(row) if options["rollout_is"] == "sequence" else log_ratios[row]
            raw = [bounded_exp(d) for d in logs]
            raws += raw
            weights[row] = [min(w, high) if low is None else w if low <= w <= high else 0.0 for w in raw]
    every = [w for rows in sequences for row in rows for w in weights[row]]
    figures = {
        "rollout_is_mean": mean(every),
        "rollout_is_max": max(raws),
        "rollout_is_eff_sample_size": effective_share(every),
        "rollout_is_ratio_fraction_high": mean(w > high for w in raws),
        "rollout_is_ratio_fraction_low": mean(w < (1 / high if low is None else low) for w in raws),
    }
    if low is not None:
        figures["rollout_is_oob_ratio"] = mean(w > high or w < low for w in raws)
    if options["rollout_is_batch_normalize"]:
        factor = mean(every)
        if options["rollout_is"] == "sequence":
            factor = mean(next(iter(weights[rows[0]])) for rows in sequences)
        factor = factor if factor > 1e-8 else 1.0
        figures["rollout_is_batch_norm_factor"] = factor
        weights = {row: [w / factor for w in given] for row, given in weights.items()}
    return weights, {f"rollout_corr/{name}": value for name, value in figures.items()}


def estimate(kind, log_ratio):
    """Of KL(engine ‖ policy), from one token."""
    d = max(-FAR, min(FAR, log_ratio))
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[kind]


def reject(sequences, log_ratios, options):
    """(which of each row's tokens stay, by row; figures)."""
    names, bounds = listed(options["rollout_rs"]), listed(options["rollout_rs_threshold"])
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    kept = {row: [True] * len(row) for rows in sequences for row in rows}
    for name, text in zip(names, bounds, strict=True):
        (low, high), (span, kind) = parse_bounds(text), name.rsplit("_", 1)
        if kind == "k1":
            low, high = math.log(low or 1 / high), math.log(high)
        for rows in sequences:
            values = {row: [estimate(kind, d) for d in log_ratios[row]] for row in rows}
            every = [value for row in rows for value in values[row]]
            whole = {"token": 0.0, "seq_sum": sum(every), "seq_mean": mean(every), "seq_max": max(every)}[span]
            for row in rows:
                judged = values[row] if span == "token" else [whole] * len(row)
                inside = [v <= high and (low is None or v >= low) for v in judged]
                kept[row] = [a and b for a, b in zip(kept[row], inside)]
    lost = [not stays for rows in sequences for row in rows for stays in kept[row]]
    touched = [not all(stays for row in rows for stays in kept[row]) for rows in sequences]
    figures = {"rollout_rs_masked_fraction": mean(lost), "rollout_rs_seq_masked_fraction": mean(touched)}
    return kept, {f"rollout_corr/{name}": value for name, value in figures.items()}


def listed(given):
    """A list, a number, or text with commas as a list of texts."""
    given = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    return [str(each).strip() for each in given]


def off_policy_kept(log_probs, row, threshold):
    """(T,) whether a token's loss counts: unless its advantage is negative and the engine liked the row much better."""
    far = mean((row.engine - log_probs.detach()).tolist()) > threshold
    return [not (far and a < -1e-9) for a in row.advantages.tolist()]  # less is rounding


def correct(rows, options, together):
    """Gives rows their `weights`, takes rejected tokens out of them, before any update; (rows with any left, figures)."""
    sequences = sequences_of(rows, together)
    ratios = {row: (row.old - row.engine).tolist() for row in rows}
    figures = {}
    if options["rollout_is"]:
        weights, figures = weigh(sequences, ratios, options)
        for row in rows:
            row.weights = torch.tensor(weights[row], dtype=torch.float64)
    if options["rollout_rs"] and options["rollout_rs_threshold"]:
        kept, rejected = reject(sequences, ratios, options)
        figures |= rejected
        for row in rows:
            stays = torch.tensor(kept[row], dtype=torch.bool)
            row.kept_ids = [ids for ids, flag in zip(row.kept_ids, kept[row]) if flag]
            row.heads = [head for head, flag in zip(row.heads, kept[row]) if flag]
            of_tokens = ("sampled", "engine", "current", "old", "ref", "taught", "values", "advantages", "returns")
            for name in (*of_tokens, "weights"):
                setattr(row, name, getattr(row, name)[stays])
    return [row for row in rows if len(row)], figures


class Seen:
    """A row's log-ratios at one update, and which of its tokens the off-policy mask kept."""

    def __init__(self, ratios, kept):
        self.ratios, self.kept, self.learned = ratios, kept, torch.ones(len(ratios), dtype=torch.float64)

    def __len__(self):
        return len(self.ratios)


def loss_weights(log_probs, row, options):
    """(T,) what multiplies the loss of each token at the policy as it is now; and what was seen for the figures."""
    seen = Seen((log_probs.detach() - row.engine).tolist(), [True] * len(row))
    ratios, factors = {row: seen.ratios}, [row.weights.tolist()]
    if options["bypass_mode"] and options["rollout_is"]:
        factors.append(weigh([[row]], ratios, options)[0][row])
    masks = len(factors)
    if options["bypass_mode"] and options["rollout_rs"]:
        factors.append(reject([[row]], ratios, options)[0][row])
    if options["off_policy_mask_threshold"] is not None:
        seen.kept = off_policy_kept(log_probs, row, options["off_policy_mask_threshold"])
        factors.append(seen.kept)
    for factor in factors[masks:]:
        seen.learned = seen.learned * torch.tensor(factor, dtype=torch.float64)
    return torch.tensor([math.prod(each) for each in zip(*factors)], dtype=torch.float64), seen


def centre(log_p, heads, options):
    """(T,) terms whose gradients are the weighted score that the engine's distribution has on average, where the policy has
    the log-probs (T, vocabulary); and figures by token. `heads`: the engine's most probable tokens and their log-probs."""
    terms, masses, sizes = [], [], []
    for row, head in zip(log_p, heads):
        term, mass, size = row.sum() * 0 if head is None else 0.0, 0.0, 0.0
        if head is not None:
            p = [float(row[token].detach().exp()) for token in head[0]]
            q = [math.exp(value) for value in head[1]]
            mass = math.fsum(q)
            tail = max(1 - mass, 1e-6) / max(1 - math.fsum(p), 1e-6)
            for token, ours, theirs in zip(head[0], p, q):
                factor = theirs * score_weight(ours / theirs, options) - tail * score_weight(1 / tail, options) * ours
                term, size = term + factor * row[token], size + abs(factor)
        terms.append(term)
        masses.append(mass)
        sizes.append(size)
    return torch.stack(terms), {"score_centering_head_mass": masses, "score_centering_l1": sizes}


def score_weight(ratio, options):
    """By which the loss multiplies a token's score, of the ratio of its probabilities."""
    if not options["rollout_is"]:
        return 1.0
    low, _, high = str(options["rollout_is_threshold"]).rpartition("_")
    return min(ratio, float(high)) if not low else ratio * (float(low) <= ratio <= float(high))


def figures_of(seen, options):
    """Of all that the updates of a step saw."""
    figures, ratios = {}, {each: each.ratios for each in seen}
    if options["bypass_mode"] and options["rollout_is"]:
        figures |= weigh([[each] for each in seen], ratios, options)[1]
    if options["bypass_mode"] and options["rollout_rs"]:
        figures |= reject([[each] for each in seen], ratios, options)[1]
    if options["off_policy_mask_threshold"] is not None:
        dropped = [not stays for each in seen for stays in each.kept]
        figures["rollout_corr/off_policy_masked_fraction"] = mean(dropped)
    return figures
