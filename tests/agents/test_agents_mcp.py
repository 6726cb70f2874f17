"""A rollout over a real MCP server that is killed in the middle: it recovers, or says that infrastructure failed."""

import threading

import pytest
from agents_stage import call, run, says
from mcp_stage import STDIO, HttpServer, configured, stdio_servers

from etude.tools.mcp import close_connections
from etude.trajectory import Provenance, StopReason


@pytest.fixture
def http():
    server = HttpServer("streamable-http")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _closed():
    close_connections()
    yield
    close_connections()
    assert stdio_servers() == []


def attempt_of(request_id):
    return int(request_id.rpartition("/")[2])


def dies_once(request_id, prompt, turn):
    """Each trajectory adds, then calls again; the first one's second call kills the server while the others wait."""
    if turn == 0:
        return says(call("add", a=40, b=2))
    if turn == 1 and attempt_of(request_id) == 0:
        return says(call("die", after=0.5) if request_id.startswith("u0/") else call("wait", seconds=30))
    return says("The answer is 42.")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
def test_a_killed_server_costs_an_attempt_and_no_trajectory(tmp_path, transport, http):
    tools = configured(tmp_path, {"stage": STDIO if transport == "stdio" else http.entry | {"connect_attempts": 8}})
    watched = http.process

    def revive():
        watched.wait(60)
        http.start()

    if transport != "stdio":
        threading.Thread(target=revive, daemon=True).start()
    results, _ = run(None, 4, dies_once, tools.values(), infrastructure_retries=2)
    for result in results:
        assert (result.attempts, result.failures, result.dropped) == (2, 1, None)
        assert "MCP server 'stage'" in result.cause
        assert "no answer" not in result.cause  # nobody waited until the tool's time was up
        assert "timed out" not in result.cause
        trajectory = result.trajectory
        assert trajectory.stop_reason is StopReason.COMPLETED
        [record] = trajectory.tool_calls
        assert (record.name, record.response, record.error) == ("add", "42", None)
        masks = {segment.provenance for segment in trajectory.segments}
        assert {Provenance.SAMPLED, Provenance.TOOL} <= masks


def test_what_the_server_tells_the_model_is_no_failure(tmp_path):
    tools = configured(tmp_path, {"stage": STDIO}, tool_selected_list=["add", "refuse", "picture"])
    turns = [says(call("refuse")), says(call("add", a="x")), says(call("picture")), says("Done.")]
    [result], _ = run(None, 1, turns, tools.values())
    assert (result.attempts, result.failures) == (1, 0)
    refused, wrong, picture = result.trajectory.tool_calls
    assert refused.error == "tool"
    assert "there is no such page" in refused.response
    assert wrong.error == "invalid_arguments"
    assert picture.response.startswith("before\nafter")
