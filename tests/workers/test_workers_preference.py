"""A step of direct preference optimisation: TRL's on a frozen batch, and the formula's however the batch is split."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from options_stage import changed
from ranks_stage import Meeting
from record_trl_dpo import CONFIG, fill
from torch.nn.functional import log_softmax
from transformers import Qwen3Config, Qwen3ForCausalLM
from workers_stage import WITH_REF, tiny_options

from etude.distributed import InProcessWorkerGroup
from etude.trainer.preference import preference_step
from etude.training import OptimOptions
from etude.training import optim as optim_module
from etude.trajectory import Provenance
from etude.workers import TrainWorker

TRL = json.loads((Path(__file__).parent / "data" / "trl_dpo.json").read_text())


class Frozen(TrainWorker):
    """A policy and a reference whose weights are given by formula; `gradients` are those of the last step."""

    def load_policy(self, dtype, device=None):
        self.loaded = getattr(self, "loaded", -0.5) + 0.5
        return fill(Qwen3ForCausalLM(Qwen3Config(**CONFIG)).eval(), self.loaded)

    def ready(self, double=True):
        self.init_model()
        if double:
            self.model.double()
            self._ref.model.double()
        step = self._optimizer.step

        def noting():
            self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            return step()

        self._optimizer.step = noting
        return self


def options(max_tokens=4096):
    made = tiny_options("none", algorithm=WITH_REF)
    optim = OptimOptions(lr=1e-3, clip_grad=None)
    return changed(made, actor=replace(made.actor, optim=optim, ppo_max_token_len_per_gpu=max_tokens))


def test_a_step_is_that_of_trl_on_the_same_batch():
    sequences = [
        [(ids[: -len(completion)], Provenance.TEMPLATE), (completion, Provenance.SAMPLED)]
        for ids, completion in zip(TRL["sequences"], TRL["completions"])
    ]
    half = len(sequences) // 2
    pairs = [((chosen,), (rejected,)) for chosen, rejected in zip(sequences[:half], sequences[half:])]
    group = InProcessWorkerGroup(Frozen, 1, options())
    worker = group._workers[0].ready(double=False)
    figures = preference_step(group, pairs, beta=TRL["beta"], pad_token_id=0, step=0)
    assert figures["dpo/loss"] == pytest.approx(TRL["loss"], rel=1e-6)
    assert figures["dpo/margin"] == pytest.approx(TRL["margin"], rel=1e-5)  # TRL's are float32, and differences
    ours = {name: float(gradient.norm()) for name, gradient in worker.gradients.items()}
    assert ours == pytest.approx(TRL["gradient_norms"], rel=1e-5, abs=1e-6)


# Rollouts of one and of two sequences, with a tool's tokens between sampled ones.
S, T = Provenance.SAMPLED, Provenance.TOOL
PAIRS = [
    (([([3, 4], T), ([5, 6], S), ([7], T), ([8], S)],), ([([3, 4], T), ([9, 10, 11], S)],)),
    (([([12], T), ([13], S)], [([12, 14], T), ([15, 16], S)]), ([([12], T), ([17, 18, 19], S)],)),
    (([([20, 21], T), ([22], S)],), ([([20, 21], T), ([23], S), ([1, 2], T), ([3], S)], [([4], T), ([5], S)])),
]


def plain_gradients(beta):
    """(loss, gradients) of the mean of −log σ(β(Δ_chosen − Δ_rejected)) in float64, one sequence at a time."""
    models = [fill(Qwen3ForCausalLM(Qwen3Config(**CONFIG)).eval(), phase).double() for phase in (0.0, 0.5)]

    def log_prob(model, rollout):
        total = 0.0
        for runs in rollout:
            ids = [token for run, _ in runs for token in run]
            sampled = [who is S for run, who in runs for _ in run]
            table = log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
            total = total + sum(table[i - 1, ids[i]] for i in range(1, len(ids)) if sampled[i])
        return total

    def ratio(rollout):
        with torch.no_grad():
            reference = log_prob(models[1], rollout)
        return log_prob(models[0], rollout) - reference

    loss = sum(torch.log1p(torch.exp(-beta * (ratio(a) - ratio(b)))) for a, b in PAIRS) / len(PAIRS)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in models[0].named_parameters()}


def test_pairs_are_weighed_where_their_gradient_is_taken():
    """A schedule-free optimizer has other weights outside of an update."""
    pytest.importorskip("schedulefree")
    made = options()
    optim = OptimOptions(name="adamw_schedule_free", lr=1e-2, clip_grad=None)
    group = InProcessWorkerGroup(Frozen, 1, changed(made, actor=replace(made.actor, optim=optim)))
    worker, seen = group._workers[0].ready(), []
    forward = worker._actor._forward

    def noting(*given, **options):
        seen.append({name: p.detach().clone() for name, p in worker.model.named_parameters()})
        return forward(*given, **options)

    worker._actor._forward = noting
    for step in range(3):
        seen.clear()
        preference_step(group, PAIRS, beta=0.4, pad_token_id=0, step=step)
        scored, trained = seen
        for name, weights in scored.items():
            torch.testing.assert_close(weights, trained[name], rtol=0, atol=1e-12)
    outside = dict(worker.model.named_parameters())
    assert not all(torch.allclose(outside[name], weights) for name, weights in trained.items())


@pytest.mark.parametrize(("ranks", "max_tokens"), [(1, 4096), (1, 7), (3, 7)])
def test_micro_batches_and_ranks_make_the_gradient_of_the_formula(monkeypatch, ranks, max_tokens):
    given = options(max_tokens)
    workers = [Frozen(given, rank=rank, world_size=ranks).ready() for rank in range(ranks)]

    def update_sft(parts):
        with ThreadPoolExecutor(ranks) as threads:
            return list(threads.map(lambda worker, part: worker.update_sft(part), workers, parts))

    first = workers[0]
    group = SimpleNamespace(
        world_size=ranks,
        compute_log_prob=first.compute_log_prob,
        compute_ref_log_prob=first.compute_ref_log_prob,
        update_sft=update_sft,
    )
    monkeypatch.setattr(optim_module, "sum_gradients", Meeting(ranks))
    steps = [worker._optimizer.step for worker in workers]
    figures = preference_step(group, PAIRS, beta=0.4, pad_token_id=0, step=0)
    assert len(steps) == ranks
    loss, expected = plain_gradients(0.4)
    assert figures["dpo/loss"] == pytest.approx(loss, rel=1e-9)
    summed = {name: sum(worker.gradients[name] for worker in workers) for name in expected}
    for name, gradient in expected.items():
        torch.testing.assert_close(summed[name], gradient, rtol=1e-9, atol=1e-10)
