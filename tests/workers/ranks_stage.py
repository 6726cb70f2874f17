"""The stage of ranks that learn together: workers of one world in threads of this process, where a barrier stands in for the
network and everything else is real; and an uneven batch to learn from."""

import pickle
import threading
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from batches_stage import update_batches
from options_stage import changed
from workers_stage import objects

from etude.metrics import add_metrics, finish_metrics
from etude.models import load_causal_lm, load_value_model
from etude.models.named_weights import full_tensor
from etude.options import OptimOptions, RolloutCorrectionOptions
from etude.protocol import DataProto
from etude.training import optim as optim_module
from etude.workers import CriticWorker, TrainWorker, checkpoint, critic, role

MAX_TOKENS = 60  # of a micro-batch: a rank has several


def run_ranks(ranks, work, *given, folder):
    """What `work(rank, ranks, *given)` returns in each of `ranks` new processes that torch.distributed joins over gloo."""
    context = get_context("forkserver")  # imports once
    context.set_forkserver_preload(["test_workers_ranks", "etude.trainer.run", "house_stage"])
    answers, meeting = context.Queue(), Path(folder) / f"meeting-{uuid.uuid4().hex}"
    processes = [
        context.Process(target=_join, args=(rank, ranks, meeting, answers, work, given), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = {}
    try:
        for _ in processes:
            rank, answer, failure = answers.get(timeout=300)
            assert failure is None, f"rank {rank} of {ranks}:\n{failure}"
            found[rank] = pickle.loads(answer)
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    return [found[rank] for rank in range(ranks)]


def _join(rank, ranks, meeting, answers, work, given):
    torch.set_num_threads(1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        answers.put((rank, pickle.dumps(work(rank, ranks, *given)), None))  # by value: no file descriptors to share
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    if ranks > 1:
        torch.distributed.destroy_process_group()


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


def shortened(options, **given):
    """Options with micro-batches so small that a rank has several."""
    short = {"ppo_max_token_len_per_gpu": MAX_TOKENS, "optim": OptimOptions(lr=1e-2, clip_grad=0.05), **given}
    return changed(options, actor=replace(options.actor, **short), critic=replace(options.critic, **short))


class World:
    """All ranks of a role, in float64; `learn` puts them back to their first weights before it begins."""

    def __init__(self, worker_cls, options, ranks, short=True):
        options = shortened(options) if short else options
        self.workers = [worker_cls(options, rank=rank, world_size=ranks) for rank in range(ranks)]
        for worker in self.workers:
            worker.init_model()
            doubled(worker.model)
        self.options = options
        self.start = {name: tensor.clone() for name, tensor in self.workers[0].model.state_dict().items()}

    def learn(self, monkeypatch, case, batch=None):
        """(figures, gradients of each step, weights afterwards) of all the updates of a case's batch, or of `batch`."""
        role, ranks, gradients = case.role, len(self.workers), []
        batch = case.batch() if batch is None else batch
        for worker in self.workers:
            worker.options = case.options(self.options)
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


@dataclass(frozen=True)
class Case:
    """One update: of which role, of which batch, with which changed options."""

    changed: dict
    role: str = "actor"
    seed: int = 0
    correction: dict | None = None
    taught: bool = False
    sharded: bool = True
    broken: bool = False

    def batch(self):
        batch = uneven_batch(self.seed)
        if self.broken:
            batch.batch["advantages"][0] = float("nan")  # of the only row of its prompt
        if self.correction is not None:
            mask = batch.batch["response_mask"]
            batch.batch["rollout_log_probs"] += 0.5 * mask  # about what the policy's are
            if not self.correction:
                batch.batch["rollout_is_weights"] = torch.rand(
                    mask.shape, generator=torch.Generator().manual_seed(1)
                ).double()
        if self.taught:
            shape, generator = batch.batch["response_mask"].shape, torch.Generator().manual_seed(4)
            batch.batch["teacher_topk_ids"] = torch.rand(*shape, 250, generator=generator).topk(5).indices.int()
            top = torch.randn(*shape, 6, generator=generator).double().log_softmax(dim=-1)[..., :5]
            batch.batch["teacher_topk_log_probs"] = top
        return batch

    def options(self, options):
        if self.correction is not None:
            options = changed(options, correction=RolloutCorrectionOptions(**self.correction))
        return changed(options, **{self.role: replace(getattr(options, self.role), **self.changed)})


def doubled(model):
    """`model` in float64, which the grouped product of a mixture's experts does not take."""
    if model.config.model_type == "qwen3_moe":
        model.set_experts_implementation("eager")
    return model.double()


def in_double():
    """Of this process: all models compute in float64."""
    for module in (role, checkpoint):
        module.torch_dtype = lambda name: torch.float64
    role.load_causal_lm = lambda *given, **named: doubled(load_causal_lm(*given, **named))
    critic.load_value_model = lambda *given, **named: doubled(load_value_model(*given, **named))


def kept_gradients():
    """A list that gets the whole gradients of each step of a model in this process, before they are clipped."""
    gradients = []

    def kept(clip):
        def clipped(parameters, limit):
            gradients.append([full_tensor(p.grad).clone() for p in parameters])
            return clip(parameters, limit)

        return clipped

    optim_module.clip_sharded = kept(optim_module.clip_sharded)
    optim_module.nn.utils.clip_grad_norm_ = kept(optim_module.nn.utils.clip_grad_norm_)
    return gradients


def updates(worker, options, batch):
    """The metrics of this rank's updates; none where another rank of its team has them."""
    place = worker.mesh_place("train")
    steps = update_batches(batch, getattr(options, worker.role), shuffle=True, seed=3, ranks=place.dp_size)
    made = [getattr(worker, f"update_{worker.role}")(parts[place.dp_rank]) for parts in steps]
    return made if place.collects else []


def whole_weights(worker):
    return {name: full_tensor(parameter.detach()).clone() for name, parameter in worker.model.named_parameters()}


def learn_sharded(rank, ranks, options, cases):
    """Name → (figures of this rank, gradients of each step, weights afterwards), with one sharded model a role."""
    in_double()
    workers, gradients = {}, kept_gradients()
    found = {}
    for name, case in cases.items():
        kind = {"actor": TrainWorker, "critic": CriticWorker}[case.role]
        if case.role not in workers:
            worker = workers[case.role] = kind(options, rank=rank, world_size=ranks)
            worker.init_model()
            worker.start = [p.detach().clone() for p in worker.model.parameters()]
        worker = workers[case.role]
        worker.options = case.options(options)
        for parameter, start in zip(worker.model.parameters(), worker.start):
            parameter.detach().copy_(start)
        for optimizer, _ in worker._optimizer._optimizers:
            optimizer.state.clear()
        gradients.clear()
        metrics, weights = updates(worker, worker.options, case.batch()), whole_weights(worker)
        found[name] = (metrics, *(([*gradients], weights) if rank == 0 else (None, None)))
    return found


def learn_in_shards(ranks, options, cases, folder):
    """Name → (figures, gradients, weights), as `World.learn` gives them, of `ranks` processes."""
    first, *others = run_ranks(ranks, learn_sharded, options, cases, folder=folder)
    made = {}
    for name, (metrics, gradients, weights) in first.items():
        all_metrics = [*metrics, *(metric for other in others for metric in other[name][0])]
        made[name] = finish_metrics(add_metrics(all_metrics)), gradients, weights
    return made


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
    assert weights2.keys() <= weights.keys()
    for name, tensor in weights2.items():
        assert torch.allclose(tensor, weights[name], rtol=0, atol=1e-6), name


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
