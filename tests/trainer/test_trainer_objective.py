"""Every term of the objective, from its option to the gradient: whole training steps against plain formulas.

A row at a time through Transformers' own eager forward, in float64: a wrong sign, scale or mask anywhere between the
configuration and `backward` shows in the gradient that the optimizer gets.
"""

import copy
import math

import pytest
import torch
from house_stage import ACTOR, ROLLOUT

from etude.errors import TrainingStopped
from etude.trainer.interrupts import Interrupts
from etude.trainer.ppo import PPOTrainer
from etude.trainer.rollouts import Rollouts, rollouts_of
from etude.trainer.setup import prepare

LENGTH = 72  # data.max_response_length of the tiny runs


class Step:
    """One training step: its figures, the batches learned from, and each optimizer step's weights and gradients."""

    def __init__(self, tiny, folder, *overrides, drift=0.02, engine_error=0.0):
        self.trainer = PPOTrainer(*prepare(tiny.config(folder, *overrides)))
        self.trainer.init_workers()
        worker = self.trainer.groups.actor._workers[0]
        self.reference = plain(worker.model)
        drift_apart(worker.model, drift)
        self.trainer.groups.rollout.update_weights(0)  # the engine forgets what it cached
        self.policy = plain(worker.model)
        self.actor_batches, self.actor_steps = watch(self.trainer, "_update_actor", worker._actor)
        self.critic_batches, self.critic_steps = [], []
        if self.trainer.groups.critic is not None:
            critic = self.trainer.groups.critic._workers[0]
            drift_apart(critic.model, 0.05)
            self.critic_batches, self.critic_steps = watch(self.trainer, "_update_critic", critic._engine)
        rollouts, expand = self.trainer.rollouts, self.trainer._expand
        generate = rollouts.generate
        self.rollouts = []  # that are trained on, a row each
        self.trainer._expand = lambda taken: self.rollouts.extend(rollouts_of(taken.batch)) or expand(taken)

        def with_error(prompts):
            rolled, engine = generate(prompts)
            rolled.batch["rollout_log_probs"] += engine_error
            return rolled, engine

        rollouts.generate = with_error
        self.figures = self.trainer.training_step(Interrupts(lambda text: None))


def drift_apart(model, scale):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def plain(model):
    """A copy in float64 that runs as Transformers does by default."""
    made = copy.deepcopy(model).double()
    getattr(made, "backbone", made).set_attn_implementation("eager")
    return made


def watch(trainer, name, engine):
    """(batches, [(model, gradients) of each optimizer step]) of the trainer's calls of `name`."""
    batches, steps, update, step = [], [], getattr(trainer, name), engine.optimizer.step

    def stepping():
        gradients = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
        steps.append((plain(engine.model), gradients))
        return step()

    setattr(trainer, name, lambda data: batches.append(data) or update(data))
    engine.optimizer.step = stepping
    return batches, steps


def outputs(model, batch, temperature=1.0):
    """(rows, response_len) log-probs and entropies of the sampled tokens, or the values before them, a row at a time."""
    columns = batch.batch
    mask = columns["response_mask"].bool()
    width = mask.shape[1]
    found = [torch.zeros(mask.shape, dtype=torch.float64) for _ in range(2)]
    for row in range(len(batch)):
        kept = columns["attention_mask"][row].bool()
        ids, prompt = columns["input_ids"][row][kept][None], int(kept[:-width].sum())
        places = mask[row].nonzero().flatten()
        before = prompt + places - 1
        if hasattr(model, "backbone"):
            found[0][row, places] = model.head(model.backbone(input_ids=ids).last_hidden_state)[0, before, 0]
            continue
        logs = (model(input_ids=ids).logits[0, before] / temperature).log_softmax(dim=-1)
        found[0][row, places] = logs.gather(1, ids[0, before + 1, None])[:, 0]
        found[1][row, places] = -(logs.exp() * logs).sum(dim=-1)
    return found


def sums_of_squares(model, batch, temperature):
    """(rows, response_len) Σ p² of the distributions that the sampled tokens were drawn from, a row at a time."""
    mask, width = batch.batch["response_mask"].bool(), batch.batch["response_mask"].shape[1]
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(batch)):
        kept = batch.batch["attention_mask"][row].bool()
        places = mask[row].nonzero().flatten()
        with torch.no_grad():
            logits = model(input_ids=batch.batch["input_ids"][row][kept][None]).logits[0]
        before = int(kept[:-width].sum()) + places - 1
        found[row, places] = (logits[before] / temperature).softmax(dim=-1).square().sum(dim=-1)
    return found


def aggregate(losses, mask, mode, length=LENGTH):
    rows = [row[kept] for row, kept in zip(losses, mask.bool()) if kept.any()]
    total = sum(row.sum() for row in rows)
    return {
        "token-mean": lambda: total / int(mask.sum()),
        "token-sum": lambda: total,
        "seq-mean-token-sum": lambda: total / len(rows),
        "seq-mean-token-sum-norm": lambda: total / len(rows) / length,
        "seq-mean-token-mean": lambda: sum(row.mean() for row in rows) / len(rows),
    }[mode]()


KL = {
    "low_var_kl": lambda d: torch.exp(-d) - 1 + d,
    "k2": lambda d: d * d / 2,
    "abs": abs,
    "kl+": lambda d: d.detach() + (d * d - (d * d).detach()) / 2,
}


def objective(batch, log_probs, entropy, old, reference, *, low=0.2, high=0.2, dual=3.0, kind=None, kl=0.0, bonus=0.0):
    """(rows, response_len) policy losses, and those with entropy bonus and KL."""
    advantages, ratio = batch.batch["advantages"], torch.exp(log_probs - old)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    losses = torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
    whole = losses - bonus * entropy
    return losses, whole if kind is None else whole + kl * KL[kind](log_probs - reference)


def assert_gradients(ours, model):
    scale = max(float(p.grad.abs().max()) for p in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name].double(), parameter.grad, rtol=2e-3, atol=2e-4 * scale, msg=name)


CASES = {
    "mean": ([], {}),
    **{
        mode: ([f"{ACTOR}.loss_agg_mode={mode}"], {"mode": mode})
        for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
    },
    "a divisor of one's own": (
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=10"],
        {"mode": "seq-mean-token-sum-norm", "length": 10},
    ),
    **{
        f"kl {kind}": (
            [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.7", f"{ACTOR}.kl_loss_type={kind}"],
            {"kind": kind, "kl": 0.7},
        )
        for kind in KL
    },
    "entropy": ([f"{ACTOR}.entropy_coeff=0.3"], {"bonus": 0.3}),
    "temperature": (
        [
            f"{ROLLOUT}.temperature=0.7",
            f"{ACTOR}.entropy_coeff=0.3",
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.kl_loss_coef=0.7",
        ],
        {"bonus": 0.3, "temperature": 0.7, "kind": "low_var_kl", "kl": 0.7},
    ),
    "all": (
        [
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.kl_loss_coef=0.5",
            f"{ACTOR}.kl_loss_type=k2",
            f"{ACTOR}.entropy_coeff=-0.2",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            f"{ACTOR}.ppo_max_token_len_per_gpu=100",  # several micro-batches
        ],
        {"kind": "k2", "kl": 0.5, "bonus": -0.2, "mode": "seq-mean-token-mean"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_a_step_is_that_of_the_written_objective(tiny, tmp_path, case):
    overrides, given = CASES[case]
    mode, temperature = given.get("mode", "token-mean"), given.get("temperature", 1.0)
    step = Step(tiny, tmp_path, *overrides)
    (batch,), ((model, gradients),) = step.actor_batches, step.actor_steps
    mask = batch.batch["response_mask"]
    assert mask.shape[1] != LENGTH  # else the longest answer of the step would do for the longest allowed
    log_probs, entropy = outputs(model, batch, temperature)
    with torch.no_grad():
        reference, _ = outputs(step.reference, batch, temperature)
    terms = {name: value for name, value in given.items() if name in ("kind", "kl", "bonus")}
    losses, whole = objective(batch, log_probs, entropy, log_probs.detach(), reference, **terms)
    length = given.get("length", LENGTH)
    loss = aggregate(whole, mask, mode, length)
    loss.backward()
    assert_gradients(gradients, model)
    figures = step.figures
    assert figures["actor/loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-5)
    assert figures["actor/pg_loss"] == pytest.approx(
        float(aggregate(losses, mask, mode, length).detach()), rel=1e-4, abs=1e-5
    )
    assert figures["actor/entropy"] == pytest.approx(float(entropy.detach()[mask.bool()].mean()), rel=1e-4)
    if "kind" in given:
        distance = KL[given["kind"]](log_probs.detach() - reference)[mask.bool()].mean()
        assert figures["actor/kl_loss"] == pytest.approx(float(distance), rel=1e-3)


CLIPS = {
    "one bound for both": ([f"{ACTOR}.clip_ratio=0.05"], {"low": 0.05, "high": 0.05}),
    "two bounds": ([f"{ACTOR}.clip_ratio_low=0.02", f"{ACTOR}.clip_ratio_high=0.4"], {"low": 0.02, "high": 0.4}),
    "dual clip": ([f"{ACTOR}.clip_ratio_high=0.01", f"{ACTOR}.clip_ratio_c=1.02"], {"high": 0.01, "dual": 1.02}),
}


@pytest.mark.parametrize("case", CLIPS)
def test_the_second_update_is_clipped_around_the_policy_that_sampled(tiny, tmp_path, case):
    overrides, bounds = CLIPS[case]
    step = Step(tiny, tmp_path, *overrides, f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=5e-3")
    batch, (_, (model, gradients)) = step.actor_batches[0], step.actor_steps
    mask = batch.batch["response_mask"].bool()
    with torch.no_grad():
        old, _ = outputs(step.policy, batch)
    torch.testing.assert_close(batch.batch["old_log_probs"].double()[mask], old[mask], rtol=0, atol=1e-4)
    log_probs, entropy = outputs(model, batch)
    losses, _ = objective(batch, log_probs, entropy, batch.batch["old_log_probs"].double(), None, **bounds)
    aggregate(losses, mask, "token-mean").backward()
    ratio = (log_probs - old).exp().detach()[mask]
    assert float(ratio.max()) > 1 + bounds["high"] if case != "two bounds" else float(ratio.min()) < 1 - bounds["low"]
    assert_gradients(gradients, model)
    assert step.figures["actor/optimizer_steps"] == 2
    assert step.figures["actor/pg_clipfrac"] > 0


def test_bypass_mode_takes_the_engines_log_probs_for_the_old_ones(tiny, tmp_path):
    step = Step(tiny, tmp_path, "algorithm.rollout_correction.bypass_mode=true", engine_error=0.1)
    (batch,), ((model, gradients),) = step.actor_batches, step.actor_steps
    log_probs, entropy = outputs(model, batch)
    engine = torch.tensor([result.trajectory.response_log_probs[0] for result in step.rollouts])
    torch.testing.assert_close(batch.batch["old_log_probs"][:, 0], engine + 0.1)
    losses, _ = objective(batch, log_probs, entropy, batch.batch["old_log_probs"].double(), None)
    assert step.figures["actor/ppo_kl"] == pytest.approx(0.1, abs=1e-4)
    assert step.figures["training/rollout_probs_diff_mean"] > 0.01
    aggregate(losses, batch.batch["response_mask"], "token-mean").backward()
    assert_gradients(gradients, model)


@pytest.mark.parametrize("several", [False, True], ids=["one update", "two updates"])
def test_the_engine_is_held_against_the_actor_in_every_step(tiny, tmp_path, several):
    step = Step(tiny, tmp_path, f"{ACTOR}.ppo_epochs={1 + several}", engine_error=-0.2)
    (batch,) = step.actor_batches
    mask = batch.batch["response_mask"].bool()
    with torch.no_grad():
        actor = outputs(step.policy, batch)[0][mask].exp()
    difference = (actor - batch.batch["rollout_log_probs"][mask].double().exp()).abs()
    assert step.figures["training/rollout_probs_diff_max"] == pytest.approx(float(difference.max()), rel=1e-3)
    assert step.figures["training/rollout_probs_diff_mean"] == pytest.approx(float(difference.mean()), rel=1e-3)
    assert ("old_log_probs" in batch.batch) == several
    if not several:  # its own log-probs are the old ones, and not the engine's
        assert step.figures["actor/ppo_kl"] == step.figures["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("kind", ["kl", "low_var_kl"])
@pytest.mark.parametrize("engine_error", [0.0, -0.3])
def test_the_reward_loses_the_kl_of_the_trainers_own_log_probs(tiny, tmp_path, kind, engine_error):
    """Whatever the engine says."""
    control = ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.5", "algorithm.kl_ctrl.horizon=100")
    step = Step(
        tiny,
        tmp_path,
        "algorithm.use_kl_in_reward=true",
        f"algorithm.kl_penalty={kind}",
        *control,
        engine_error=engine_error,
    )
    (batch,) = step.actor_batches
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    with torch.no_grad():
        difference = outputs(step.policy, batch)[0] - outputs(step.reference, batch)[0]
    penalty = torch.where(mask, difference if kind == "kl" else KL[kind](difference), 0.0)
    assert float(penalty.abs().max()) > 0.05
    expected = columns["token_level_scores"] - 0.5 * penalty
    torch.testing.assert_close(columns["token_level_rewards"], expected, rtol=0, atol=2e-4)
    assert columns["token_level_rewards"].dtype == columns["advantages"].dtype == torch.float64
    groups = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"].tolist()):
        groups.setdefault(uid, []).append(row)
    for rows in groups.values():
        totals = columns["token_level_rewards"][rows].sum(dim=1)
        worth = (totals - totals.mean()) / (totals.std() + 1e-6)
        torch.testing.assert_close(columns["advantages"][rows], worth[:, None] * mask[rows], rtol=1e-9, atol=1e-9)
    distance = float(penalty[mask].mean())
    assert step.figures["actor/reward_kl_penalty"] == pytest.approx(distance, rel=1e-3, abs=1e-5)
    assert step.figures["actor/reward_kl_penalty_coeff"] == 0.5
    factor = 1 + max(-0.2, min(0.2, distance / 0.1 - 1)) * len(batch) / 100
    assert step.trainer.kl_coef == pytest.approx(0.5 * factor, rel=1e-4)


def test_advantages_without_the_division_are_the_centred_scores(tiny, tmp_path):
    step = Step(tiny, tmp_path, "algorithm.norm_adv_by_std_in_grpo=false")
    (batch,) = step.actor_batches
    totals = batch.batch["token_level_scores"].sum(dim=1).view(2, 4)  # two prompts, four answers each
    assert float(totals.std()) > 0.01
    centred = (totals - totals.mean(dim=1, keepdim=True)).view(8, 1)
    torch.testing.assert_close(batch.batch["advantages"], centred * batch.batch["response_mask"])


def test_a_policy_that_is_the_reference_pays_nothing_whatever_the_engine_says(tiny, tmp_path):
    step = Step(tiny, tmp_path, "algorithm.use_kl_in_reward=true", drift=0.0, engine_error=-0.2)
    columns = step.actor_batches[0].batch
    torch.testing.assert_close(columns["token_level_rewards"], columns["token_level_scores"], rtol=0, atol=1e-6)
    assert step.figures["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-5)
    assert step.figures["training/rollout_probs_diff_max"] > 0.02  # the engine's differ


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_the_critics_gradient_is_that_of_the_clipped_value_loss(tiny, tmp_path, mode):
    step = Step(
        tiny,
        tmp_path,
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.8",
        "critic.ppo_epochs=2",
        "critic.cliprange_value=0.02",
        "critic.optim.lr=3e-3",
        f"critic.loss_agg_mode={mode}",
    )
    (batch,), ((first, gradients), (second, later)) = step.critic_batches, step.critic_steps
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    with torch.no_grad():
        values = torch.where(mask, outputs(first, batch)[0], 0.0)
    torch.testing.assert_close(columns["values"].double(), values, rtol=1e-3, atol=1e-4)
    returns = torch.zeros_like(values)
    advantages = torch.zeros_like(values)
    for row in range(len(batch)):
        following, carried = 0.0, 0.0
        for place in reversed(mask[row].nonzero().flatten().tolist()):
            delta = float(columns["token_level_rewards"][row, place]) + 0.9 * following - float(values[row, place])
            carried, following = delta + 0.9 * 0.8 * carried, float(values[row, place])
            advantages[row, place] = carried
            returns[row, place] = carried + following
    torch.testing.assert_close(columns["returns"], returns, rtol=1e-3, atol=1e-4)
    found = advantages[mask]
    torch.testing.assert_close(columns["advantages"][mask], (found - found.mean()) / found.std(), rtol=1e-3, atol=1e-3)
    losses = []
    for model, ours in ((first, gradients), (second, later)):
        now = outputs(model, batch)[0]
        bounded = torch.minimum(torch.maximum(now, values - 0.02), values + 0.02)
        worst = torch.maximum((now - returns) ** 2, (bounded - returns) ** 2) / 2
        losses.append(aggregate(worst, mask, mode))
        losses[-1].backward()
        assert_gradients(ours, model)
    assert step.figures["critic/vf_clipfrac"] > 0
    assert step.figures["critic/vf_loss"] == pytest.approx(float(sum(losses).detach()) / 2, rel=1e-3)


def test_a_loss_of_ones_own_and_its_options_arrive(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from etude.algorithms import POLICY_LOSSES, agg_loss\n"
        "@POLICY_LOSSES.register('objective_test')\n"
        "def mine(*, log_prob, advantages, response_mask, loss_agg_mode, clip_ratio_c, batch_num_tokens, **_):\n"
        "    assert advantages.dtype == log_prob.dtype\n"
        "    losses = -3.0 * advantages * log_prob\n"
        "    loss = agg_loss(losses, response_mask, loss_agg_mode, batch_num_tokens=batch_num_tokens)\n"
        "    return loss, {'actor/c': clip_ratio_c}\n"
    )
    agent = f"plugins=[{tiny.folder}/agent.py,{tmp_path}/mine.py]"
    loss = (f"{ACTOR}.policy_loss.loss_mode=objective_test", f"{ACTOR}.clip_ratio_c=7")
    step = Step(tiny, tmp_path, agent, *loss)
    (batch,), ((model, gradients),) = step.actor_batches, step.actor_steps
    log_probs, _ = outputs(model, batch)
    aggregate(-3.0 * batch.batch["advantages"] * log_probs, batch.batch["response_mask"], "token-mean").backward()
    assert_gradients(gradients, model)
    assert step.figures["actor/c"] == pytest.approx(7)
    assert math.isfinite(step.figures["actor/loss"])


# -- estimators and losses of a user's, each in one file -----------------------------------------------------------


def of_ones_own(tiny, folder, code):
    (folder / "own.py").write_text("import torch\nfrom etude.algorithms import *\n" + code)
    return f"plugins=[{tiny.folder}/agent.py,{folder}/own.py]"


GREEDY = """
@register_estimator("objective_greedy", needs={"reward_baselines"})
def greedy(*, token_level_rewards, response_mask, reward_baselines, scale=1.0):
    worth = scale * (token_level_rewards.sum(dim=1) - reward_baselines)[:, None] * response_mask
    return worth, worth
"""


def test_an_estimator_of_ones_own_gets_a_greedy_rollout_of_each_prompt(tiny, tmp_path, monkeypatch):
    greedy = []
    add = Rollouts.with_baselines
    monkeypatch.setattr(Rollouts, "with_baselines", lambda *given: greedy.append(given[2]) or add(*given))
    own = ("algorithm.adv_estimator=objective_greedy", "algorithm.adv_estimator_kwargs={scale:2.5}")
    step = Step(tiny, tmp_path, of_ones_own(tiny, tmp_path, GREEDY), *own)
    (made,), (batch,) = greedy, step.actor_batches
    decode, baselines = step.trainer.setup.tokenizer.decode, []
    for result in rollouts_of(made):
        made = result.trajectory
        sampled = torch.tensor(made.response_mask).bool()
        with torch.no_grad():
            ids = torch.tensor([made.prompt_ids + made.response_ids])
            logits = step.policy(input_ids=ids).logits[0, len(made.prompt_ids) - 1 : -1][sampled]
        drawn = logits.gather(1, torch.tensor(made.response_ids)[sampled, None])[:, 0]
        torch.testing.assert_close(drawn, logits.amax(dim=1), rtol=0, atol=1e-4)
        baselines.append(sum(decode(made.response_ids).count(digit) for digit in "02468") / 8)
    assert len(baselines) == 2
    columns, mask = batch.batch, batch.batch["response_mask"]
    of_rows = torch.tensor(baselines, dtype=torch.float64).repeat_interleave(4)  # rollout.n
    worth = 2.5 * (columns["token_level_scores"].sum(dim=1) - of_rows)
    torch.testing.assert_close(columns["advantages"], worth[:, None] * mask, rtol=0, atol=1e-12)
    (model, gradients) = step.actor_steps[0]
    log_probs, entropy = outputs(model, batch)
    losses, _ = objective(batch, log_probs, entropy, log_probs.detach(), None)
    aggregate(losses, mask, "token-mean").backward()
    assert_gradients(gradients, model)
    scores = [result.trajectory.rewards.total() for result in step.rollouts]
    assert step.figures["baseline/reward/total/mean"] == pytest.approx(sum(baselines) / 2)
    assert step.figures["reward/total/mean"] == pytest.approx(sum(scores) / 8)  # of what is trained on alone
    assert len((tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()) == len(batch) == 8


BREAKS = """
from etude.agents import ToolAgentLoop, register
from etude.errors import InfrastructureError

@register("objective_breaks")
class Breaks(ToolAgentLoop):
    async def run(self, sampling_params, **row):
        if row["rollout_index"] == 8:  # of two prompts with four answers each, the first greedy one
            raise InfrastructureError("the test breaks this one")
        return await super().run(sampling_params, **row)
"""


def test_a_prompt_whose_baseline_broke_teaches_nothing(tiny, tmp_path):
    own = of_ones_own(tiny, tmp_path, BREAKS + GREEDY.replace("objective_greedy", "objective_broken"))
    loop = (f"{ROLLOUT}.agent.default_agent_loop=objective_breaks", "algorithm.adv_estimator=objective_broken")
    step = Step(tiny, tmp_path, own, *loop)
    (batch,) = step.actor_batches
    assert set(batch.non_tensor_batch["uid"]) == {"1.0-1"}
    assert step.figures["baseline/rollout/dropped"] == 1
    assert step.figures["rollout/dropped"] == 0
    with pytest.raises(TrainingStopped, match=r"1 of 2 trajectories .*the test breaks this one"):
        Step(tiny, tmp_path, own, *loop, "trainer.min_valid_fraction=0.8")


SQUARES = """
@register_estimator("objective_squares", needs={"sum_pi_squared", "old_log_probs"})
def squares(*, token_level_rewards, response_mask, sum_pi_squared, old_log_probs):
    weight = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    advantages = token_level_rewards.sum(dim=1, keepdim=True) * weight * response_mask
    return advantages, advantages

@register_policy_loss("objective_squares", needs={"sum_pi_squared", "ref_log_prob"})
def weighted(*, log_prob, ref_log_prob, advantages, response_mask, loss_agg_mode, sum_pi_squared, batch_num_tokens,
             strength):
    losses = -advantages * (1 + strength * sum_pi_squared) * log_prob + (log_prob - ref_log_prob) ** 2
    return agg_loss(losses, response_mask, loss_agg_mode, batch_num_tokens=batch_num_tokens), {}
"""


@pytest.mark.parametrize("of", ["estimator", "loss"])
def test_what_a_record_needs_of_the_policy_is_computed(tiny, tmp_path, of):
    name = f"objective_squares_{of}"
    loss = (f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.policy_loss.loss_kwargs={{strength:3}}")
    chosen = (f"algorithm.adv_estimator={name}",) if of == "estimator" else loss
    more = (f"{ROLLOUT}.temperature=0.7", f"{ACTOR}.ppo_max_token_len_per_gpu=100")
    own = of_ones_own(tiny, tmp_path, SQUARES.replace("objective_squares", name))
    step = Step(tiny, tmp_path, own, *chosen, *more)
    (batch,), ((model, gradients),) = step.actor_batches, step.actor_steps
    columns, mask = batch.batch, batch.batch["response_mask"]
    squares = sums_of_squares(step.policy, batch, 0.7)
    torch.testing.assert_close(columns["sum_pi_squared"].double(), squares, rtol=1e-4, atol=1e-5)
    log_probs, entropy = outputs(model, batch, 0.7)
    if of == "estimator":
        weight = (1 - 2 * log_probs.detach().exp() + squares) * mask
        expected = columns["token_level_rewards"].sum(dim=1, keepdim=True) * weight
        torch.testing.assert_close(columns["advantages"], expected, rtol=1e-3, atol=1e-4)
        losses, _ = objective(batch, log_probs, entropy, log_probs.detach(), None)
        assert "ref_log_prob" not in columns
    else:
        with torch.no_grad():
            reference, _ = outputs(step.reference, batch, 0.7)
        losses = -columns["advantages"] * (1 + 3 * squares) * log_probs + (log_probs - reference) ** 2
    aggregate(losses, mask, "token-mean").backward()
    assert_gradients(gradients, model)


def test_an_estimator_that_needs_values_has_a_critic(tiny, tmp_path):
    own = """
@register_estimator("objective_values", needs={"values"})
def values(*, token_level_rewards, response_mask, values, gamma):
    returns = token_level_rewards.sum(dim=1, keepdim=True) * gamma * response_mask
    return (returns - values) * response_mask, returns
"""
    chosen = ("algorithm.adv_estimator=objective_values", "algorithm.gamma=0.5", "trainer.critic_warmup=1")
    step = Step(tiny, tmp_path, of_ones_own(tiny, tmp_path, own), *chosen)
    (batch,), columns = step.critic_batches, step.critic_batches[0].batch
    mask = columns["response_mask"].bool()
    with torch.no_grad():
        expected = torch.where(mask, outputs(step.critic_steps[0][0], batch)[0], 0.0)
    torch.testing.assert_close(columns["values"].double(), expected, rtol=1e-3, atol=1e-4)
    returns = 0.5 * columns["token_level_scores"].sum(dim=1, keepdim=True) * mask
    torch.testing.assert_close(columns["advantages"], returns - expected, rtol=1e-3, atol=1e-4)
    assert step.actor_batches == []  # warming up
