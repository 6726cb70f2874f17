"""A rollout in Search-R1's format: a bare query, a real search service, results between tags, an answer that ends."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from agents_stage import CHAT, TOKENIZER, Echo, roll, run, says

from etude.agents import RolloutOptions
from etude.chat import ToolParser
from etude.errors import ConfigError
from etude.inference import SamplingParams
from etude.tools.builtin.search import SearchTool
from etude.trajectory import Provenance, StopReason


class Retriever(BaseHTTPRequestHandler):
    """`POST /retrieve`, as Search-R1's server answers it."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        passage = {"document": {"contents": '"Red panda"\nIt lives in Asia.'}, "score": 1.0}
        body = json.dumps({"result": [[passage] * asked["topk"] for _ in asked["queries"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def retriever():
    with ThreadingHTTPServer(("127.0.0.1", 0), Retriever) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def rollout(script, tool):
    return roll(script, [tool], parser=ToolParser.get_tool_parser("search_r1", TOKENIZER))


def test_a_search_and_an_answer(retriever):
    url = f"http://127.0.0.1:{retriever.server_port}/retrieve"
    tool = SearchTool({"retrieval_service_url": url, "topk": 1, "result_format": "text"})
    script = [says("<think>Where?</think><search> red panda </search>"), says("<answer> Asia </answer>")]
    trajectory, engine = rollout(script, tool)
    assert retriever.asked == [{"queries": ["red panda"], "topk": 1, "return_scores": True}]
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert [record.error for record in trajectory.tool_calls] == [None]
    information = '<information>Doc 1 (Title: "Red panda")\nIt lives in Asia.</information>'
    assert trajectory.messages[-2] == {"role": "user", "content": information}
    assert information in TOKENIZER.decode(engine.asked[1][1])
    between = [s for s in trajectory.segments if s.provenance not in (Provenance.SAMPLED, Provenance.TEMPLATE)]
    assert information in TOKENIZER.decode([token for segment in between for token in segment.token_ids])


def test_a_query_that_cannot_be_asked_is_told_in_the_same_tags(retriever):
    tool = SearchTool({"retrieval_service_url": f"http://127.0.0.1:{retriever.server_port}/retrieve"})
    trajectory, _ = rollout([says("<search></search>"), says("<answer>no</answer>")], tool)
    assert retriever.asked == []
    assert (
        trajectory.messages[-2]["content"] == "<information>tool call 1 was not read: the query is empty</information>"
    )
    assert [record.error for record in trajectory.tool_calls] == ["malformed"]


def test_a_turn_that_ends_at_a_stop_text_is_closed_by_the_template(retriever):
    """The engine stopped at `</search>`: the sampled ids stay as they are, and the end of turn is put behind them."""
    tool = SearchTool({"retrieval_service_url": f"http://127.0.0.1:{retriever.server_port}/retrieve", "topk": 1})
    turn = TOKENIZER.encode("<search> red panda </search>", add_special_tokens=False)
    trajectory, engine = rollout([turn, says("<answer> Asia </answer>")], tool)
    assert [params.stop for _, _, params in engine.asked] == [("</search>", "</answer>", "</tool_call>")] * 2
    sampled, end, *_ = trajectory.segments
    assert (list(sampled.token_ids), sampled.provenance) == (turn, Provenance.SAMPLED)
    assert (end.token_ids[0], end.provenance) == (CHAT.end_of_turn_id, Provenance.TEMPLATE)
    prompt = len(trajectory.prompt_ids)
    assert engine.asked[1][1][prompt : prompt + len(turn) + 1] == [*turn, CHAT.end_of_turn_id]
    assert trajectory.response_mask[: len(turn) + 1] == [1] * len(turn) + [0]


@pytest.mark.parametrize(
    ("format", "stop", "expected"),
    [
        ("search_r1", None, ("</search>", "</answer>", "</tool_call>")),
        ("search_r1", (), ()),
        ("search_r1", ("</code>",), ("</code>",)),
        ("rl_factory", None, ("</answer>",)),
        ("rl_factory_calls_first", None, ()),
        ("hermes", None, ()),
        ("hermes", ("</code>",), ("</code>",)),
    ],
)
def test_stop_texts_are_those_of_the_configuration_or_else_of_the_format(format, stop, expected):
    parser = ToolParser.get_tool_parser(format, TOKENIZER)
    _, engine = run(script=[says("<answer>5</answer>")], tools=[Echo()], parser=parser, stop=stop)
    assert [params.stop for _, _, params in engine.asked] == [expected]


def test_stop_texts_reach_a_single_turn_and_must_be_texts():
    _, engine = run(stop=("\n\n",))
    assert SamplingParams.of(engine.asked[0][2]).stop == ("\n\n",)
    for wrong in (("",), (3,)):
        with pytest.raises(ConfigError, match=r"^stop\[0\] must be text"):
            RolloutOptions(stop=wrong)
