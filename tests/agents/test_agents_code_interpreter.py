"""The rollout tests of the documents' sandbox tool, by their names: the real `code_interpreter` in the embedded sandbox,
a scripted model."""

import pytest
import yaml
from agents_stage import CHAT, QUESTION, TOKENIZER, Recorder, call, context, encode, roll, run, says
from server_stage import ServerProcess

from etude.agents import AgentLoopManager, to_batch
from etude.sandbox import RunRequest, RunStatus, SandboxClient, SandboxUnavailableError
from etude.schemas import OpenAIFunctionToolSchema
from etude.tools import BaseTool, initialize_tools_from_config
from etude.tools.builtin.code_interpreter import NOTHING, SandboxFusionTool
from etude.trajectory import Provenance, StopReason

SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "A tool for executing code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to be executed.", "enum": None}},
            "required": ["code"],
        },
        "strict": False,
    },
}
ENTRY = {
    "class_name": "etude.tools.builtin.code_interpreter.SandboxFusionTool",
    "config": {
        "type": "native",
        "num_workers": 4,
        "rate_limit": 4,
        "default_timeout": 20,
        "default_language": "python",
        "enable_global_rate_limit": True,
        "rate_limiter_name": "agents_code_interpreter",
    },
    "tool_schema": SCHEMA,
}
ROW = {"raw_prompt": QUESTION, "tools_kwargs": {"code_interpreter": {}}}
PAY = "pay = 200000\nshare = 10000 / 100000\nprint(pay + pay * share)"


@pytest.fixture(scope="module", autouse=True)
def sandbox():
    """Started once for the module, or the reason to skip it."""
    client = SandboxClient(workers=4)
    try:
        client.run_blocking(RunRequest("print(1)"))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    yield client
    client.close()


@pytest.fixture
def tool(tmp_path):
    """The tool of the documents' YAML; nothing of a trajectory may be left in it."""
    file = tmp_path / "sandbox_fusion_tool_config.yaml"
    file.write_text(yaml.safe_dump({"tools": [ENTRY]}), encoding="utf-8")
    (made,) = initialize_tools_from_config(str(file))
    yield made
    assert made._instance_dict == {}
    assert (made._here.held, made._here.waiting) == (0, 0)
    if made._client is not None:
        made._client.close()


def program(code):
    return call("code_interpreter", code=code)


def test_tools_registration(tool):
    """From the YAML to what the model is shown, and nothing is started by it."""
    assert isinstance(tool, SandboxFusionTool)
    assert isinstance(tool, BaseTool)
    assert tool.name == "code_interpreter"
    assert tool.get_openai_tool_schema() == OpenAIFunctionToolSchema.model_validate(SCHEMA)
    assert tool._options.default_timeout == 20
    assert tool._client is None
    manager = AgentLoopManager(context([tool]), Recorder([]))
    assert manager.loop_name({}) == "tool_agent"
    shown = tool.get_openai_tool_schema().to_openai()
    trajectory, engine = roll([says("5")], [tool], row=ROW)
    assert engine.asked[0][1] == trajectory.prompt_ids == CHAT.initial_ids(QUESTION, [shown])
    assert "code_interpreter" in TOKENIZER.decode(trajectory.prompt_ids)
    assert tool._client is None  # a tool that was created and never called starts no sandbox either


def test_rollout_req_creation(tool):
    """The trajectory of a row: prompt, messages, segments with their masks, sampling, and the batch made of it."""
    turns = [says(program("print(6 * 7)")), says("The answer is 42.")]
    [result], _ = run(None, 1, turns, [tool], row=ROW | {"uid": "u", "rollout_index": 3})
    trajectory = result.trajectory
    assert trajectory.request_id == "u/3/0"
    assert trajectory.prompt_ids == CHAT.initial_ids(QUESTION, [tool.get_openai_tool_schema().to_openai()])
    assert trajectory.messages == [
        *QUESTION,
        {"role": "assistant", "content": program("print(6 * 7)")},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "The answer is 42."},
    ]
    kinds = [segment.provenance for segment in trajectory.segments]
    assert kinds[0] is kinds[-1] is Provenance.SAMPLED
    assert Provenance.TOOL in kinds
    sampled = [s.token_ids for s in trajectory.segments if s.provenance is Provenance.SAMPLED]
    assert [list(ids) for ids in sampled] == turns
    assert sum(trajectory.response_mask) == sum(map(len, turns))
    assert (trajectory.assistant_turns, trajectory.user_turns, trajectory.num_turns) == (2, 1, 4)
    assert trajectory.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert set(trajectory.rewards.final) == {"code_interpreter"}
    columns = to_batch([result], pad_token_id=0).batch
    assert columns["input_ids"][0].tolist() == trajectory.prompt_ids + trajectory.response_ids
    assert columns["response_mask"][0].tolist() == trajectory.response_mask


def test_over_size_case(tool):
    """A rollout ends before its context is longer than the model's, whoever would have made it so, and keeps what fits."""
    prompt = len(CHAT.initial_ids(QUESTION, [tool.get_openai_tool_schema().to_openai()]))
    long_output = says(program("print('spam ' * 400)"))
    limit = prompt + len(long_output) + 20  # room for less of the output than is worth showing
    trajectory, engine = roll([long_output, says("5")], [tool], row=ROW, max_model_len=limit)
    assert trajectory.stop_reason is StopReason.TOOL_RESPONSE_OVERFLOW
    assert trajectory.response_ids == long_output
    assert "spam spam" in trajectory.tool_calls[0].response  # it ran
    assert len(engine.asked) == 1

    long_turn = says(program("print(1) #" + " more" * 400))
    trajectory, _ = roll([long_turn], [tool], row=ROW, max_model_len=limit)
    assert trajectory.stop_reason is StopReason.CONTEXT_LENGTH
    assert len(trajectory.prompt_ids) + trajectory.response_length == limit
    assert "spam" not in str(trajectory.tool_calls)

    trajectory, engine = roll([], [tool], row=ROW, max_model_len=prompt)
    assert (trajectory.stop_reason, engine.asked) == (StopReason.PROMPT_TOO_LONG, [])


def test_tool_call_basic_case(tool):
    """The program runs, what it printed is the tool's message, and the model goes on behind it."""
    trajectory, engine = roll([says(program(PAY)), says("#### 220000")], [tool], row=ROW)
    [record] = trajectory.tool_calls
    assert (record.name, record.response, record.error, record.reward) == ("code_interpreter", "220000.0", None, 0.0)
    assert record.metrics["status"] == RunStatus.FINISHED.value
    shown = [TOKENIZER.decode(s.token_ids) for s in trajectory.segments if s.provenance is Provenance.TOOL]
    assert shown == ["220000.0"]
    assert engine.asked[1][1] == trajectory.prompt_ids + trajectory.response_ids[: -len(says("#### 220000"))]
    assert TOKENIZER.decode(engine.asked[1][1]).count("220000.0") == 1
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.rewards.steps == [(0, "code_interpreter", 0.0)]


def test_tool_call_batch_case(tool):
    """Rows and calls of one turn all at once: each call's result comes back to the place that asked for it."""
    count, calls = 6, 3

    def script(request_id, prompt, turn):
        row = int(request_id.split("/")[1])
        if turn == 0:
            return says("".join(program(f"print({row} * 1000 + {k})") for k in range(calls)))
        return [*encode(f"row {row}"), CHAT.end_of_turn_id]

    results, engine = run(None, count, script, [tool], row=ROW)
    assert len(engine.asked) == 2 * count
    for row, result in enumerate(results):
        trajectory = result.trajectory
        assert (result.attempts, result.failures) == (1, 0)
        assert [r.response for r in trajectory.tool_calls] == [str(row * 1000 + k) for k in range(calls)]
        assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == [
            str(row * 1000 + k) for k in range(calls)
        ]
        assert trajectory.messages[-1]["content"] == f"row {row}"


@pytest.mark.slow
@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_server_that_dies_and_returns_costs_an_attempt_and_never_a_state(tmp_path, max_retries):
    """The second cell of the first attempt meets a server that knows nothing of the first one: nobody is told of it, no
    cell runs in an interpreter that lacks its variables, and the trajectory begins again."""
    servers = [ServerProcess("--workers", "2")]
    config = {**ENTRY["config"], "stateful": True, "sandbox_fusion_url": servers[0].url, "max_retries": max_retries}
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [{**ENTRY, "config": config}]}), encoding="utf-8")
    (stateful,) = initialize_tools_from_config(str(file))

    def script(request_id, prompt, turn):
        if turn == 1 and len(servers) == 1:
            port = servers[0].url.rsplit(":", 1)[1]
            servers[0].__exit__()
            servers.append(ServerProcess("--workers", "2", "--port", port))
        return says([program("x = 41"), program("print(x + 1)"), "42"][turn])

    try:
        [result], _ = run(None, 1, script, [stateful], row=ROW)
        assert (result.attempts, result.failures) == (2, 1)
        assert [record.response for record in result.trajectory.tool_calls] == [NOTHING, "42"]
        assert stateful._instance_dict == {}
    finally:
        servers[-1].__exit__()
        stateful._client.close()
