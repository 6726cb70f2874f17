"""Tasksets of verifiers, in an interpreter of their own: a stand-in for the package, with the names that the bridge uses.

The package itself takes a minute to install and ten seconds of CPU a rollout: docs/environments.md says what was measured.
"""

import asyncio
import sys

import pytest

from etude.environments import EnvironmentSession
from etude.environments.adapters import verifiers
from etude.environments.loader import load_environments
from etude.errors import AgentError, ConfigError, InfrastructureError, http_status
from etude.options import EnvironmentOptions
from etude.testing.environment_check import check_environment

STAND_IN = {
    "clients/__init__.py": """
class EvalClientConfig:
    def __init__(self, **given): self.__dict__ |= given
class ModelContext(EvalClientConfig): pass
""",
    "clients/eval.py": """
def resolve_api_key(config): return "none"
""",
    "types.py": """
class SamplingConfig: pass
""",
    "utils/loaders.py": """
import asyncio, os, sys, types
from verifiers.v1.clients import eval as clients

class Error(types.SimpleNamespace):
    def model_dump(self, **_): return dict(vars(self))

class Env:
    def __init__(self, config):
        if config["taskset"]["id"] != "stock": raise ModuleNotFoundError("taskset not found")
        tasks = ["right", "HarnessError", "SandboxError", "limit", "wait", "exit", "silent"]
        tasks += ["stray what a library writes", "stray [1]", "stray {}"]
        self.taskset = types.SimpleNamespace(load=lambda: tasks)
    def serving(self): return self
    async def __aenter__(self): pass
    async def __aexit__(self, *_): pass
    def slots(self, task): return [task]
    async def run_slot(self, task, context):
        client = context.client
        seen = {"key": len(clients.resolve_api_key(client)), "leaked": float(client.api_key_var in os.environ)}
        if task == "wait": await asyncio.sleep(60)
        if task == "exit": os._exit(3)
        if task == "silent": return types.SimpleNamespace(traces=[], errors=[])
        if task.startswith("stray"):  # straight to the pipe of answers
            sys.modules["__main__"].answers.write(task.removeprefix("stray ") + "\\n")
            await asyncio.sleep(60)
        print("what a package prints")
        kind = "ProviderError" if task == "limit" else task
        errors = [Error(type=kind, message="gone", status_code=400 if task == "limit" else None)]
        trace = types.SimpleNamespace(reward=0.0 if task != "right" else 0.75, metrics=seen, errors=[])
        return types.SimpleNamespace(traces=[trace], errors=[] if task == "right" else errors)

def resolve_env_config(given): return given
def load_environment(config): return Env(config)
""",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The stand-in is what this interpreter imports in another process."""
    for name in ("__init__.py", "v1/__init__.py", "v1/utils/__init__.py", *(f"v1/{each}" for each in STAND_IN)):
        file = tmp_path / "verifiers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(STAND_IN.get(name.removeprefix("v1/"), ""))
    about = tmp_path / "verifiers-0.4.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: verifiers\nVersion: 0.4.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(verifiers, "_bridges", {})
    yield
    for bridge in verifiers._bridges.values():
        bridge.end()


def opened(id="stock", python=sys.executable, **args):
    return next(
        iter(load_environments([EnvironmentOptions(id=f"verifiers:{id}", python=python, args=args)]).entries.values())
    )


async def drive(entry, task):
    async with EnvironmentSession(entry, {"extra_info": {"task": {"task": task}}, "group_seed": 0}) as session:
        return await session.drive("http://127.0.0.1:9/v1", "secret")


async def test_errors_of_a_trace_are_read_before_its_reward(installed):
    entry = opened()
    assert await drive(entry, 0) == (0.75, {"key": 6, "leaked": 0.0})
    with pytest.raises(AgentError, match="HarnessError: gone"):
        await drive(entry, 1)
    with pytest.raises(InfrastructureError, match="SandboxError: gone"):
        await drive(entry, 2)
    with pytest.raises(AgentError) as refused:
        await drive(entry, 3)
    assert http_status(refused.value) == 400  # the policy's own limit, which ends an agent
    waiting = asyncio.ensure_future(drive(entry, 4))
    await asyncio.sleep(0.2)
    waiting.cancel()
    assert (await drive(entry, 0))[0] == 0.75
    with pytest.raises(InfrastructureError, match="without a trace"):
        await drive(entry, 6)
    for task, line in enumerate(("what a library writes", r"\[1\]", r"\{\}"), 7):
        with pytest.raises(InfrastructureError, match=f"wrote what is no answer: {line}"):
            await drive(entry, task)
    assert (await drive(entry, 0))[0] == 0.75  # the same process goes on
    with pytest.raises(InfrastructureError, match="ended with status 3"):
        await drive(entry, 5)
    assert (await drive(entry, 0))[0] == 0.75  # in a new process
    assert (entry.version, entry.drives) == ("0.4.0", True)


def test_the_check_opens_it_and_leaves_the_rest_to_a_run(installed):
    found = check_environment(EnvironmentOptions(id="verifiers:stock", args={"python": sys.executable}))
    assert [each.message for each in found.all] == ["verifiers:stock 0.4.0", "it drives itself: a run plays it"]


def test_tasks_are_numbers_of_which_the_last_are_for_validation(installed):
    environment = opened(val_samples=2).make()
    assert [[each["task"] for each in environment.tasks(split)] for split in ("train", "val")] == [[*range(8)], [8, 9]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"id": "sotck"}, "does not start: verifiers' process ended with status 1"),
        ({"python": "/no/python"}, "there is no program /no/python"),
        ({"agent": {"runtime": {"type": "docker"}}}, "must be subprocess, not docker"),
        ({"tasket": {}}, "unknown argument 'tasket'; did you mean 'taskset'"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(installed, given, message):
    with pytest.raises(ConfigError, match=message):
        opened(**given)


def test_an_entry_needs_its_interpreter():
    with pytest.raises(ConfigError, match=r"verifiers:stock: .*python"):
        opened(python=None)
