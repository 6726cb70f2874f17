"""Whole runs on a Ray cluster of two nodes: they learn what a run in one process learns, from the same rollouts."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from async_stage import ASYNC, plan, trained
from house_stage import ACTOR, ROLLOUT, TOOLS, Launched, metrics, steps, weights
from judge_stage import as_classifier, rig_judge
from ray_stage import LONG_LOOP, counted_bytes, rank_processes, ray_cluster
from trainer_tools import STUBBORN, Moody
from vision_stage import picture, save_vision_model
from wait_stage import until

import etude
from etude.checks import nodes as checks_nodes
from etude.checks.nodes import node_problems, versions
from etude.config import compose
from etude.data.files import read_rows, write_parquet
from etude.distributed import RayWorkerGroup
from etude.distributed.queue_store import QueueStore
from etude.dumps import read_rollouts, sequences_of
from etude.errors import ConfigError
from etude.rewards.reward_model import RewardModel
from etude.trainer import worker_groups
from etude.trainer.ppo import PPOTrainer
from etude.trainer.run import train
from etude.trainer.setup import prepare
from etude.trainer.sft import SFTTrainer
from etude.trainer.verify import verify_step

ray = pytest.importorskip("ray")
CRITIC = ("algorithm.adv_estimator=gae", f"{ACTOR}.ppo_mini_batch_size=1", "trainer.total_training_steps=2")
VALUES = "trainer.rollout_token_values=true"


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster(4, 4, connect=False) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(nodes):
    return ("trainer.backend=ray", f"ray.address={nodes.address}", "ray.init_kwargs.namespace=stage")


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """A run in this process."""
    folder = tmp_path_factory.mktemp("alone")
    train(tiny.config(folder, *CRITIC, VALUES))
    return folder


def sampled(folder, step):
    lines = (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return [(record["response_ids"], record["score"]) for record in map(json.loads, lines)]


TEAM = (f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.fsdp_config.tensor_parallel_size=2")  # and a sharded critic

OWN = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=3")


@pytest.mark.parametrize("held", [(), (*TEAM, *OWN)], ids=["replicated", "in parts, with a rollout group of its own"])
def test_two_nodes_learn_what_one_process_learns(tiny, tmp_path, alone, cluster, held):
    two = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "ray.call_timeout=500", *held)
    trainer = PPOTrainer(*prepare(tiny.config(tmp_path, *CRITIC, VALUES, *cluster, *two)))
    groups = trainer.groups
    try:
        assert (groups.actor.world_size, groups.critic.world_size) == (2, 2)
        assert (groups.actor.dp_size, groups.critic.dp_size) == ((1 if held else 2), 2)
        assert groups.rollout.world_size == (3 if OWN[0] in held else 2)
        assert len({rank.place.node_id for rank in groups.actor._ranks}) == 2
        assert ray.get_runtime_context().namespace == "stage"
        assert groups.actor._call_seconds == 500
        trainer.init_workers()
        trainer.fit()
        done, total, _ = groups.progress()
        assert (done, total) == (8, 8)
    finally:
        groups.close()
    assert not ray.is_initialized()
    first, *mine = zip(metrics(alone)[1:], metrics(tmp_path)[1:])
    for name in ("actor/loss", "critic/vf_loss", "actor/grad_norm", "reward/total/mean", "actor/entropy"):
        assert first[1][name] == pytest.approx(first[0][name], abs=1e-5, rel=1e-5)
        assert all(there[name] == pytest.approx(here[name], abs=1e-3, rel=1e-3) for here, there in mine)
    assert sampled(tmp_path, 1) == sampled(alone, 1)
    for here, there in zip(*(read_rollouts(folder / "rollouts" / "1.jsonl") for folder in (alone, tmp_path))):
        assert set(here["token_values"]) == {"advantages", "old_log_probs", "log_probs", "entropys", "values"}
        for name, column in here["token_values"].items():
            other = [value or 0.0 for value in there["token_values"][name]]
            assert other == pytest.approx([value or 0.0 for value in column], abs=1e-3)
    for role in ("actor", "critic"):
        here, there = weights(alone, 2, role), weights(tmp_path, 2, role)
        assert all((here[name] - there[name]).abs().max() < 1e-3 for name in here)


ONE_EACH = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1")


def test_batches_may_stay_in_transfer_queue(tiny, tmp_path, alone, cluster):
    keys = (*CRITIC, VALUES, *cluster, *ONE_EACH, "ray.data_plane=transferqueue")
    trainer = PPOTrainer(*prepare(tiny.config(tmp_path, *keys)))
    with closing(trainer.groups):
        assert isinstance(trainer.groups.actor.store, QueueStore)
        trainer.init_workers()
        trainer.fit()
    one, two = metrics(alone)[1], metrics(tmp_path)[1]
    for name in ("actor/loss", "critic/vf_loss", "actor/grad_norm", "reward/total/mean", "actor/entropy"):
        assert two[name] == pytest.approx(one[name], abs=1e-5, rel=1e-5)
    assert sampled(tmp_path, 1) == sampled(alone, 1)


PARSER = """
from etude.chat import ParsedResponse, ToolParser


@ToolParser.register("brief")
class Brief(ToolParser):
    stop_token_ids = tuple(range(10, 300, 9))  # a turn is a few tokens

    def parse(self, text, tools=None):
        return ParsedResponse(text, [])


def compute_score(solution_str):
    return len(solution_str) % 5 / 4
"""


def test_rows_some_of_which_have_images_are_learned_by_reference(tmp_path, cluster, monkeypatch):
    """One rank's rows have images, the other's have none; mini-batches are cut in a process of their own, as where no rank
    is on the driver's node."""
    model = save_vision_model("qwen2_5_vl", tmp_path / "model", initializer_range=0.2)
    (tmp_path / "agent.py").write_text(PARSER)
    rows = []
    for number in range(2):
        picture(40, 40, seed=number).save(tmp_path / f"{number}.png")
        row = {"data_source": "tests", "reward_model": {"style": "rule", "ground_truth": "7"}}
        shown = [{"path": str(tmp_path / f"{number}.png")}] if number else []
        asked = [{"role": "user", "content": f"{'<image>' * len(shown)}What is it?"}]
        rows.append(row | {"prompt": asked, "images": shown})
    write_parquet(rows, tmp_path / "rows.parquet")

    def config(folder, *more):
        return compose(
            "grpo_trainer",
            [
                f"data.train_files={tmp_path}/rows.parquet",
                "data.train_batch_size=2",
                "data.max_response_length=24",
                f"actor_rollout_ref.model.path={model}",
                f"{ROLLOUT}.n=3",
                f"{ROLLOUT}.multi_turn.format=brief",
                f"{ACTOR}.ppo_mini_batch_size=1",
                f"{ACTOR}.ppo_epochs=3",
                f"plugins=[{tmp_path}/agent.py]",
                f"custom_reward_function.path={tmp_path}/agent.py",
                "trainer.total_training_steps=2",
                f"trainer.default_local_dir={folder}",
                "trainer.logger=[jsonl]",
                "trainer.deterministic=true",
                "trainer.device=cpu",
                "trainer.num_threads=1",
                "trainer.report=false",
                *more,
            ],
        )

    train(config(tmp_path / "one"))
    monkeypatch.setattr(RayWorkerGroup, "places", [])
    trainer = PPOTrainer(*prepare(config(tmp_path / "two", *cluster, *ONE_EACH)))
    with closing(trainer.groups), counted_bytes() as counts:
        trainer.init_workers()
        trainer.fit()
        pid = trainer.groups.run(os.getpid)
        assert pid not in [rank.place.pid for rank in trainer.groups.actor._ranks]
        assert any(f":{pid}:" in process for process in trainer.groups.usage().cpu_seconds)
    assert "fetch" not in counts
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for name in ("actor/loss", "actor/grad_norm", "reward/total/mean", "actor/entropy"):
        assert two[0][name] == pytest.approx(one[0][name], abs=1e-5, rel=1e-5)
        assert two[1][name] == pytest.approx(one[1][name], abs=1e-3, rel=1e-3)


def test_teachers_and_a_curriculum_teach_on_two_nodes_as_in_one_process(tiny, tmp_path, cluster):
    rows = read_rows(tiny.folder / "data" / "train.parquet")
    sources = [row | {"data_source": ("sums", "others")[i % 2]} for i, row in enumerate(rows)]
    write_parquet(sources, tmp_path / "train.parquet")
    held = (
        f"data.train_files={tmp_path}/train.parquet",
        "data.sampler.class_name=curriculum",
        f"distillation.teachers={{sums:self,others:{tiny.folder}/model}}",
        "distillation.hint='The answer is {ground_truth}.'",
        "distillation.task_coef=1.0",
        "trainer.total_training_steps=2",
    )
    train(tiny.config(tmp_path / "one", *held))
    train(tiny.config(tmp_path / "two", *held, *cluster, *ONE_EACH))
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for name in ("actor/loss", "actor/grad_norm", "distillation/reverse_kl", "reward/total/mean"):
        assert two[0][name] == pytest.approx(one[0][name], abs=1e-5, rel=1e-5)
    drawn = [
        [record["input"] for record in read_rollouts(tmp_path / each / "rollouts" / "2.jsonl")]
        for each in ("one", "two")
    ]
    assert drawn[0] == drawn[1]  # after what the sampler was told of the first step


def test_a_compacted_rollouts_summaries_are_learned_on_two_nodes(tiny, tmp_path, cluster):
    """They are sequences of their rollout, of its advantage, and have the figures of one process."""
    keys = ("at_tokens=76", "summary_tokens=8", "prompt='Sum up.'")
    held = [f"{ROLLOUT}.multi_turn.compact.{key}" for key in keys]
    held += [f"{ROLLOUT}.multi_turn.max_assistant_turns=3", f"{ACTOR}.ppo_mini_batch_size=1", VALUES]
    held += ["data.max_prompt_length=60", "trainer.total_training_steps=2"]
    train(tiny.config(tmp_path / "one", *held))
    train(tiny.config(tmp_path / "two", *held, *cluster, *ONE_EACH))
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for name in ("actor/loss", "actor/grad_norm", "reward/total/mean", "actor/entropy"):
        assert two[0][name] == pytest.approx(one[0][name], abs=1e-5, rel=1e-5)
        assert two[1][name] == pytest.approx(one[1][name], abs=1e-3, rel=1e-3)
    here, there = (list(read_rollouts(tmp_path / each / "rollouts" / "1.jsonl")) for each in ("one", "two"))
    assert any(record["earlier"] for record in here)
    for mine, other in zip(here, there, strict=True):
        values = [[sequence["token_values"] for sequence in sequences_of(each)] for each in (mine, other)]
        for first, second in zip(*values, strict=True):
            assert second["log_probs"] == pytest.approx(first["log_probs"], abs=1e-5, nan_ok=True)
            assert second["advantages"] == pytest.approx(first["advantages"], abs=1e-5, nan_ok=True)
        assert len({round(each, 5) for sequence in values[1] for each in sequence["advantages"] if each}) <= 1


def test_dumps_have_the_last_update_of_each_row_whichever_rank_made_it(tiny, tmp_path, cluster):
    """Epochs share out the rows anew."""
    epochs = (f"{ACTOR}.ppo_epochs=3", f"{ACTOR}.ppo_mini_batch_size=2", "data.train_batch_size=3", f"{ROLLOUT}.n=3")
    keys = (VALUES, "trainer.save_freq=1", "trainer.total_training_steps=3", "trainer.max_actor_ckpt_to_keep=null")
    train(tiny.config(tmp_path, *epochs, *keys, *cluster, *ONE_EACH))
    for step in (2, 3):
        found = verify_step(tmp_path, step)
        assert found.first is None, found.explain()


def test_demonstrations_are_learned_on_two_nodes_as_in_one_process(tiny, tmp_path, cluster):
    def losses(folder, ranks, *held):
        settings = [
            f"data.train_files={tiny.folder}/by_heart.parquet",
            f"model.path={tiny.model}",
            "data.train_batch_size=4",
        ]
        settings += [f"multi_turn.tool_config_path={TOOLS}", "trainer.total_training_steps=3", "trainer.num_threads=1"]
        settings += [f"trainer.default_local_dir={folder}", "trainer.logger=[jsonl]", *held]
        trainer = SFTTrainer(compose("sft", settings, root="sft"))
        with closing(trainer.groups):
            assert trainer.groups.actor.world_size == ranks
            trainer.fit()
        return [record["sft/loss"] for record in metrics(folder)]

    two = losses(tmp_path / "two", 2, *cluster, "trainer.nnodes=2", "trainer.n_gpus_per_node=1")
    assert two == pytest.approx(losses(tmp_path / "one", 1), rel=1e-5)


def test_a_critic_on_the_policys_trunk_learns_on_two_nodes(tiny, tmp_path, cluster):
    keys = (*CRITIC, "critic.share_trunk=true", "trainer.save_freq=1", "trainer.async_save=true")
    ranks = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.max_actor_ckpt_to_keep=null")
    train(tiny.config(tmp_path, *keys, *cluster, *ranks))
    last = metrics(tmp_path)[-1]
    assert last["critic/optimizer_steps"] == last["actor/optimizer_steps"] > 0
    assert all(weights(tmp_path, step) for step in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_reward_models_score_on_ray(tiny, tmp_path, cluster, mode):
    """A classifier in the reward role's ranks or where rollouts end, a language model as judge in each rollout rank."""
    classifier = as_classifier(tiny.model, tmp_path / "classifier", pad="<|endoftext|>")
    judge = rig_judge(tiny.model, tmp_path / "judge")
    nodes = 2 if mode == "sync" else 1
    held = (*cluster, f"trainer.nnodes={nodes}", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1")
    keys = (f"reward_model.model.path={classifier}", f"{ROLLOUT}.mode={mode}", "trainer.deterministic=false")
    train(tiny.config(tmp_path / "scored", *held, *keys))
    model, records = RewardModel(classifier), list(read_rollouts(tmp_path / "scored" / "rollouts" / "1.jsonl"))
    for record in records:
        assert record["rewards"]["score_info"]["reward_model"] == pytest.approx(
            model.forward([model.encode(record["messages"])])[0], abs=1e-5
        )
    assert len(records) == 8
    if mode == "async":
        keys = ("custom_reward_function.path=etude.rewards.judge", f"reward_model.model.path={judge}")
        train(tiny.config(tmp_path / "judged", *held, *keys))
        [step] = metrics(tmp_path / "judged")
        assert step["reward/score/mean"] == pytest.approx(0.7)
        assert step["reward/judge/completion_tokens"] == 2 * step["reward/judge/requests"] > 0


SHARDED = (f"{ACTOR}.strategy=fsdp2",)


@pytest.mark.parametrize("held", [TEAM, (*SHARDED, *OWN[:2])], ids=["in parts", "a rollout group of its own"])
def test_rollouts_stream_on_two_nodes_while_the_policy_learns(tiny, tmp_path, cluster, held):
    ranks = ("trainer.nnodes=3", "trainer.min_nnodes=2", "trainer.n_gpus_per_node=1", *held)
    few = ("trainer.max_staleness=2", "trainer.total_training_steps=3")
    train(tiny.config(tmp_path, *ASYNC, *cluster, *ranks, *few))
    assert sorted(trained(tmp_path)) == plan(3)
    assert 0 < max(record["staleness/max"] for record in metrics(tmp_path)) <= 2


def test_more_processes_than_there_are_cpus_are_refused(tiny, tmp_path, cluster):
    wish = "trainer.nnodes=3, trainer.n_gpus_per_node=2: 6 processes"
    with pytest.raises(ConfigError, match=rf"{wish}.*the cluster has 2 nodes \(4 CPU; 4 CPU\)"):
        prepare(tiny.config(tmp_path, *cluster, "trainer.nnodes=3", "trainer.n_gpus_per_node=2"))
    assert not ray.is_initialized()


def test_more_nodes_at_least_than_at_most_are_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.min_nnodes=2 is above trainer\.nnodes=1"):
        prepare(tiny.config(tmp_path, "trainer.backend=ray", "trainer.min_nnodes=2"))


def test_after_a_loss_nodes_may_take_a_while_to_come_back(tiny, tmp_path, cluster, monkeypatch):
    now, three = [0.0], ("trainer.nnodes=3", "ray.node_timeout=7")
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(worker_groups, "time", clock)
    for restarts, waited in ((False, 0), (True, 8)):
        with pytest.raises(ConfigError, match="the cluster has 2 nodes"):
            prepare(tiny.config(tmp_path, *cluster, *three), restarts=restarts)
        assert now == [waited]


def test_rollouts_may_have_fewer_nodes_than_asked_for(tiny, tmp_path, cluster, monkeypatch, caplog):
    """Those that are left, where they are a group of their own."""

    def placed(*given):
        raise InterruptedError

    monkeypatch.setattr(worker_groups, "check_nodes", placed)
    own = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=3", f"{ROLLOUT}.min_nnodes=1")
    with pytest.raises(InterruptedError):
        prepare(tiny.config(tmp_path, *cluster, *own))
    assert f"{ROLLOUT}.min_nnodes lets the run go on with 2" in caplog.text


def test_no_cluster_at_the_address_is_one_line(tiny, tmp_path):
    for address, what in (("ray://127.0.0.1:9", "a Ray client cannot"), ("127.0.0.1:9", "Connection refused")):
        with pytest.raises(ConfigError, match=what):
            prepare(tiny.config(tmp_path, "trainer.backend=ray", f"ray.address={address}"))


def test_nodes_that_lack_something_are_named_before_a_worker_starts(tiny, tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(checks_nodes, "versions", lambda: versions() | {"torch": "1.0"})
    with pytest.raises(ConfigError, match=r"node \S+: torch is \d\S+, and 1.0 on the driver's"):
        prepare(tiny.config(tmp_path, *cluster, "trainer.nnodes=2"))
    assert not ray.is_initialized()


def test_what_a_node_may_lack(tiny, tmp_path, monkeypatch):
    options = tiny.config(tmp_path)
    (tmp_path / "marker").touch()
    assert node_problems(options, os.getcwd(), [], versions(), str(tmp_path / "marker"), False) == []
    monkeypatch.setattr("etude.checks.nodes.versions", lambda: versions() | {"torch": "2.0+cpu", "ray": ""})
    options = tiny.config(tmp_path, f"custom_reward_function.path={tmp_path}/scores.py")
    lines = node_problems(options, "/nowhere", [], versions(), str(tmp_path / "elsewhere"), True)
    assert [str(line).split(": ", 1)[1].split(" ")[0] for line in lines] == [
        "torch",
        "ray",
        "torch",
        f"trainer.default_local_dir={tmp_path}",
        "custom_reward_function.path:",
    ]


@pytest.mark.slow
def test_the_second_signal_abandons_a_rollout_on_all_ranks(tiny, tmp_path, nodes, cluster):
    """Nothing is left running, though the tool ignores its end, and the same command goes on where it stopped."""
    tool = Moody(tmp_path / "tool", STUBBORN, good=4, timeout=7200)
    endless = ("trainer.total_training_steps=5000", "trainer.logger=[jsonl,console]", "trainer.n_gpus_per_node=2")
    launched = Launched(
        ["train", *tiny.arguments(tmp_path / "run", *endless, *cluster, tool.override)], tmp_path / "log"
    )

    def amid():  # both ranks are in the second step: each begins its four answers when it comes to it
        return tool.count("mood") >= 2 and tool.count("create") == 16

    until(lambda: amid() or not launched.process.is_alive(), launched.text())
    launched.signal(signal.SIGINT)
    until(lambda: "stopping after this step" in launched.text(), launched.text())
    launched.signal(signal.SIGINT)
    assert launched.wait() == 128 + signal.SIGINT
    assert "Traceback" not in launched.text()
    assert launched.text().splitlines()[-1].startswith("stopped after step 1 of 5000;")
    assert tool.count("release") == tool.count("create") == 16  # of both ranks
    assert steps(tmp_path / "run") == [1]
    until(lambda: not rank_processes(nodes), "ranks are left")


EXAMPLE = Path(etude.__file__).parents[1] / "examples" / "gsm8k_sandbox"
CODER = '''
"""A model that knows no tools, read as if it asked for a program in its first turn."""

import json

from etude.chat import ParsedResponse, ToolParser
from etude.schemas import FunctionCall


@ToolParser.register("coder")
class Coder(ToolParser):
    stop_token_ids = tuple(range(10, 4000, 7))  # a turn is a few tokens

    def parse(self, text, tools=None):
        return ParsedResponse(text, [FunctionCall(name="code_interpreter", arguments=json.dumps({"code": "print(6 * 7)"}))])
'''


@pytest.mark.slow
def test_gsm8k_with_a_code_interpreter_on_sharded_workers(tiny, tmp_path, cluster, isolation):
    """The script of the example: several turns, programs that run, a sharded step, a checkpoint."""
    (tmp_path / "coder.py").write_text(CODER)
    settings = [
        f"plugins=[{tmp_path}/coder.py]",
        "actor_rollout_ref.rollout.multi_turn.format=coder",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        "actor_rollout_ref.rollout.n=2",
        "data.max_prompt_length=2048",
        "data.max_response_length=256",
        "trainer.total_training_steps=1",
        "trainer.logger=[jsonl]",
        "trainer.report=false",
        f"trainer.default_local_dir={tmp_path}/run",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
        *cluster[1:],
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(EXAMPLE / "run.sh"), str(tiny.model), *settings]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rollouts = list(read_rollouts(tmp_path / "rollouts" / "1.jsonl"))
    assert len(rollouts) == 8
    assert all("42" in rollout["output"] for rollout in rollouts)  # what the programs printed
    (figures,) = metrics(tmp_path / "run")
    assert figures["actor/optimizer_steps"] == 1
    assert weights(tmp_path / "run", 1)


LONG = (
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.ppo_mini_batch_size=1",
    "trainer.total_training_steps=1",
    "data.max_response_length=600",
)


def long_answers(tiny, folder, length, *keys):
    (folder / "loops.py").write_text(LONG_LOOP)
    name = f"long_answers_{length}"
    (folder / "loops.yaml").write_text(f"- {{name: {name}, _target_: 'loops.py:LongAnswers', length: {length}}}")
    agent = f"{ROLLOUT}.agent={{default_agent_loop:{name},agent_loop_config_path:{folder}/loops.yaml}}"
    return tiny.config(folder, agent, *LONG, *keys)


@pytest.mark.slow
def test_the_drivers_bytes_do_not_grow_with_the_answers(tiny, tmp_path, cluster):
    """Batches stay where they were made."""
    found = {}
    for length in (32, 512):
        folder = tmp_path / str(length)
        folder.mkdir()
        with counted_bytes() as counts:
            train(long_answers(tiny, folder, length, *cluster))
        found[length] = counts
        dumped = [json.loads(line) for line in (folder / "rollouts" / "1.jsonl").read_text().splitlines()]
        assert {len(record["response_ids"]) for record in dumped} == {length}
    short, long = (sum(counts.values()) for counts in found.values())
    assert "fetch" not in found[32]
    grown = {name: (found[32].get(name), size) for name, size in found[512].items() if size != found[32].get(name)}
    assert long < 1.2 * short, (
        grown
    )  # of the batch itself, 16 times as many; Ray may add to a reference where its object is
