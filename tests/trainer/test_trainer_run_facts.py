"""What a run records of itself: enough to find out what differs, and never a secret."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from etude.cli.main import cli, run
from etude.registry import code_beside
from etude.run_folder import REDACTED
from etude.trainer import run_facts
from etude.trainer.run_facts import describe_run, digest_path, git_state


def test_digests_tell_contents_apart_also_in_folders_and_long_files(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a").write_bytes(b"12")
    (tmp_path / "m" / "b").write_bytes(b"3")
    first = digest_path(tmp_path / "m")
    assert first["bytes"] == 3
    (tmp_path / "m" / "a").write_bytes(b"1")
    (tmp_path / "m" / "b").write_bytes(b"23")
    assert digest_path(tmp_path / "m") != first
    assert digest_path(tmp_path / "none") == {"bytes": None, "sha256": None}
    monkeypatch.setattr(run_facts, "_WHOLE_BYTES", 10)
    monkeypatch.setattr(run_facts, "_PART_BYTES", 4)
    digests = set()
    for changed in (None, 0, 15, 29):
        data = bytearray(30)
        if changed is not None:
            data[changed] = 1
        (tmp_path / "long").write_bytes(data)
        digests.add(digest_path(tmp_path / "long")["sha256"])
    assert len(digests) == 4


def test_the_code_is_a_commit_and_a_digest_of_what_differs(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    assert git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "m")
    clean = git_state(tmp_path, "a.py")
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "untracked.py").write_text("")
    assert git_state(tmp_path, "untracked.py") is None
    (tmp_path / "a.py").write_text("2\n")
    changed = git_state(tmp_path)
    assert changed is not None
    assert (changed["commit"], changed["dirty"]) == (clean["commit"], True)


def test_a_run_folder_says_what_the_run_was_made_from_without_its_secrets(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_TEST_SECRET", "sk-environment")
    secrets = ["+ray.init_kwargs.runtime_env.env_vars.X=${oc.env:ETUDE_TEST_SECRET}", "trainer.total_training_steps=1"]
    arguments = tiny.arguments(tmp_path / "run", *secrets)
    name, *rest = arguments
    assert run(cli, ["train", name, *rest]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["kind"], record["ended"], record["total_steps"]) == ("train", "completed", 1)
    data = record["files"][f"{tiny.folder}/data/train.parquet"]
    assert data == {"key": "data.train_files", **digest_path(tiny.folder / "data" / "train.parquet")}
    keys = {each["key"] for each in record["files"].values()}
    assert {"actor_rollout_ref.model.path", "custom_reward_function.path"} <= keys
    assert record["seeds"]["trainer.seed"] == 1
    assert record["process"]["pid"] == os.getpid()
    assert record["started"] <= record["ended_at"]
    for path in (tmp_path / "run").rglob("*"):
        assert path.suffix in (".pt", ".distcp") or not path.is_file() or b"sk-environment" not in path.read_bytes()
    assert (tmp_path / "run" / "config.yaml").read_text().count(REDACTED) == 1
    resumed = [each for each in arguments if not each.startswith("trainer.total")]
    assert run(cli, ["train", *resumed, secrets[0], "trainer.total_training_steps=2"]) == 0


def write_all(folder, texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_code_that_tool_files_name_and_python_files_import_is_recorded(tmp_path):
    texts = {
        "tools.yaml": "tools:\n  - class_name: tool.py:Price\n  - {command: python, args: [server.py, gone.py]}\n",
        "tool.py": "import json, prices\nfrom inner import deep\nfrom inner.more import x as y\n",
        "server.py": "def",
        "prices.py": "import tool",
        "inner/__init__.py": "",
        "inner/deep.py": "from ..outside import z\nfrom . import near",
        "inner/more.py": "",
        "inner/near.py": "",
        "outside.py": "",
        "other.py": "",
    }
    write_all(tmp_path, texts)
    expected = {tmp_path / name for name in texts} - {tmp_path / "tools.yaml", tmp_path / "other.py"}
    assert {file.resolve() for file in code_beside(tmp_path / "tools.yaml")} == expected
    assert code_beside(tmp_path / "none.py") == code_beside(tmp_path) == []


def test_code_that_is_named_as_a_module_is_recorded(tmp_path, monkeypatch):
    """As tool files written for verl name it: with an edited tool it was the same evaluation, and a run resumed the same."""
    monkeypatch.syspath_prepend(tmp_path)
    classes = ("own.tools.Price", "json.decoder.JSONDecoder", "etude.tools.builtin.calculator.Calculator")
    texts = {
        "tools.yaml": "tools:\n" + "".join(f"  - class_name: '{name}'\n" for name in classes),
        "own/__init__.py": "",
        "own/tools.py": "",
        "own/rules.py": "",
        "score.py": "from own import rules",
    }
    write_all(tmp_path, texts)
    multi_turn = {"tool_config_path": [str(tmp_path / "tools.yaml")]}
    config = {"actor_rollout_ref": {"rollout": {"multi_turn": multi_turn}}, "plugins": ["score"]}
    found = run_facts.digest_files(config)
    assert {*found} == {str(tmp_path / name) for name in texts}
    assert all(each["sha256"] for each in found.values())


def test_code_that_decides_a_reward_is_recorded_wherever_it_is_named(tmp_path, monkeypatch):
    """With an edited scorer of `rewards`, verifier or environment it was the same evaluation, and a run resumed the same."""
    monkeypatch.chdir(tmp_path)
    texts = {
        "one.py": "import two",
        "two.py": "",
        "agent.py": "",
        "verify.py": "",
        "space/task.txt": "",
        "tasks.py": "",
        "loops.yaml": "- {name: mine, _target_: own.Loop}\n",
        "own.py": "",
    }
    write_all(tmp_path, texts)
    monkeypatch.syspath_prepend(tmp_path)
    command = {"command": ["python", "agent.py"], "verifier": ["python", "verify.py"], "workspace": "space"}
    agent = {"openai_agent": command, "agent_loop_config_path": "loops.yaml"}
    config = {
        "actor_rollout_ref": {"rollout": {"agent": agent}},
        "custom_reward_function": {"rewards": [{"path": "one.py"}, {"path": "etude.rewards.tags"}]},
        "env": [{"id": "inspect:tasks.py:sums"}, {"id": "gym:FrozenLake-v1"}, {"id": "mine"}],
    }
    found = run_facts.digest_files(config)
    assert {Path(name).name for name, each in found.items() if each["sha256"]} == {
        *("one.py", "two.py", "agent.py", "verify.py", "space", "tasks.py", "loops.yaml", "own.py")
    }
    assert run_facts.digest_files({**config, "env": "inspect:tasks.py:sums"}) == found
    command["command"] = ["python", "-c", "x" * 5000, "~nobody_here/x", "--directory", ".", "agent.py", "\0"]
    assert run_facts.digest_files(config) == found


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_facts_are_json_whatever_cannot_be_found_out(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    config = {"data": {"train_files": ["hub/none.parquet"]}, "model": {"path": "some/model"}}
    facts = json.loads(json.dumps(describe_run(kind, config if kind == "sft" else {"actor_rollout_ref": config})))
    assert facts["code"]["project"] is None
