"""Every worker in another process, from the bytes that cross: nothing that lives here is needed there."""

import os
import pickle
from multiprocessing import get_context

import pytest
import torch
from tensordict import TensorDict
from workers_stage import WITH_REF, prompts, save_model, tiny_options

from etude.agents import MultiTurnOptions
from etude.options import CustomRewardOptions
from etude.protocol import DataProto
from etude.workers import ActorRolloutRefWorker, CriticWorker, RewardWorker, RolloutWorker, TrainWorker
from etude.workers.context import ToolCatalogue

PLUGIN = '''
"""A parser that reads a call into every answer, a tool that counts them, and a score."""

import os

from etude.chat import ParsedResponse, ToolParser
from etude.schemas import FunctionCall
from etude.tools import function_tool


@ToolParser.register("spawned_stage")
class EveryTurnCalls(ToolParser):
    @property
    def stop_token_ids(self):
        return tuple(range(10, 400, 3))

    def parse(self, text, tools=None):
        return ParsedResponse(text, [FunctionCall(name="process_id", arguments="{}")], [])


@function_tool
def process_id() -> str:
    """The process that runs the tool."""
    return str(os.getpid())


def compute_score(solution_str, ground_truth, extra_info=None):
    return 0.5
'''


def _serve(pipe):
    """The other process: builds a worker of each (class, options) and calls what it is then asked for."""
    workers = []
    while (message := pickle.loads(pipe.recv_bytes())) is not None:
        first, *rest = message
        if isinstance(first, type):
            workers.append(first(*rest, rank=0, world_size=1))
            answer = len(workers) - 1
        else:
            answer = os.getpid() if first is None else getattr(workers[first], rest[0])(*rest[1:])
        pipe.send_bytes(pickle.dumps(answer))


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    """`spawned(worker class, **rollout options)`: a function that calls a worker in a spawned process by pickled bytes."""
    folder = tmp_path_factory.mktemp("spawned")
    plugin = folder / "mine.py"
    plugin.write_text(PLUGIN)
    path = save_model(folder / "model")
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()

    def ask(*message):
        pipe.send_bytes(pickle.dumps(message))
        return pickle.loads(pipe.recv_bytes())

    def start(worker_cls, **rollout):
        multi_turn = MultiTurnOptions(format="spawned_stage", function_tool_path=(str(plugin),), max_assistant_turns=2)
        options = tiny_options(
            path,
            plugins=(str(plugin),),
            custom_reward_function=CustomRewardOptions(path=str(plugin)),
            num_threads=1,
            seed=1,
            project_name="spawned",
            algorithm=WITH_REF,
            rollout={"multi_turn": multi_turn, "prompt_length": 400, **rollout},
        )
        number = ask(worker_cls, options)
        return lambda *call: ask(number, *call)

    start.process_id = ask(None)
    yield start
    pipe.send_bytes(pickle.dumps(None))
    process.join(60)
    assert process.exitcode == 0


def rolled_out(worker):
    """A rollout worker's answer to one row."""
    worker("init_model")
    worker("update_weights", 0)
    batch = prompts(count=1, n=1)
    return batch.union(worker("generate_sequences", batch))


def tokens():
    """A row of two prompt tokens and a response of which two are scored."""
    ids = torch.arange(20, 25)[None]
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": torch.tensor([[1, 1, 0]])}
    return DataProto(TensorDict(columns, batch_size=[1]), meta_info={"temperature": 1.0})


@pytest.mark.slow
def test_a_rollout_worker_runs_the_users_tool_where_it_is(spawned):
    worker = spawned(RolloutWorker)
    catalogue = worker("load_tools")
    assert isinstance(catalogue, ToolCatalogue)
    assert set(catalogue.schemas) == {"process_id"}
    assert catalogue.tool_messages
    (result,) = rolled_out(worker).non_tensor_batch["rollout"]
    assert next(call.response for call in result.trajectory.tool_calls) == str(spawned.process_id) != str(os.getpid())
    assert result.trajectory.rewards.score == 0.5
    assert worker("progress")[:2] == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("worker_cls", [TrainWorker, ActorRolloutRefWorker])
def test_an_actor_computes_log_probs_and_its_reference_the_same(spawned, worker_cls):
    worker, batch = spawned(worker_cls), tokens()
    worker("init_model", 3)
    found = worker("compute_log_prob", batch).batch["old_log_probs"]
    assert (found[:, :2] < 0).all()
    assert torch.equal(found, worker("compute_ref_log_prob", batch).batch["ref_log_prob"])


@pytest.mark.slow
def test_a_critic_and_a_reward_worker_start_by_themselves(spawned):
    critic, reward = spawned(CriticWorker), spawned(RewardWorker, mode="sync")
    critic("init_model", 3)
    assert not critic("compute_values", tokens()).batch["values"].any()
    rolled = rolled_out(spawned(RolloutWorker, mode="sync"))
    assert rolled.non_tensor_batch["rollout"][0].trajectory.rewards.score is None
    (scored,) = reward("compute_scores", rolled).non_tensor_batch["rollout"]
    assert scored.trajectory.rewards.score == 0.5
