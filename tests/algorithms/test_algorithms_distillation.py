"""The forward KL over a teacher's likeliest tokens against sums over the whole vocabulary, and verl's loss."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from record_verl_losses import distributions

from etude.algorithms import distill, forward_kl_topk
from etude.algorithms.distillation import ABSENT
from etude.metrics import finish_metrics

VERL = json.loads((Path(__file__).parent / "data" / "verl_losses.json").read_text())["distillation"]
ALL = torch.ones(1, 6)


def both(seed, vocabulary=9, tokens=6):
    """(1, tokens, vocabulary) log-probs of a teacher and of a policy."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, 1, tokens, vocabulary, generator=generator, dtype=torch.float64)
    return logits.log_softmax(dim=-1)


def of_likeliest(teacher, policy, k, mask=ALL):
    log_probs, ids = teacher.topk(k, dim=-1)
    losses, metrics = forward_kl_topk(policy.gather(-1, ids), log_probs, mask)
    return losses, finish_metrics(metrics)


@given(st.integers(0, 1000), st.integers(1, 8))
def test_it_is_the_kl_of_the_likeliest_tokens_and_of_all_others_as_one(seed, k):
    teacher, policy = both(seed)
    found, metrics = of_likeliest(teacher, policy, k)
    for t in range(6):
        p, q = teacher[0, t].exp(), policy[0, t].exp()
        top = sorted(range(9), key=lambda i: -float(p[i]))[:k]
        outcomes = [(p[i], q[i]) for i in top]
        outcomes.append(tuple(sum(each[i] for i in range(9) if i not in top) for each in (p, q)))
        assert float(found[0, t]) == pytest.approx(float(sum(a * (a / b).log() for a, b in outcomes)), rel=1e-9)
    whole = (teacher.exp() * (teacher - policy)).sum(dim=-1)
    assert (found >= 0).all()
    assert (found <= whole + 1e-9).all()
    assert metrics["distillation/forward_kl"] == pytest.approx(float(found.mean()))
    assert 0 < metrics["distillation/teacher_mass"] < 1


def test_over_the_whole_vocabulary_it_is_the_kl():
    teacher, policy = both(3)
    found, metrics = of_likeliest(teacher, policy, 9)
    torch.testing.assert_close(found, (teacher.exp() * (teacher - policy)).sum(dim=-1), rtol=1e-9, atol=1e-9)
    assert metrics["distillation/student_mass"] == pytest.approx(1)


def test_a_policy_that_agrees_costs_nothing_and_has_no_gradient():
    teacher, _ = both(4)
    log_probs, ids = teacher.topk(3, dim=-1)
    logits = teacher.clone().requires_grad_()
    found, _ = forward_kl_topk(logits.log_softmax(dim=-1).gather(-1, ids), log_probs, ALL)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert found.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-12


def test_its_gradient_is_that_of_finite_differences():
    teacher, policy = both(5)
    assert torch.autograd.gradcheck(lambda q: of_likeliest(teacher, q, 3)[0], policy.requires_grad_())


@given(st.integers(0, 1000), st.floats(0.1, 2), st.floats(0, 2))
def test_a_row_that_no_teacher_scores_has_the_tasks_advantages_alone(seed, coef, task_coef):
    theirs, ours, task = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theirs[1] = ABSENT
    mask = torch.ones(2, 5)
    found, metrics = distill(
        task, teacher_log_probs=theirs, old_log_probs=ours, response_mask=mask, coef=coef, task_coef=task_coef
    )
    torch.testing.assert_close(found[0], coef * (theirs - ours)[0] + task_coef * task[0])
    torch.testing.assert_close(found[1], task_coef * task[1], atol=0, rtol=0)
    assert metrics["distillation/reverse_kl"] == pytest.approx(float((ours - theirs)[0].mean()))
    policy = torch.randn(2, 5, 3, dtype=torch.float64).log_softmax(-1).requires_grad_()
    taught = (theirs[..., None].expand(2, 5, 3) - 2).clamp(max=-2)
    losses, measured = forward_kl_topk(policy, taught, mask)
    assert not losses[1].any()
    masses = {"teacher_mass": taught, "student_mass": policy.detach()}
    means = {name: float(each[0].exp().sum(dim=-1).mean()) for name, each in masses.items()}
    means["forward_kl"] = float(losses[0].detach().mean())
    assert finish_metrics(measured) == pytest.approx({f"distillation/{name}": mean for name, mean in means.items()})
    assert not torch.autograd.grad(losses[1].sum(), policy)[0].any()


def test_masked_tokens_and_absent_entries_do_not_count():
    teacher, policy = both(6)
    log_probs, ids = teacher.topk(4, dim=-1)
    ours, mask = policy.gather(-1, ids), torch.tensor([[1, 0, 1, 1, 0, 1]])
    expected, metrics = forward_kl_topk(ours[..., :3], log_probs[..., :3], mask)
    changed, theirs = ours.clone(), log_probs.clone()
    changed[mask == 0] = torch.nan
    theirs[mask == 0] = -7.0
    theirs[..., 3] = ABSENT
    leaf = changed.requires_grad_()
    found, seen = forward_kl_topk(leaf, theirs, mask)
    torch.testing.assert_close(found, expected)
    assert finish_metrics(seen) == pytest.approx(finish_metrics(metrics))
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[..., 3] == 0).all()


def test_it_is_verls_and_the_tail():
    """verl leaves out the tail on purpose; there a sum below 0 is cut off, here it cannot be."""
    teacher, policy = distributions()
    log_probs, ids = teacher.topk(4, dim=-1)
    logits = policy.requires_grad_()
    found, metrics = forward_kl_topk(logits.log_softmax(-1).gather(-1, ids)[None], log_probs[None], ALL)
    others = torch.ones_like(teacher).scatter(1, ids, 0.0)
    p_tail, q_tail = ((x.softmax(dim=-1) * others).sum(dim=-1) for x in (teacher, logits))
    rest = found[0] - p_tail * (p_tail / q_tail).log()
    (gradient,) = torch.autograd.grad(rest.sum(), logits)
    torch.testing.assert_close(rest.float(), torch.tensor(VERL["distillation_losses"]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.float(), torch.tensor(VERL["gradient"]), rtol=1e-6, atol=1e-6)
    for name in ("student_mass", "teacher_mass"):
        assert finish_metrics(metrics)[f"distillation/{name}"] == pytest.approx(sum(VERL[name]) / 6, rel=1e-6)
