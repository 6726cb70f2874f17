"""The stage of ranks that learn together: workers of one world in threads of this process, where a barrier stands in for the
network and everything else is real; and an uneven batch to learn from."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from workers_stage import objects

from etude.metrics import add_metrics, finish_metrics
from etude.options import OptimOptions
from etude.protocol import DataProto
from etude.trainer.minibatches import update_batches
from etude.training import optim as optim_module
from etude.workers import CriticWorker

MAX_TOKENS = 60  # of a micro-batch: a rank has several


class Meeting:
    """Adds up the gradients of ranks that run in threads, as `sum_gradients` does for processes."""

    def __init__(self, ranks):
        self.barrier, self.held = threading.Barrier(ranks, timeout=120), []

    def __call__(self, parameters):
        self.held.append(parameters)
        if self.barrier.wait() == 0:
            for same in zip(*self.held, strict=True):
                gradients = [p.grad for p in same if p.grad is not None]
                for parameter in same if gradients else ():
                    parameter.grad = sum(gradients)
            self.held.clear()
        self.barrier.wait()


class World:
    """All ranks of a role, in float64; `learn` puts them back to their first weights before it begins."""

    def __init__(self, worker_cls, options, ranks):
        short = {"ppo_max_token_len_per_gpu": MAX_TOKENS, "optim": OptimOptions(lr=1e-2, clip_grad=0.05)}
        options = replace(options, actor=replace(options.actor, **short), critic=replace(options.critic, **short))
        self.workers = [worker_cls(options, rank=rank, world_size=ranks) for rank in range(ranks)]
        for worker in self.workers:
            worker.init_model()
            worker.model.double()
        self.options = options
        self.start = {name: tensor.clone() for name, tensor in self.workers[0].model.state_dict().items()}

    def learn(self, monkeypatch, batch, **changed):
        """(figures, gradients of each step, weights afterwards) of all the batch's updates, with changed options."""
        critic = isinstance(self.workers[0], CriticWorker)
        role, ranks, gradients = "critic" if critic else "actor", len(self.workers), []
        for worker in self.workers:
            worker.options = replace(self.options, **{role: replace(getattr(self.options, role), **changed)})
            worker.model.load_state_dict(self.start)
            for optimizer, _ in worker._optimizer._optimizers:
                optimizer.state.clear()
        clip = torch.nn.utils.clip_grad_norm_

        def clipped(parameters, limit):
            if parameters[0] is self.workers[0]._optimizer._parameters[0]:
                gradients.append([None if p.grad is None else p.grad.clone() for p in parameters])
            return clip(parameters, limit)

        options = self.workers[0].options
        minis = update_batches(batch, getattr(options, role), shuffle=True, seed=3, ranks=ranks)
        with monkeypatch.context() as patched, ThreadPoolExecutor(ranks) as threads:
            patched.setattr(optim_module.nn.utils, "clip_grad_norm_", clipped)
            patched.setattr(optim_module, "sum_gradients", Meeting(ranks))
            metrics = [
                made
                for parts in minis
                for made in threads.map(lambda w, part: getattr(w, f"update_{role}")(part), self.workers, parts)
            ]
        states = [worker.model.state_dict() for worker in self.workers]
        assert all(torch.equal(states[0][name], state[name]) for state in states for name in state)
        return finish_metrics(add_metrics(metrics)), gradients, {n: t.clone() for n, t in states[0].items()}


def assert_alike(one, other, tolerance=1e-9):
    """Figures, gradients and weights agree."""
    (figures, gradients, weights), (figures2, gradients2, weights2) = one, other
    assert figures.keys() == figures2.keys()
    for name, value in figures.items():
        assert abs(value - figures2[name]) <= 1e-6 * max(1.0, abs(value)), name  # some are float32's
    assert len(gradients) == len(gradients2) > 1
    for step, step2 in zip(gradients, gradients2):
        for a, b in zip(step, step2, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=0, atol=tolerance)
    for name, tensor in weights.items():
        assert torch.allclose(tensor, weights2[name], rtol=0, atol=1e-6), name


def uneven_batch(seed=0):
    """Rows of five prompts with one to five rows each, of one to nine scored tokens; of some nothing is scored."""
    generator = torch.Generator().manual_seed(seed)
    groups, width, prompt = (1, 5, 2, 4, 3), 12, 6
    uids = [f"u{number}" for number, size in enumerate(groups) for _ in range(size)]
    rows = len(uids)
    ids = torch.randint(5, 250, (rows, prompt + width), generator=generator)
    for row, uid in enumerate(uids):
        ids[row, :prompt] = ids[uids.index(uid), :prompt]  # one prompt for all rows of a group
    lengths = torch.randint(1, 10, (rows,), generator=generator)
    after = torch.arange(width) < lengths[:, None]
    mask = after & (torch.rand(rows, width, generator=generator) > 0.3)
    mask[:, 0] |= after[:, 0]
    mask[[2, 5, 14]] = False  # dropped, or a sequence in which nothing was sampled
    attention = torch.cat([torch.ones(rows, prompt, dtype=torch.bool), after], dim=1)
    main = torch.tensor(
        [uids[row] != uids[row - 1] or row % 2 == 0 for row in range(rows)]
    )  # several sequences a rollout

    def per_token(scale):
        return torch.randn(rows, width, generator=generator).double() * scale * mask

    columns = {
        "input_ids": ids,
        "attention_mask": attention.long(),
        "response_mask": mask.long(),
        "main_sequence": main.long(),
        "old_log_probs": (per_token(0.3) - 6) * mask,
        "ref_log_prob": (per_token(0.3) - 6) * mask,
        "rollout_log_probs": (per_token(0.3) - 6) * mask,
        "advantages": torch.randn(rows, 1, generator=generator).double() * mask,
        "values": per_token(0.5),
        "returns": per_token(2.0),
        "uid": objects(uids),
    }
    meta = {"temperature": 0.9, "global_step": 0, "compare_rollout": True}
    return DataProto.from_single_dict(columns, meta_info=meta)
