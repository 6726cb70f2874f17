"""The plain trainer: one step of PPO or GRPO as the papers write it, to hold the real one against.

float64, Hugging Face's model, one row at a time; no padding, packing, caches, micro-batches, workers or options
classes. Its input is the resolved configuration (a plain dict), the rollouts of a step and the folder of the starting
weights; its output are weights, advantages and every figure that a step reports.

It imports nothing of what it checks, and knows of the product only what the documentation says. Every vector `(T,)` is
over the *sampled* tokens of one sequence: what a tool or a template wrote is context, and nowhere else.

    DeepSeekMath  arXiv 2402.03300   GRPO                 DAPO        arXiv 2503.14476   filter
    Dr. GRPO      arXiv 2503.20783   sums, no std         GAE         arXiv 1506.02438   eq. 16
    KL control    arXiv 1909.08593   section 2.2          k1, k2, k3  Schulman 2020, "Approximating KL divergence"
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from etude.plain.advantages import Story, advantages, gae, running_means
from etude.plain.correction import centre, correct, figures_of, loss_weights, mismatch
from etude.plain.losses import (
    SELECTING,
    aggregation_of,
    counted_by,
    kl_estimate,
    name_of,
    plain_policy_loss,
    select,
    token_weights,
)
from etude.plain.losses import plain_forward_kl as forward_kl
from etude.plain.optimizer import Optimizer, schedule
from etude.plain.rollouts import (
    Rollout,
    Sequence,
    filter_prompts,
    role_figures,
    role_total,
    rollout_figures,
    spread,
    total_reward,
)


class Row:
    """A sequence on its way through a step; its vectors are (T,)."""

    def __init__(self, rollout: Rollout, sequence: Sequence) -> None:
        self.rollout, self.sequence = rollout, sequence
        self.is_main = sequence is rollout.main
        self.ids = torch.tensor([sequence.prompt + sequence.response])
        self.sampled = torch.tensor(sequence.sampled)
        flagged = [value for value, flag in zip(sequence.engine_log_probs, sequence.mask) if flag]
        self.engine = torch.tensor(flagged, dtype=torch.float64)
        self.kept_ids = [kept for kept, flag in zip(sequence.kept_ids, sequence.mask) if flag]
        self.heads = [head for head, flag in zip(sequence.heads, sequence.mask) if flag]
        self.turns = [turn for turn, flag in zip(sequence.turns, sequence.mask) if flag]
        zero = torch.zeros(len(self.sampled), dtype=torch.float64)
        self.known: dict[str, torch.Tensor] = {}  # by the names of a dump's `token_values`
        self.current, self.old, self.ref, self.kl = zero, zero, zero, zero  # log-probs, and the penalty
        self.values, self.rewards, self.advantages, self.returns = zero, zero.clone(), zero, zero
        self.norms = zero  # of the score function, squared
        self.weights = zero + 1  # of the policy loss
        self.taught = zero  # with a teacher (T, vocabulary), its log-probs

    def __len__(self) -> int:
        return len(self.sampled)


# -- formulas ----------------------------------------------------------------------------------------------------


def as_vector(values):
    return torch.tensor(values, dtype=torch.float64)


# -- models ------------------------------------------------------------------------------------------------------


def load_policy(folder):
    """The causal LM of `folder` in float64. (Not "eager", whose softmax is float32 whatever the model is.)"""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()


class Critic(nn.Module):
    """The body of a language model with a scalar head; a head that was never trained is 0."""

    def __init__(self, folder):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, dtype=torch.float64)
        trained = Path(folder) / "value_head.safetensors"
        zeros = {"weight": torch.zeros_like(self.head.weight), "bias": torch.zeros_like(self.head.bias)}
        self.head.load_state_dict(load_file(trained) if trained.is_file() else zeros)

    def values(self, row):
        """(T,) the value of the context before each sampled token."""
        ids = row.ids.to(self.backbone.device)
        hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
        return self.head(hidden[row.sampled - 1]).squeeze(-1).cpu()


class SharedCritic(nn.Module):
    """A scalar head, 0 at the start, on the last hidden states of a policy whose weights are not its own."""

    def __init__(self, policy):
        super().__init__()
        self.body = [policy.model]
        self.head = nn.Linear(policy.config.hidden_size, 1, dtype=torch.float64)
        self.head.load_state_dict({name: torch.zeros_like(each) for name, each in self.head.state_dict().items()})

    def values(self, row, to_policy=False):
        """(T,) the value of the context before each sampled token, with a gradient to the policy or to the head alone."""
        body = self.body[0]
        hidden = body(input_ids=row.ids.to(body.device), use_cache=False).last_hidden_state[0][row.sampled - 1]
        return self.head(hidden if to_policy else hidden.detach()).squeeze(-1).cpu()


def log_distributions(model, row, temperature):
    """(T, vocabulary) log-probs where each sampled token was drawn, -inf of what it was not drawn from."""
    logits = (
        model(input_ids=row.ids.to(model.device), use_cache=False).logits[0].double()[row.sampled - 1] / temperature
    )
    for place, kept in enumerate(row.kept_ids):
        if kept is not None:
            left_out = torch.ones_like(logits[place], dtype=torch.bool)
            left_out[list(kept)] = False
            logits[place] = logits[place].masked_fill(left_out, -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def log_probs_and_entropy(model, row, temperature):
    """(T,) log-prob of each sampled token given what stood before it, and (T,) entropy there, in nats."""
    log_p = log_distributions(model, row, temperature)
    chosen = log_p[torch.arange(len(row)), row.ids[0, row.sampled]]
    return chosen.cpu(), -(log_p.exp() * log_p.clamp(min=-1e30)).sum(dim=-1).cpu()


# -- the step ----------------------------------------------------------------------------------------------------


class PlainTrainer:
    """Holds the weights, the optimizers and the KL coefficient between steps."""

    def __init__(self, config, start=None, device="cpu"):
        """Begins with the models of `config`, or of a checkpoint's folder `start`. Where the reference is not there, the
        sequences have its log-probs."""
        self.config = config
        part = config["actor_rollout_ref"]
        self.actor, self.critic_options, self.algorithm = part["actor"], config["critic"], config["algorithm"]
        self.correction = self.algorithm["rollout_correction"]
        if self.correction["bypass_mode"] and self.correction["loss_type"] == "reinforce":
            self.actor = self.actor | {"policy_loss": self.actor["policy_loss"] | {"loss_mode": "reinforce"}}
        self.temperature = part["rollout"]["temperature"]
        named = {"actor": part["model"]["path"], "critic": config["critic"]["model"]["path"]}
        folders = named if start is None else {role: Path(start) / role / "huggingface" for role in named}
        self.policy = load_policy(folders["actor"]).to(device)
        self.policy_optimizer = Optimizer(self.policy, self.actor["optim"])
        self.needs_reference = self.actor["use_kl_loss"] or self.algorithm["use_kl_in_reward"]
        refers = self.needs_reference and (start is None or Path(named["actor"]).is_dir())
        self.reference = load_policy(named["actor"]).to(device) if refers else None
        self.distillation = config["distillation"]
        teacher = self.distillation["teachers"].get("default")
        self.teacher = load_policy(teacher).to(device) if teacher else None
        loss = self.distillation["distillation_loss"]
        self.topk = loss["topk"] if teacher and loss["loss_mode"] == "forward_kl_topk" else 0
        self.has_critic = self.algorithm["adv_estimator"] == "gae"
        self.shares_trunk = self.has_critic and self.critic_options["share_trunk"]
        if self.has_critic:
            self.critic = (SharedCritic(self.policy) if self.shares_trunk else Critic(folders["critic"])).to(device)
            self.critic_optimizer = Optimizer(self.critic, self.critic_options["optim"])
        self.kl_coef = self.algorithm["kl_ctrl"]["kl_coef"]
        self.role_means: dict[str, float] = {}  # of rewards, by data source and role
        self.steps = 0  # finished
        self.rows: list[Row] = []  # of the last step
        self.trained_advantages: list[float] = []  # of every token, as often as the policy was updated on it

    def roles(self):
        """The model and the optimizer of each role that is trained."""
        found = {"actor": (self.policy, self.policy_optimizer)}
        return found | ({"critic": (self.critic, self.critic_optimizer)} if self.has_critic else {})

    def named_weights(self):
        """(role and name, parameter) of what is trained."""
        return [(f"{role} {name}", p) for role, (m, _) in self.roles().items() for name, p in m.named_parameters()]

    def step(self, asked):
        """One training step on all rollouts that were asked for, in order, the dropped ones included; its figures."""
        figures = rollout_figures(asked, self.config)
        rollouts = [r for r in asked if r.sequences and r.main.sampled]
        if self.algorithm["adv_estimator"] == "remax":
            greedy = list({r.uid: r.baseline for r in asked}.values())
            seen = rollout_figures(greedy, self.config).items()
            figures |= {f"baseline/{name}": value for name, value in seen if not name.startswith("tool/")}
            rollouts = [r for r in rollouts if r.baseline.sequences]
        # The main sequence, then the earlier ones in time order, as in a batch: ties in a choice of tokens keep that order.
        rows = self.rows = [Row(r, s) for r in rollouts for s in (r.main, *r.sequences[:-1]) if s.sampled]
        learned, filtered = filter_prompts(rows, asked, self.config)
        figures |= filtered
        warming_up = self.has_critic and self.steps < self.config["trainer"]["critic_warmup"]
        if rows:
            figures |= self.judge(rows) | self.describe(rows)
            if self.needs_old_log_probs:
                figures |= mismatch(rows)
            elif learned and not warming_up and self.actor["optim"]["name"] != "adamw_schedule_free":
                figures |= mismatch(next(self.mini_batches(learned, self.actor)))
            if learned and not self.correction["bypass_mode"]:
                learned, corrected = correct(learned, self.correction, together=not self.has_critic)
                figures |= corrected
        figures["training/filter_groups/kept"] = len({id(row.rollout) for row in learned}) / max(len(rollouts), 1)
        if learned and self.has_critic and (warming_up or not self.shares_trunk):
            figures |= self.update_critic(learned)
        if learned and not warming_up:
            figures |= self.update_actor(learned)
        self.steps += 1
        figures["training/global_step"] = self.steps
        figures["perf/total_num_tokens"] = sum(row.ids.numel() for row in rows)
        return figures

    @property
    def needs_old_log_probs(self):
        """Whether old log-probs are a forward pass over the batch, rather than the single update's own or the engine's."""
        several = (
            self.actor["ppo_epochs"] > 1
            or self.config["data"]["train_batch_size"] > self.actor["ppo_mini_batch_size"]
            or self.algorithm["use_kl_in_reward"]
            or self.weighs_tokens
            or self.correction["rollout_is"]
            or self.correction["rollout_rs"]
            or name_of(self.actor) in SELECTING
            or self.teacher is not None
            or self.policy_optimizer.is_free
        )
        return bool(several and not self.correction["bypass_mode"])

    @property
    def weighs_tokens(self):
        """Whether the estimator reads the policy's distributions."""
        return self.algorithm["adv_estimator"].endswith("optimal_token_baseline")

    # -- advantages ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, rows):
        """Old and reference log-probs, values, rewards, advantages and returns of every row."""
        bypass = self.correction["bypass_mode"]
        for row in rows:
            current, row.entropy = log_probs_and_entropy(self.policy, row, self.temperature)
            row.current, row.old = current, row.engine if bypass else current
            if self.needs_reference and self.reference is None:
                row.ref = as_vector(row.sequence.ref_log_probs)
            elif self.needs_reference:
                row.ref, _ = log_probs_and_entropy(self.reference, row, self.temperature)
            if self.has_critic:
                row.values = self.critic.values(row)
            if self.weighs_tokens:
                squares = (2 * log_distributions(self.policy, row, self.temperature)).exp().sum(dim=-1).cpu()
                row.norms = 1 - 2 * row.old.exp() + squares
            self.place_rewards(row)
        figures = self.charge_kl(rows) if self.algorithm["use_kl_in_reward"] else {}
        if self.has_critic:
            self.gae_advantages(rows)
        else:
            self.story_advantages(rows)
        if self.teacher is not None:
            figures |= self.ask_teacher(rows)
        for row in rows:
            row.known = {"advantages": row.advantages, "old_log_probs": row.old, "ref_log_prob": row.ref}
            row.known |= {"values": row.values} if self.has_critic else {}
            row.known |= {"entropys": row.entropy} if self.needs_old_log_probs else {}
        return figures

    def ask_teacher(self, rows):
        """Of every sampled token, how much likelier it is to the teacher; the task's advantage is mixed in. Where the
        teacher's distribution is the target, the gain is only reported."""
        gains, weights = [], self.distillation
        for row in rows:
            row.taught = log_distributions(self.teacher, row, self.temperature).cpu()
            gains.append(row.taught[torch.arange(len(row)), row.ids[0, row.sampled]] - row.old)
            gain = 0 if self.topk else weights["coef"] * gains[-1]
            row.advantages = gain + weights["task_coef"] * row.advantages
        return {"distillation/reverse_kl": -float(torch.cat(gains).mean())}

    def place_rewards(self, row):
        """Step rewards where their turn ended, whichever sequence has it, the rest on the last sampled token; with a critic
        each sequence comes to its role's total, as the last of a role does where only the main one has rewards."""
        tool, score = ((weights := self.config["reward_model"])[f"{name}_weight"] for name in ("tool_reward", "score"))
        rollout, ends = row.rollout, not row.is_main and row.rollout.ends_role(row.sequence)
        paid, carries = rollout.paid(row.sequence.role), row.is_main or (ends and rollout.rewards_by_role)
        for turn, _, value in paid.step_rewards:
            places = [place for place, its_turn in enumerate(row.turns) if its_turn == turn]
            if rollout.home(row.sequence.role, turn) is row.sequence:
                row.rewards[places[-1] if places else -1] += tool * value
        if carries:
            row.rewards[-1] += tool * sum(paid.final_rewards.values()) + score * (paid.score or 0.0)
        if self.has_critic or (ends and not carries):
            row.rewards[-1] += role_total(rollout, row.sequence.role, weights) - float(row.rewards.sum())

    def charge_kl(self, rows):
        """r_t − β KL_t, then the controller's step towards the target."""
        control = self.algorithm["kl_ctrl"]
        for row in rows:
            row.kl = kl_estimate(self.algorithm["kl_penalty"], row.old, row.ref)
            row.rewards = row.rewards - self.kl_coef * row.kl
        measured = float(torch.cat([row.kl for row in rows]).mean())
        charged = self.kl_coef
        if control["type"] == "adaptive":
            error = max(-0.2, min(0.2, measured / control["target_kl"] - 1))
            self.kl_coef *= 1 + error * sum(row.is_main for row in rows) / control["horizon"]
        return {"actor/reward_kl_penalty": measured, "actor/reward_kl_penalty_coeff": charged}

    def gae_advantages(self, rows):
        """GAE in each sequence, whitened over all tokens of the batch; returns are those before whitening, plus V."""
        options = self.algorithm
        raw = [as_vector(gae(r.rewards.tolist(), r.values.tolist(), r.turns, options)) for r in rows]
        every = torch.cat(raw)
        variance = ((every - every.mean()) ** 2).sum() / max(len(every) - 1, 1)
        for row, own in zip(rows, raw):
            row.returns = own + row.values
            row.advantages = (own - every.mean()) / (variance + 1e-8).sqrt()

    def story_advantages(self, rows):
        """Where rollouts are judged: for the tokens of all their sequences of one role, in time order."""
        parts = defaultdict(list)
        for row in rows:
            parts[id(row.rollout), row.sequence.role].append(row)
        parts = [sorted(part, key=lambda row: row.rollout.sequences.index(row.sequence)) for part in parts.values()]
        stories = [self.story(part) for part in parts]
        if self.algorithm["adv_estimator"] == "rae":
            decay = self.algorithm["adv_estimator_kwargs"].get("decay", 0.95)
            keys = [f"{part[0].rollout.source}/{part[0].sequence.role.partition('/')[0]}" for part in parts]
            running_means(keys, stories, self.role_means, decay)
        for part, *found in zip(parts, *advantages(stories, self.algorithm)):
            for row in part:
                row.advantages, row.returns = (as_vector(values[: len(row)]) for values in found)
                found = [values[len(row) :] for values in found]

    def story(self, part):
        """What an estimator is told of the rollout whose rows of one role are `part`."""
        name, numbered, _ = part[0].sequence.role.partition("/")
        if numbered and self.algorithm["adv_estimator"] == "hierarchical_grpo":  # among its own rollout's
            name += f" {id(part[0].rollout)}"
        rollout, weights = part[0].rollout, self.config["reward_model"]
        components = {
            "step": sum(value for *_, value in rollout.step_rewards),
            "final": sum(rollout.final_rewards.values()),
            "score": rollout.score,
        }
        return Story(
            f"{rollout.uid} {name}",
            torch.cat([row.rewards for row in part]).tolist(),
            [(number, turn) for number, row in enumerate(part) for turn in row.turns],
            [seen for row in part for seen in row.sequence.answered],
            torch.cat([row.norms for row in part]).tolist(),
            total_reward(rollout.baseline, weights) if rollout.baseline else 0.0,
            components,
        )

    # -- updates -------------------------------------------------------------------------------------------------

    def mini_batches(self, rows, options):
        """For each epoch, mini-batches of at most `ppo_mini_batch_size` prompts, as equal in size as can be."""
        groups = defaultdict(list)
        for row in rows:
            groups[row.rollout.uid].append(row)
        groups = list(groups.values())
        for epoch in range(options["ppo_epochs"]):
            order = np.arange(len(groups))
            if self.actor["shuffle"]:
                np.random.default_rng([self.actor["data_loader_seed"], self.steps, epoch]).shuffle(order)
            for part in np.array_split(order, math.ceil(len(groups) / options["ppo_mini_batch_size"])):
                yield [row for number in part for row in groups[number]]

    def rate(self, options, first):
        """The learning rate of this step, where `first` is the first step that updates the model."""
        return schedule(options, self.steps - first, self.config["trainer"]["total_training_steps"] - first)

    def update_actor(self, rows):
        """The policy's epochs."""
        actor, meter, taught, mode, seen = self.actor, Meter(), Meter(), aggregation_of(self.actor), []
        chance, valued, centred = math.log(self.policy.config.get_text_config().vocab_size), Meter(), Meter()
        scale = actor["loss_scale_factor"] or self.config["data"]["max_response_length"]
        lr = self.rate(actor["optim"], self.config["trainer"]["critic_warmup"] if self.has_critic else 0)
        for batch in self.mini_batches(rows, actor):
            total = pg_total = vf_total = 0.0
            self.policy_optimizer.begin()
            if self.shares_trunk:
                self.critic_optimizer.begin()
            select(actor, batch)
            weighed = zip(batch, token_weights(mode, batch, scale), self.value_weights(batch))
            for row, weight, value_weight in weighed:
                log_probs, entropy = log_probs_and_entropy(self.policy, row, self.temperature)
                own = {} if self.needs_old_log_probs else {"entropys": entropy.detach()}
                row.known |= own | {"log_probs": log_probs.detach()}
                losses, flags = plain_policy_loss(actor, log_probs, row)
                weights, snapshot = loss_weights(log_probs, row, self.correction)
                losses = weights * losses
                seen.append(snapshot)
                self.trained_advantages += row.advantages.tolist()
                pg_total += weight * float(losses.detach().sum())
                if self.correction["score_centering_topk"]:
                    ours = log_distributions(self.policy, row, self.temperature).cpu()
                    scores, sizes = centre(ours, row.heads, self.correction)
                    losses = losses + row.advantages * snapshot.learned * scores
                    centred.add(**sizes)
                losses = losses - actor["entropy_coeff"] * entropy
                if actor["use_kl_loss"]:
                    kl = kl_estimate(actor["kl_loss_type"], log_probs, row.ref)
                    losses = losses + actor["kl_loss_coef"] * kl
                    meter.add(kl_loss=kl)
                if self.topk:
                    ours = log_distributions(self.policy, row, self.temperature).cpu()
                    distance, masses = forward_kl(row.taught, ours, self.topk)
                    losses = losses + self.distillation["coef"] * distance
                    taught.add(forward_kl=distance, **masses)
                loss = weight * losses.sum()
                if self.shares_trunk:
                    of_values = value_weight * self.value_losses(row, self.critic.values(row, True), valued).sum()
                    loss = loss + self.critic_options["vf_coef"] * of_values
                    vf_total += float(of_values.detach())
                loss.backward()
                total += float(loss.detach())
                ppo_kl = (row.old - log_probs).clamp(-20, 20)
                meter.add(entropy=entropy, entropy_share=entropy / chance, ppo_kl=ppo_kl, **flags)
            meter.add(**self.policy_optimizer.step(lr))
            meter.add(counted_by(mode, batch), loss=total, pg_loss=pg_total)
            if self.shares_trunk:
                self.step_critic(batch, valued, vf_total)
        valued = valued.means("critic") if self.shares_trunk else {}
        valued |= centred.means("rollout_corr")
        return meter.means("actor") | valued | taught.means("distillation") | figures_of(seen, self.correction)

    def update_critic(self, rows):
        """In its own epochs and mini-batches; a head on the policy's trunk alone, while it warms up."""
        meter = Meter()
        for batch in self.mini_batches(rows, self.critic_options):
            total = 0.0
            self.critic_optimizer.begin()
            for row, weight in zip(batch, self.value_weights(batch)):
                loss = weight * self.value_losses(row, self.critic.values(row), meter).sum()
                loss.backward()
                total += float(loss.detach())
            self.step_critic(batch, meter, total)
        return meter.means("critic")

    def value_weights(self, batch):
        """The weight of each row's value losses."""
        return token_weights(self.critic_options["loss_agg_mode"], batch, self.config["data"]["max_response_length"])

    def value_losses(self, row, values, meter):
        """(T,) 0.5 · max((v − R)², (clip(v, v_old ± c) − R)²)."""
        reach = self.critic_options["cliprange_value"]
        near = torch.clamp(values, row.values - reach, row.values + reach)
        plain, bounded = (values - row.returns) ** 2, (near - row.returns) ** 2
        meter.add(vf_clipfrac=bounded > plain, vpred_mean=values)
        return 0.5 * torch.maximum(plain, bounded)

    def step_critic(self, batch, meter, total):
        """The critic's step, and its figures."""
        options = self.critic_options
        lr = self.rate(options["optim"], 0)
        meter.add(**self.critic_optimizer.step(lr))
        meter.add(counted_by(options["loss_agg_mode"], batch), vf_loss=total)

    # -- figures -------------------------------------------------------------------------------------------------

    def describe(self, rows):
        """Scores and rewards a rollout, lengths a sequence, the rest a token."""
        main = [row for row in rows if row.is_main]
        figures = spread("critic/score", [total_reward(row.rollout, self.config["reward_model"]) for row in main])
        figures |= spread("critic/rewards", self.seen_rewards(rows))
        for name in ("advantages", "returns", *(["values"] if self.has_critic else [])):
            figures |= spread(f"critic/{name}", torch.cat([getattr(row, name) for row in rows]).tolist())
        if self.has_critic:
            returns, values = (torch.cat([getattr(row, name) for row in rows]) for name in ("returns", "values"))
            variance = returns.var(unbiased=False)
            if variance > 1e-12 * (returns**2 + values**2).mean():
                figures["critic/vf_explained_var"] = 1 - float((returns - values).var(unbiased=False) / variance)
        lengths, prompts = ([len(getattr(row.sequence, name)) for row in rows] for name in ("response", "prompt"))
        figures |= spread("response_length", lengths) | spread("prompt_length", prompts)
        figures |= role_figures(rows, self.config["reward_model"], self.role_means)
        limit = self.config["data"]["max_response_length"]
        figures["response_length/clip_ratio"] = float(np.mean([length >= limit for length in lengths]))
        return figures

    def seen_rewards(self, rows):
        """A rollout's reward after the KL penalty: with a critic that of its main sequence's episode."""
        found = defaultdict(float)
        for row in rows:
            counts = row.is_main or not (self.has_critic or row.sequence.role != row.rollout.main.role)
            found[id(row.rollout)] += float(row.rewards.sum()) if counts else 0.0
        return list(found.values())


class Meter:
    """Sums and counts by name; a figure is their quotient."""

    def __init__(self):
        self.sums, self.counts = defaultdict(float), defaultdict(float)

    def add(self, weight=1.0, **values):
        """Numbers, or a vector of one number a token; each counts `weight`."""
        for name, value in values.items():
            flat = torch.as_tensor(value, dtype=torch.float64).detach().flatten()
            self.sums[name] += weight * float(flat.sum())
            self.counts[name] += weight * len(flat)

    def means(self, prefix):
        """The figures, and how many optimizer steps they are of."""
        found = {f"{prefix}/{name}": total / self.counts[name] for name, total in self.sums.items()}
        updates = {"optimizer_steps": self.counts["lr"], "skipped_steps": 0} if "lr" in self.counts else {}
        return found | {f"{prefix}/{name}": number for name, number in updates.items()}
