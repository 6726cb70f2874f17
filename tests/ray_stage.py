"""The stage of Ray: a small cluster of several raylets on this machine, and what to ask of its processes."""

import contextlib
import functools
import os
import tempfile

import psutil
from wait_stage import WAIT

_STORE = 80_000_000  # bytes, the smallest that Ray takes


@contextlib.contextmanager
def ray_cluster(*cpus, connect=True):
    """A node with each of these numbers of CPUs, to which this process is connected meanwhile; the resources `node-0` and
    `node-1` choose between them."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.makedirs("/tmp/ray", exist_ok=True)  # Ray writes the address there whatever the `temp_dir`, and does not make it
    nodes = Cluster()
    try:
        first = {"include_dashboard": False, "temp_dir": tempfile.mkdtemp(prefix="ray-", dir="/tmp")}
        for number, count in enumerate(cpus):
            more = {"resources": {f"node-{number}": 100}, **({} if number else first)}
            nodes.add_node(num_cpus=count, object_store_memory=_STORE, **more)
        if connect:
            ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
            nodes.wait_for_nodes(timeout=WAIT)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def rank_processes(cluster):
    """The process ids of the ranks that run on `cluster`."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "ppid"]):
        if any("RankProcess" in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                if any(cluster.address in word for word in psutil.Process(process.info["ppid"]).cmdline()):
                    found.append(process.info["pid"])
    return found


LONG_LOOP = """
from etude.agents import AgentLoopBase
from etude.trajectory import Provenance, Trajectory


class LongAnswers(AgentLoopBase):
    def __init__(self, trainer_config, *, length, **kwargs):
        super().__init__(trainer_config, **kwargs)
        self.length = length

    async def run(self, sampling_params, **row):
        prompt = list(row["raw_prompt_ids"])
        trajectory = Trajectory(row["request_id"], prompt, messages=list(row["raw_prompt"]))
        few = {**sampling_params, "max_tokens": 8}
        drawn = await self.server_manager.generate(prompt_ids=prompt, sampling_params=few)
        trajectory.append(drawn.token_ids, Provenance.SAMPLED, log_probs=drawn.log_probs)
        trajectory.assistant_turns = 1
        trajectory.append([5] * (self.length - len(drawn.token_ids)), Provenance.TOOL)
        return trajectory.to_output()
"""
"""An agent loop whose answers are `length` tokens long, few of them sampled: batches of any width in little time."""


@contextlib.contextmanager
def counted_bytes():
    """Counts what crosses between this process and the ranks of its groups meanwhile: `counts[method]`, in bytes."""
    from ray import cloudpickle

    from etude.distributed.plane import BatchRef
    from etude.distributed.ray_group import RayWorkerGroup

    counts = {}

    def add(name, value):
        counts[name] = counts.get(name, 0) + len(cloudpickle.dumps(value))

    run, fetch = RayWorkerGroup._run, BatchRef.fetch

    def counting(self, name, parts, ranks):
        add(name, parts)
        future = run(self, name, parts, ranks)
        if name != "progress":  # as often as there is time
            future.add_done_callback(lambda done: done.exception() or add(name, done.result()))
        return future

    def fetching(self):
        data = fetch(self)
        add("fetch", data)
        return data

    RayWorkerGroup._run, BatchRef.fetch = functools.wraps(run)(counting), fetching
    try:
        yield counts
    finally:
        RayWorkerGroup._run, BatchRef.fetch = run, fetch
