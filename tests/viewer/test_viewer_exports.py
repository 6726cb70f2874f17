"""Exports of rollouts, read back by the formats' own readers: nothing of ids, mask, log-probs, calls and rewards is lost."""

import base64
import gc
import itertools
import json
import math
import sys
import weakref

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from index_stage import MALFORMED, make_record, make_trajectory, opened, verl_line, write_malformed, write_run

from etude.cli.export_rollouts import export_rollouts_command
from etude.cli.main import cli
from etude.cli.main import run as main_run
from etude.dumps import sequence_record, write_rollouts
from etude.errors import ConfigError, DataError, EtudeError
from etude.trajectory import StopReason
from etude.viewer import exports
from etude.viewer.exports import FORMATS, export_rollouts
from etude.viewer.exports.atif import atif_document
from etude.viewer.exports.otel import otlp_request
from etude.viewer.exports.turns import ExportedRollout, read_rollout
from etude.viewer.rows import texts_of

needs_inspect = pytest.mark.skipif(
    "not __import__('importlib.util').util.find_spec('inspect_ai')", reason="needs the extra 'inspect'"
)
ALL = [pytest.param(name, marks=needs_inspect if name == "inspect" else ()) for name in FORMATS]
LOG_PROBS = [-0.1, -0.25, 0.0, 0.0, -0.5, -1.0, -2.0]
SEQUENCE = {
    "prompt_ids": [1, 2, 3],
    "response_ids": [4, 5, 6, 7, 8, 9, 10],
    "response_mask": [1, 1, 0, 0, 1, 1, 1],
    "response_log_probs": LOG_PROBS,
}


def first(path):
    index = opened(path)
    return read_rollout(index, index.rows[0])


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "mine")


@pytest.fixture
def odd(tmp_path):
    """Rollouts of every shape: failed calls, a user's turn, rewritten history, lost values, verl's."""
    trajectory = make_trajectory()
    earlier = [sequence_record(trajectory, input="q", output="a")]
    records = [make_record(1, n, tool_error="timeout") for n in range(6)]
    records[1]["tool_calls"][0]["arguments"] = "{not json \ud800"
    records[1]["messages"][1]["content"] = [{"type": "text", "text": "a \ud800"}, {"type": "image"}]
    records[2]["earlier"] = earlier
    records[3]["segments"][0]["log_probs"] = [None, -1.0]
    records[4] |= {"score": None, "messages": [], "data_source": None, "gts": ["a", "b"], "rewards": {}}
    records[5]["segments"][2]["provenance"] = "user"
    write_rollouts(tmp_path / "odd", 1, records)
    (tmp_path / "odd" / "2.jsonl").write_text(verl_line(2) + verl_line(2, 1, output=None))
    return tmp_path / "odd"


def test_a_rollout_is_read_as_turns(run):
    rollout = first(run)
    assert rollout.prompt == [("user", "12 * 6?")]
    assert [turn.text for turn in rollout.turns] == ["I compute.", "It is 72."]
    assert [turn.context for turn in rollout.turns] == [3, 7]
    assert [turn.token_ids for turn in rollout.turns] == [[4, 5], [8, 9, 10]]
    assert rollout.turns[1].log_probs == [-0.5, -1.0, -2.0]
    (call,) = rollout.turns[0].calls
    assert (call.name, call.arguments, call.response, call.reward) == (
        "calculator",
        {"expression": "12 * 6"},
        "72",
        0.5,
    )
    assert rollout.sequences == [SEQUENCE]


# -- ATIF ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["atif", "harbor.models.trajectories"])
def read_atif(request):
    """A reader of the format, which refuses unknown keys: models of its specification, and Harbor's own (Python 3.12)."""
    models = pytest.importorskip(request.param, reason=f"pip install {request.param.partition('.')[0]}")
    return lambda document: models.Trajectory.model_validate(document).to_json_dict(exclude_none=False)


def covers(read, written):
    """Whether what was read has all that was written; it may have nulls for what was not."""
    if isinstance(written, dict):
        return all(covers(read[key], value) for key, value in written.items())
    if isinstance(written, list):
        return len(read) == len(written) and all(map(covers, read, written))
    return read == written


def test_an_atif_trajectory_holds_ids_mask_and_log_probs(run, read_atif):
    written = atif_document(first(run))
    document = read_atif(written)
    assert covers(document, written)
    assert document["schema_version"] == "ATIF-v1.7"
    assert document["extra"]["sequences"] == [SEQUENCE]
    assert (document["extra"]["score"], document["extra"]["rewards"]) == (1.75, {"calculator": 0.75, "score": 1.0})
    assert [step["source"] for step in document["steps"]] == ["user", "agent", "agent"]
    [call] = document["steps"][1]["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("calculator", {"expression": "12 * 6"})
    assert document["steps"][1]["observation"]["results"][0]["content"] == "72"
    metrics = document["steps"][2]["metrics"]
    assert (metrics["completion_token_ids"], metrics["logprobs"]) == ([8, 9, 10], [-0.5, -1.0, -2.0])


def test_atif_of_odd_rollouts_is_valid_as_files_and_as_lines(odd, tmp_path, read_atif):
    index = opened(odd)
    export_rollouts(index, index.rows, "atif", tmp_path / "all.jsonl")
    documents = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(documents) == 8
    for document in documents:
        assert covers(read_atif(document), document)
    export_rollouts(index, index.rows, "atif", tmp_path / "files")
    files = {json.loads(file.read_text())["trajectory_id"] for file in (tmp_path / "files").iterdir()}
    assert files == {document["trajectory_id"] for document in documents}
    assert "logprobs" not in documents[3]["steps"][1]["metrics"]  # one of them was not finite
    assert len(documents[2]["extra"]["sequences"]) == 2
    assert [step["source"] for step in documents[5]["steps"]] == ["user", "agent", "user", "agent"]


# -- Inspect ---------------------------------------------------------------------------------------------------------


@needs_inspect
def test_inspects_own_reader_gives_every_sample_back(run, odd, tmp_path):
    from inspect_ai.log import list_eval_logs, read_eval_log

    index = opened(run)
    export_rollouts(index, index.rows, "inspect", tmp_path / "logs")
    logs = {
        info.task + info.name.rsplit("/", 1)[-1]: read_eval_log(info) for info in list_eval_logs(str(tmp_path / "logs"))
    }
    assert len(logs) == 3
    log = next(
        log for log in logs.values() if log.eval.metadata == {"run": "mine", "split": "train", "training_step": 1}
    )
    assert sorted((each.id, each.epoch) for each in log.samples) == [("1-0", 1), ("1-0", 2), ("1-1", 1), ("1-1", 2)]
    sample = next(each for each in log.samples if each.uuid == "rollouts/1.jsonl:1")
    assert sample.metadata["sequences"] == [SEQUENCE]
    assert sample.scores["score"].as_float() == 1.75
    assert [message.role for message in sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.messages[1].tool_calls[0].arguments == {"expression": "12 * 6"}
    assert (sample.target, sample.output.completion, sample.output.stop_reason) == ("72", "It is 72.", "stop")
    assert log.results.scores[0].metrics["mean"].value == 1.25
    index = opened(odd)
    export_rollouts(index, index.rows, "inspect", tmp_path / "odd-logs")
    samples = [s for info in list_eval_logs(str(tmp_path / "odd-logs")) for s in read_eval_log(info).samples]
    assert len(samples) == 8


@needs_inspect
def test_a_step_of_many_rollouts_is_several_logs(run, tmp_path, monkeypatch):
    from inspect_ai.log import read_eval_log

    monkeypatch.setattr("etude.viewer.exports.inspect.MAX_SAMPLES", 3)
    index = opened(run)
    export_rollouts(index, index.rows[:4], "inspect", tmp_path / "logs")
    parts = [read_eval_log(str(tmp_path / "logs" / name)) for name in ("train-1.eval", "train-1-2.eval")]
    samples = [sorted((each.id, each.epoch) for each in part.samples) for part in parts]
    assert samples == [[("1-0", 1), ("1-0", 2), ("1-1", 1)], [("1-1", 2)]]


# -- OpenTelemetry ---------------------------------------------------------------------------------------------------


def parse_otlp(request):
    """By OpenTelemetry's own protocol buffers, whose JSON has ids in base64 where OTLP's has them in hexadecimal."""
    trace = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2", reason="needs the extra 'otel'")
    from google.protobuf.json_format import ParseDict

    request = json.loads(json.dumps(request))
    for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in {"traceId", "spanId", "parentSpanId"} & set(span):
            span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return ParseDict(request, trace.TracesData()).resource_spans[0].scope_spans[0].spans


def attributes(span):
    return {each.key: each.value for each in span.attributes}


def numbers(value):
    return [each.int_value if each.HasField("int_value") else each.double_value for each in value.array_value.values]


def test_a_turn_keeps_its_text_and_calls_after_a_compaction(tmp_path):
    record = make_record(1, 0)
    record |= {"first_turn": 4, "kept_turns": [3], "assistant_turns": 6}
    for segment in record["segments"]:
        segment["turn"] += 4
    example = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    record["messages"] = [
        *example,
        *record["messages"][:1],
        {"role": "assistant", "content": "Kept."},
        *record["messages"][1:],
    ]
    earlier, late = record["tool_calls"][0] | {"turn": 1}, record["tool_calls"][0] | {"turn": 5, "name": "search"}
    record["tool_calls"] = [earlier, record["tool_calls"][0] | {"turn": 4}, late]
    write_rollouts(tmp_path, 1, [record])
    rollout = first(tmp_path)
    assert [turn.text for turn in rollout.turns] == ["I compute.", "It is 72."]
    assert [[call.name for call in turn.calls] for turn in rollout.turns] == [["calculator"], ["search"]]
    assert [text for _, text in rollout.prompt] == ["1 + 1?", "2", "12 * 6?", "Kept."]


def test_a_trace_has_a_span_for_the_agent_each_turn_and_each_call(run):
    rollout = first(run)
    spans = parse_otlp(otlp_request(rollout))
    assert [span.name for span in spans] == [
        "invoke_agent etude",
        "chat etude",
        "execute_tool calculator",
        "chat etude",
    ]
    root = attributes(spans[0])
    assert numbers(root["etude.response_ids"]) == SEQUENCE["response_ids"]
    assert numbers(root["etude.response_mask"]) == SEQUENCE["response_mask"]
    assert numbers(root["etude.response_log_probs"]) == LOG_PROBS
    assert {event.attributes[0].value.string_value for event in spans[0].events} == {"calculator", "score", "total"}
    assert {len(span.trace_id) for span in spans} == {16}
    assert {span.parent_span_id for span in spans[1:]} == {spans[0].span_id}
    assert len({span.span_id for span in spans}) == 4
    tool = attributes(spans[2])
    assert json.loads(tool["gen_ai.tool.call.arguments"].string_value) == {"expression": "12 * 6"}
    assert tool["gen_ai.tool.call.result"].string_value == "72"
    message = json.loads(attributes(spans[1])["gen_ai.output.messages"].string_value)[0]
    assert [part["type"] for part in message["parts"]] == ["text", "tool_call"]
    assert spans[0].end_time_unix_nano == pytest.approx(rollout.modified, abs=2)


def test_spans_follow_one_another_and_last_what_was_measured(run):
    root, *children = parse_otlp(otlp_request(first(run)))
    seconds = [(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in children]
    assert seconds == pytest.approx([1.5 * 2 / 5, 0.01, 1.5 * 3 / 5])
    for before, after in itertools.pairwise(children):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert root.start_time_unix_nano == children[0].start_time_unix_nano


def test_spans_have_the_times_of_a_dump_that_knows_them(tmp_path):
    timeline = [["queue", 90.0, 9.0], ["generate_sequences", 100.0, 2.0], ["tool_calls", 103.0, 1.0]]
    record = make_record() | {
        "timeline": [*timeline, ["generate_sequences", 105.0, 4.0], ["compute_score", 109.0, 1.0]]
    }
    write_rollouts(tmp_path, 1, [record])
    spans = parse_otlp(otlp_request(first(tmp_path)))
    times = [(span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in spans]
    assert times == [(100.0, 109.0), (100.0, 102.0), (103.0, 103.01), (105.0, 109.0)]


def test_the_names_of_attributes_are_those_of_the_conventions(odd):
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
    index, used, codes = opened(odd), set(), set()
    for row in index.rows:
        for span in parse_otlp(otlp_request(read_rollout(index, row))):
            used |= {name for name in attributes(span) if name.startswith("gen_ai.")}
            codes.add(span.status.code)
    assert used <= known
    assert codes == {0, 2}  # a call that failed is an error


# -- parquet ---------------------------------------------------------------------------------------------------------


def test_a_table_has_a_row_per_rollout_with_exact_lists(run, odd, tmp_path, monkeypatch):
    monkeypatch.setattr("etude.viewer.exports.parquet._BATCH", 4)
    index = opened(run)
    export_rollouts(index, index.rows, "parquet", tmp_path / "all.parquet")
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert [row["place"] for row in rows] == [row.place for row in index.rows]
    assert {name: rows[0][name] for name in SEQUENCE} == SEQUENCE
    assert (rows[0]["score"], dict(rows[0]["rewards"])) == (1.75, {"calculator": 0.75, "score": 1.0})
    assert json.loads(rows[0]["messages"]) == index.read(index.rows[0])["messages"]
    assert (rows[0]["input"], rows[0]["output"]) == tuple(texts_of(index.read(index.rows[0])))
    index = opened(odd)
    export_rollouts(index, index.rows, "parquet", tmp_path / "odd.parquet")
    rows = pq.read_table(tmp_path / "odd.parquet").to_pylist()
    assert (rows[6]["response_ids"], rows[6]["expected"], rows[6]["score"]) == (None, "3", 0.5)
    assert math.isnan(rows[3]["response_log_probs"][0])
    assert json.loads(rows[2]["earlier"]) == [SEQUENCE]


# -- all formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ALL)
def test_few_rollouts_are_in_memory_at_once(tmp_path, monkeypatch, format):
    alive, most = [], []
    original = exports.read_rollout

    def counted(index, row):
        rollout = original(index, row)
        alive.append(weakref.ref(rollout))
        if len(alive) % 30 == 0:
            gc.collect()
            most.append(sum(each() is not None for each in alive))
        return rollout

    monkeypatch.setattr(exports, "read_rollout", counted)
    for name in ("parquet._BATCH", "inspect.MAX_SAMPLES"):
        if name.startswith(format):
            monkeypatch.setattr(f"etude.viewer.exports.{name}", 20)
    write_rollouts(tmp_path / "run", 1, [make_record(1, n) for n in range(60)])
    index = opened(tmp_path / "run")
    assert export_rollouts(index, index.rows, format, tmp_path / "out") == 60
    assert max(most) <= 21, most


@pytest.mark.parametrize("format", ["atif", "otel", "parquet"])
def test_the_same_dumps_give_the_same_bytes(odd, tmp_path, format):
    for name in ("one", "two"):
        index = opened(odd)
        export_rollouts(index, index.rows, format, tmp_path / f"{name}.jsonl")
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


@pytest.mark.parametrize("format", ALL)
def test_a_malformed_record_is_named_and_leaves_nothing_behind(tmp_path, format):
    records = [make_record(), make_record(1, 1)]
    records[1]["segments"] = [{"token_ids": [1]}]
    write_rollouts(tmp_path / "run", 1, records)
    index = opened(tmp_path / "run")
    with pytest.raises(DataError, match=r"1.jsonl:2: rollout record: 'segments' is malformed"):
        export_rollouts(index, index.rows, format, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_refusals_are_clear(run, tmp_path):
    index = opened(run)
    with pytest.raises(ConfigError, match="known are atif, inspect, otel, parquet"):
        export_rollouts(index, index.rows, "csv", tmp_path / "out")
    with pytest.raises(DataError, match="no rollout to export"):
        export_rollouts(index, [], "otel", tmp_path / "out")
    with pytest.raises(ConfigError, match="exists: name a new file"):
        export_rollouts(index, index.rows, "otel", run)
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match="cannot write"):
        export_rollouts(index, index.rows, "otel", tmp_path / "file" / "out")


def test_the_command_filters_and_says_what_was_left_out(run, tmp_path):
    (run / "rollouts" / "3.jsonl").write_text("nonsense\n")
    arguments = [str(run), "--format", "atif", "--out", str(tmp_path / "out.jsonl"), "--filter", "stop:response_length"]
    result = CliRunner().invoke(export_rollouts_command, arguments)
    assert result.output.splitlines() == [
        f"{tmp_path / 'out.jsonl'}: 4 rollouts",
        "left out: 1 lines that are no rollouts, first rollouts/3.jsonl:1 (not JSON (Expecting value: line 1 column 1 "
        "(char 0)); was it cut, edited or replaced?)",
    ]
    stops = [json.loads(line)["extra"]["stop_reason"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert stops == [StopReason.RESPONSE_LENGTH.value] * 4


def test_an_exported_rollout_names_its_run(run, monkeypatch):
    monkeypatch.chdir(run)
    index = opened(".")
    rollout = read_rollout(index, index.rows[0])
    assert isinstance(rollout, ExportedRollout)
    assert rollout.run == "mine"


@pytest.mark.parametrize(
    ("package", "module", "command", "extra"),
    [
        (
            "inspect_ai.log",
            "etude.viewer.exports.inspect",
            "export-rollouts --format inspect --out x",
            "inspect",
        ),
        ("textual", "etude.viewer.tui", "view", "viewer"),
    ],
)
def test_a_missing_extra_is_one_line_to_run(run, tmp_path, monkeypatch, capsys, package, module, command, extra):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main_run(cli, [*command.split(), str(run)]) == 2
    assert f"pip install 'etude[{extra}]'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("format", ["atif", "otel", "parquet"])
@pytest.mark.parametrize(("place", "value"), MALFORMED, ids=lambda each: str(each)[:40])
def test_a_malformed_record_is_exported_or_named(tmp_path, place, value, format):
    index = opened(write_malformed(tmp_path / "run", place, value))
    try:
        said = str(export_rollouts(index, index.rows, format, tmp_path / "out"))
    except DataError as error:
        said = str(error)
    assert said == "1" or "rollouts/1.jsonl:1" in said
    assert not list(tmp_path.glob(".*out"))
