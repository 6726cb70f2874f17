"""Agents that are commands: their environment, their endings, and what they leave behind."""

import os
import signal
import sys

import pytest
from agents_stage import says
from gateway_stage import PROGRAM, roll
from wait_stage import is_running, until

from etude.agents.gateway import check_openai_agent
from etude.errors import ConfigError, EtudeError
from etude.options import OpenAIAgentOptions


def test_a_command_finds_its_policy_in_a_clean_environment(loop_of, monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    program = PROGRAM + "assert 'A_SECRET' not in os.environ\nprint(0.25)\n"
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]))
    assert result.trajectory.response_ids == says("5")
    assert result.trajectory.rewards.score == 0.25


def test_a_command_without_a_number_gives_no_reward(loop_of):
    [result], _ = roll(loop_of(command=[sys.executable, "-c", PROGRAM]))
    assert result.trajectory.rewards.score is None


def test_a_command_that_fails_is_the_users_bug(loop_of):
    with pytest.raises(EtudeError, match=r"ended with status 3: oh no"):
        roll(loop_of(command=[sys.executable, "-c", "import sys; print('oh  no', file=sys.stderr); sys.exit(3)"]))


def test_a_command_that_does_not_exist(loop_of):
    with pytest.raises(EtudeError, match="cannot be started"):
        roll(loop_of(command=["/no/such/program"]))


def test_a_file_that_is_no_program_is_told_at_once(loop_of, tmp_path):
    plain = tmp_path / "agent"
    plain.write_text("echo 1\n")
    with pytest.raises(ConfigError, match="cannot be started"):
        check_openai_agent(OpenAIAgentOptions(command=(str(plain),)))
    plain.chmod(0o755)
    check_openai_agent(OpenAIAgentOptions(command=(str(plain),)))
    with pytest.raises(EtudeError, match=r"cannot be started: .*Exec format error"):
        roll(loop_of(command=[str(plain)]))


@pytest.mark.parametrize("leaves", [False, True], ids=["its group", "a session of its own"])
def test_what_a_command_leaves_behind_holds_nobody_up(loop_of, leaves, tmp_path):
    child = f"import os, time, pathlib; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(60)"
    program = (
        PROGRAM
        + "import subprocess, pathlib, time\n"
        + f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session={leaves})\n"
        + f"while not pathlib.Path({str(tmp_path / 'pid')!r}).exists(): time.sleep(0.01)\n"
        + "print(0.5)\n"
    )
    before = set(os.listdir("/proc/self/fd"))
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]), trajectory_timeout=50.0)
    assert result.trajectory.rewards.score == 0.5
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1
    pid = int((tmp_path / "pid").read_text())
    if leaves:
        os.kill(pid, signal.SIGKILL)
    else:
        until(lambda: not is_running(pid))


def test_a_command_may_say_much_and_read_nothing(loop_of):
    program = "print('x' * 3_000_000)\n" + PROGRAM.replace(
        "row = json.load(sys.stdin)", "row = {'raw_prompt': [{'role': 'user', 'content': 'a'}]}"
    )
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]))
    assert result.trajectory.response_ids == says("5")
