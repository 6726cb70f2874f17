"""Terms of the objective, a user's among them, from their option to the gradient: whole training steps against plain
formulas.

A row at a time through Transformers' own eager forward, in float64: a wrong sign, scale or mask anywhere between the
configuration and `backward` shows in the gradient that the optimizer gets. Every other key of the objective is drawn in
`tests/reference`.
"""

import copy

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

    def __init__(self, tiny, folder, *overrides):
        self.trainer = PPOTrainer(*prepare(tiny.config(folder, *overrides)))
        self.trainer.init_workers()
        worker = self.trainer.groups.actor._workers[0]
        self.reference = plain(worker.model)
        drift_apart(worker.model, 0.02)
        self.trainer.groups.rollout.update_weights(0)  # the engine forgets what it cached
        self.policy = plain(worker.model)
        self.actor_batches, self.actor_steps = watch(self.trainer, "_update_actor", worker._actor)
        self.critic_batches, self.critic_steps = [], []
        if self.trainer.groups.critic is not None:
            critic = self.trainer.groups.critic._workers[0]
            drift_apart(critic.model, 0.05)
            self.critic_batches, self.critic_steps = watch(self.trainer, "_update_critic", critic._engine)
        expand = self.trainer._expand
        self.rollouts = []  # that are trained on, a row each
        self.trainer._expand = lambda taken: self.rollouts.extend(rollouts_of(taken.batch)) or expand(taken)
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


def aggregate(losses, mask, mode="token-mean"):
    rows = [row[kept] for row, kept in zip(losses, mask.bool()) if kept.any()]
    total = sum(row.sum() for row in rows)
    return {
        "token-mean": lambda: total / int(mask.sum()),
        "seq-mean-token-sum-norm": lambda: total / len(rows) / LENGTH,
        "seq-mean-token-mean": lambda: sum(row.mean() for row in rows) / len(rows),
    }[mode]()


KL = {
    "low_var_kl": lambda d: torch.exp(-d) - 1 + d,
    "k2": lambda d: d * d / 2,
}


def objective(batch, log_probs, entropy, old, reference, *, high=0.2, dual=3.0, kind=None, kl=0.0, bonus=0.0):
    """(rows, response_len) policy losses, and those with entropy bonus and KL."""
    advantages, ratio = batch.batch["advantages"], torch.exp(log_probs - old)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1 + high) * advantages)
    losses = torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
    whole = losses - bonus * entropy
    return losses, whole if kind is None else whole + kl * KL[kind](log_probs - reference)


def assert_gradients(ours, model):
    scale = max(float(p.grad.abs().max()) for p in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name].double(), parameter.grad, rtol=2e-3, atol=2e-4 * scale, msg=name)


CASES = {
    "policy": ([], {}),
    "over the longest allowed": (
        [
            f"{ROLLOUT}.temperature=0.7",
            f"{ACTOR}.entropy_coeff=0.3",
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.kl_loss_coef=0.7",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        ],
        {"bonus": 0.3, "temperature": 0.7, "kind": "low_var_kl", "kl": 0.7, "mode": "seq-mean-token-sum-norm"},
    ),
    "in several micro-batches": (
        [
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.kl_loss_coef=0.5",
            f"{ACTOR}.kl_loss_type=k2",
            f"{ACTOR}.entropy_coeff=-0.2",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            f"{ACTOR}.ppo_max_token_len_per_gpu=100",
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
    loss = aggregate(whole, mask, mode)
    loss.backward()
    assert_gradients(gradients, model)
    figures = step.figures
    assert figures["actor/loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-5)
    assert figures["actor/pg_loss"] == pytest.approx(float(aggregate(losses, mask, mode).detach()), rel=1e-4, abs=1e-5)
    assert figures["actor/entropy"] == pytest.approx(float(entropy.detach()[mask.bool()].mean()), rel=1e-4)
    if "kind" in given:
        distance = KL[given["kind"]](log_probs.detach() - reference)[mask.bool()].mean()
        assert figures["actor/kl_loss"] == pytest.approx(float(distance), rel=1e-3)


def test_the_second_update_is_clipped_around_the_policy_that_sampled(tiny, tmp_path):
    bounds = (f"{ACTOR}.clip_ratio_high=0.01", f"{ACTOR}.clip_ratio_c=1.02")
    step = Step(tiny, tmp_path, *bounds, f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=5e-3")
    batch, (_, (model, gradients)) = step.actor_batches[0], step.actor_steps
    mask = batch.batch["response_mask"].bool()
    with torch.no_grad():
        old, _ = outputs(step.policy, batch)
    torch.testing.assert_close(batch.batch["old_log_probs"].double()[mask], old[mask], rtol=0, atol=1e-4)
    log_probs, entropy = outputs(model, batch)
    losses, _ = objective(batch, log_probs, entropy, batch.batch["old_log_probs"].double(), None, high=0.01, dual=1.02)
    aggregate(losses, mask).backward()
    assert float((log_probs - old).exp()[mask].max()) > 1.01
    assert_gradients(gradients, model)
    assert step.figures["actor/optimizer_steps"] == 2
    assert step.figures["actor/pg_clipfrac"] > 0


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
    aggregate(losses, mask).backward()
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
    assert advantages.dtype == log_prob.dtype
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
    aggregate(losses, mask).backward()
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
