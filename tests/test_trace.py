"""Traces: spans nest as the calls did, never mix, cost nothing when off, and reach every backend."""

import asyncio
import builtins
import json
import logging
import sys
import types
from contextlib import contextmanager
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, MissingExtraError
from etude.trace import TRACE_BACKENDS, TraceOptions, Tracer, is_traced, rollout_trace_op, span, traced
from etude.trace.span import MAX_CHARS, truncate_value
from etude.trace.tracer import Background


class SpanList:
    """A backend that keeps spans in the order in which they end."""

    def __init__(self):
        self.spans = []

    def begin(self, span):
        pass

    def end(self, span):
        self.spans.append(span)

    def close(self):
        pass


@contextmanager
def collect_spans():
    """The spans of everything awaited inside the block."""
    collected = SpanList()
    with traced(collected, "collected"):
        yield collected.spans


class Searcher:
    @rollout_trace_op
    async def search(self, query, top=3, **options):
        """Finds things."""
        await asyncio.sleep(0)
        if query == "bad":
            raise ValueError("no")
        return [query] * top


@rollout_trace_op
async def outer(names):
    return await asyncio.gather(*(Searcher().search(name) for name in names))


async def test_a_decorated_function_is_the_plain_one_outside_a_trace():
    assert not is_traced()
    assert await Searcher().search("a", top=1) == ["a"]
    with pytest.raises(ValueError, match="no"):
        await Searcher().search("bad")
    assert (Searcher.search.__name__, Searcher.search.__doc__) == ("search", "Finds things.")
    assert asyncio.iscoroutinefunction(Searcher.search)
    with span("tool", "x") as nothing:
        assert nothing is None


async def test_a_call_leaves_its_arguments_its_result_and_its_error():
    with collect_spans() as spans:
        await Searcher().search("a", top=2, lang="en")
        with pytest.raises(ValueError, match="no"):
            await Searcher().search("bad")
        with pytest.raises(TypeError):
            await Searcher().search()
    good, bad, wrong = spans
    assert (good.name, good.kind, good.error) == ("Searcher.search", "op", None)
    assert good.attributes == {
        "inputs": {"query": "a", "top": 2, "options": {"lang": "en"}},
        "output": ["a", "a"],
    }
    assert (bad.error, wrong.error) == ("ValueError", "TypeError")
    assert bad.attributes == {"inputs": {"query": "bad"}}
    assert all(each.seconds >= 0 and each.start > 1.6e9 for each in spans)


async def test_spans_nest_across_tasks():
    with collect_spans() as spans:
        await outer(["a", "b"])
    *inner, whole = spans
    assert [each.name for each in spans] == ["Searcher.search", "Searcher.search", "outer"]
    assert all(each.parent is whole for each in inner)
    assert whole.parent is None
    assert len({each.span_id for each in spans}) == 3


async def test_concurrent_trajectories_never_mix():
    sinks = [SpanList() for _ in range(20)]

    async def trajectory(i):
        with traced(sinks[i], f"t{i}"):
            for _ in range(5):
                await asyncio.sleep(0)
                await outer([str(i)] * 2)

    await asyncio.gather(*(trajectory(i) for i in range(20)))
    for i, sink in enumerate(sinks):
        assert len(sink.spans) == 15
        assert {each.trace_id for each in sink.spans} == {f"t{i}"}
        assert {q for each in sink.spans if each.kind == "op" for q in each.attributes["inputs"].get("names", [])} == {
            str(i)
        }


# --- values --------------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


class Rude:
    def __repr__(self):
        raise RuntimeError("no")

    __str__ = __len__ = __iter__ = __getattr__ = __repr__


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    )
)
def test_any_value_becomes_a_json_value(value):
    json.dumps(truncate_value(value)).encode()


def test_values_are_bounded_and_strangers_are_named():
    assert truncate_value(Rude()) == "<Rude>"
    assert truncate_value(Colour.RED) == "RED"
    assert truncate_value("x" * 50_000_000) == "x" * MAX_CHARS + "… (50000000 characters)"
    assert len(json.dumps(truncate_value([["x" * 10_000] * 1000] * 1000))) < 20_000_000
    assert truncate_value(list(range(60)))[-1] == "… (60 items)"
    assert truncate_value({i: i for i in range(60)})["…"] == "60 entries"
    assert truncate_value(10**100).startswith("<int of")
    assert truncate_value("a\ud800") == "a?"
    circle = []
    circle.append(circle)
    json.dumps(truncate_value(circle))


# --- which ---------------------------------------------------------------------------------------------------------

SAMPLES = [f"3.0-{i // 8}" for i in range(400)]


def chosen(**options):
    return Tracer(TraceOptions("list", **options), SpanList()).chosen(SAMPLES)


def test_a_share_is_traced_always_the_same():
    assert chosen() == set(range(400))
    assert chosen(sample_rate=0.0) == set()
    half = chosen(sample_rate=0.5)
    assert half == chosen(sample_rate=0.5)
    assert 150 < len(half) < 250
    assert chosen(sample_rate=0.2) < half


def test_a_number_of_prompts_is_traced_with_all_their_answers():
    few = chosen(max_samples_per_step_per_worker=3)
    assert len(few) == 24
    assert len({SAMPLES[i] for i in few}) == 3


def test_the_number_holds_for_a_step_whose_prompts_come_one_by_one():
    tracer = Tracer(TraceOptions("list", max_samples_per_step_per_worker=3), SpanList())
    for step in (3, 4):
        counts = [len(tracer.chosen([f"{step}.0-{i}"] * 8, step)) for i in range(50)]
        assert counts == [8] * 3 + [0] * 47
    assert len(tracer.chosen(["val-0", "val-1"])) == 2  # no step's


@pytest.mark.parametrize("options", [{"sample_rate": 1.1}, {"max_samples_per_step_per_worker": 0}])
def test_options_that_make_no_sense(options):
    with pytest.raises(ConfigError, match=f"^{next(iter(options))} must"):
        TraceOptions(**options)


def test_no_backend_no_tracer_and_an_unknown_one_is_an_error():
    assert Tracer.of(TraceOptions(), "p", "e") is None
    with pytest.raises(ConfigError, match="unknown trace backend 'jsonlines'; did you mean 'jsonl'"):
        Tracer.of(TraceOptions("jsonlines"), "p", "e")


# --- backends ------------------------------------------------------------------------------------------------------


async def a_trajectory(tracer, name="3.0-1/8/0"):
    with tracer.trajectory(name, {"step": 3, "uid": "3.0-1", "nothing": None}) as whole:
        await outer(["a", "b"])
        with pytest.raises(ValueError, match="no"):
            await Searcher().search("bad")
        whole.set(stop_reason="completed")


async def test_json_lines(tmp_path):
    path = tmp_path / "run" / "traces.jsonl"
    tracer = Tracer.of(TraceOptions("jsonl", path=str(path)), "p", "e")
    await a_trajectory(tracer)
    await a_trajectory(tracer, "3.0-1/9/0")
    tracer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = lines[:5]
    assert [line["name"] for line in first] == ["Searcher.search"] * 2 + ["outer", "Searcher.search", "trajectory"]
    ids = {line["span"]: line for line in first}
    root = first[-1]
    assert (root["parent"], root["kind"]) == (None, "trajectory")
    assert root["attributes"] == {"step": 3, "uid": "3.0-1", "nothing": None, "stop_reason": "completed"}
    assert ids[first[0]["parent"]]["name"] == "outer"
    assert [line["error"] for line in first] == [None, None, None, "ValueError", None]
    assert {line["trace"] for line in lines} == {"3.0-1/8/0", "3.0-1/9/0"}
    assert all(set(line) == set(root) for line in lines)


async def test_a_backend_that_fails_costs_no_trajectory(tmp_path, caplog):
    (tmp_path / "file").touch()
    tracer = Tracer.of(TraceOptions("jsonl", path=str(tmp_path / "file" / "below")), "p", "e")
    with caplog.at_level(logging.WARNING, logger="etude.trace"):
        await a_trajectory(tracer)
        await a_trajectory(tracer)
        tracer.close()
    assert [record.message.split(":")[0] for record in caplog.records] == ["tracing stopped"]


async def test_a_backend_of_ones_own_is_registered(monkeypatch):
    kept = SpanList()
    monkeypatch.setitem(TRACE_BACKENDS._items, "mine", lambda options, project, experiment: kept)
    await a_trajectory(Tracer.of(TraceOptions("mine"), "p", "e"))
    assert [each.name for each in kept.spans][-1] == "trajectory"


async def test_opentelemetry_for_real():
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from etude.trace.otel import OpenTelemetryBackend

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(TraceOptions("otel"), OpenTelemetryBackend("p/e", provider))
    await a_trajectory(tracer)
    await a_trajectory(tracer, "another")
    tracer.close()
    spans = exporter.get_finished_spans()
    assert len(spans) == 10
    assert len({each.context.trace_id for each in spans}) == 2
    first = {each.context.span_id: each for each in spans[:5]}
    root = next(each for each in first.values() if each.parent is None)
    assert root.name == "trajectory"
    assert root.attributes["etude.step"] == 3
    assert root.attributes["etude.trace"] == "3.0-1/8/0"
    outer_span = next(each for each in first.values() if each.name == "outer")
    assert outer_span.parent.span_id == root.context.span_id
    searches = [each for each in first.values() if each.name == "Searcher.search"]
    assert [each.parent.span_id == outer_span.context.span_id for each in searches] == [True, True, False]
    assert json.loads(searches[0].attributes["etude.output"]) == ["a", "a", "a"]
    assert [each.status.status_code.name for each in searches] == ["UNSET", "UNSET", "ERROR"]
    assert all(each.end_time >= each.start_time for each in spans)


def test_opentelemetry_exports_over_http_by_its_own_variables(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    import http.server
    import threading

    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        tracer = Tracer.of(TraceOptions("otel"), "p", "e")
        asyncio.run(a_trajectory(tracer))
        tracer.close()
    finally:
        server.shutdown()
        server.server_close()
    assert [path for path, _ in got] == ["/v1/traces"]
    assert b"Searcher.search" in got[0][1] or got[0][1][:2] == b"\x1f\x8b"  # plain or gzip


@pytest.mark.parametrize(
    ("backend", "module", "extra"),
    [("otel", "opentelemetry", "otel"), ("mlflow", "mlflow", "mlflow"), ("weave", "weave", "weave")],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch, backend, module, extra):
    monkeypatch.delitem(sys.modules, f"etude.trace.{backend}", raising=False)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == module:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=rf"pip install 'etude\[{extra}\]'"):
        Tracer.of(TraceOptions(backend), "p", "e")


class FakeMlflow(types.ModuleType):
    """The part of MLflow 3 that is used, which keeps what it is told."""

    def __init__(self):
        super().__init__("mlflow")
        self.spans, self.experiment, self.flushed = [], None, 0
        self.entities = types.ModuleType("mlflow.entities")
        self.entities.SpanStatusCode = Enum("SpanStatusCode", {"OK": "OK", "ERROR": "ERROR"})

    def set_experiment(self, experiment_name):
        self.experiment = experiment_name
        return types.SimpleNamespace(experiment_id="7")

    def start_span_no_context(
        self, name, span_type="UNKNOWN", parent_span=None, tags=None, experiment_id=None, start_time_ns=None
    ):
        made = types.SimpleNamespace(
            name=name, kind=span_type, parent=parent_span, tags=tags, experiment_id=experiment_id, start=start_time_ns
        )
        made.set_inputs = lambda inputs: setattr(made, "inputs", inputs)
        made.end = lambda **ended: made.__dict__.update(ended)
        self.spans.append(made)
        return made

    def flush_trace_async_logging(self, terminate=False):
        self.flushed += 1


def test_mlflow_is_told_everything(monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
    monkeypatch.delitem(sys.modules, "etude.trace.mlflow", raising=False)
    try:
        tracer = Tracer.of(TraceOptions("mlflow"), "project", "experiment")
        asyncio.run(a_trajectory(tracer))
        tracer.close()
    finally:
        sys.modules.pop("etude.trace.mlflow", None)
    root, outside, first, second, failed = fake.spans
    assert (fake.experiment, root.experiment_id, root.tags) == ("project", "7", {"etude.experiment": "experiment"})
    assert (root.name, root.kind, root.parent, root.status) == ("trajectory", "AGENT", None, "OK")
    assert root.attributes["etude.step"] == 3
    assert outside.parent is root
    assert first.parent is outside
    assert second.parent is outside
    assert first.inputs == {"inputs": {"query": "a"}}
    assert first.outputs == {"output": ["a", "a", "a"]}
    assert (failed.parent, failed.status, failed.attributes["etude.error"]) == (root, "ERROR", "ValueError")
    assert all(each.end_time_ns >= each.start for each in fake.spans)
    assert fake.flushed == 1


def test_weave_is_told_everything(monkeypatch):
    class Client:
        calls, flushed = [], 0

        def create_call(self, op, inputs, parent=None, attributes=None, *, use_stack=True, started_at=None):
            made = types.SimpleNamespace(op=op, parent=parent, attributes=attributes, stack=use_stack, at=started_at)
            self.calls.append(made)
            return made

        def finish_call(self, call, output=None, exception=None, *, ended_at=None):
            call.output, call.exception, call.ended_at = output, exception, ended_at

        def flush(self):
            self.flushed += 1

    client, fake = Client(), types.ModuleType("weave")
    fake.init = lambda project: setattr(fake, "project", project) or client
    monkeypatch.setitem(sys.modules, "weave", fake)
    monkeypatch.delitem(sys.modules, "etude.trace.weave", raising=False)
    try:
        tracer = Tracer.of(TraceOptions("weave"), "project", "experiment")
        asyncio.run(a_trajectory(tracer))
        tracer.close()
    finally:
        sys.modules.pop("etude.trace.weave", None)
    root, outside, first, _, failed = client.calls
    assert (fake.project, root.op, root.parent, root.stack) == ("project", "trajectory", None, False)
    assert (outside.parent, first.parent) == (root, outside)
    assert first.output["output"] == ["a", "a", "a"]
    assert str(failed.exception) == "ValueError"
    assert all(each.ended_at >= each.at for each in client.calls)
    assert client.flushed == 1


class Slow(SpanList):
    """Waits until it is let go on; fails on what is called "bad"."""

    def __init__(self):
        import threading

        super().__init__()
        self.gate, self.begun, self.closed = threading.Event(), [], False

    def begin(self, span):
        self.gate.wait(30)
        self.begun.append(span.name)

    def end(self, span):
        if span.name == "bad":
            raise RuntimeError("the service said no")
        super().end(span)

    def close(self):
        self.closed = True


async def test_a_slow_backend_keeps_nobody_waiting_and_is_told_whole_spans():
    slow = Slow()
    background = Background(slow, limit=5)
    tracer = Tracer(TraceOptions("slow"), background)
    for i in range(10):
        await a_trajectory(tracer, f"t{i}")  # comes back at once, however long the backend takes
    assert background.dropped > 0
    slow.gate.set()
    tracer.close()
    assert slow.closed
    assert len(slow.spans) == len(slow.begun)
    assert len(slow.spans) + background.dropped == 50
    begun = {id(each) for each in slow.spans}
    assert all(each.parent is None or id(each.parent) in begun for each in slow.spans)


async def test_a_backend_that_fails_in_its_thread_is_left_alone(caplog):
    slow = Slow()
    slow.gate.set()
    background = Background(slow)
    with caplog.at_level(logging.WARNING, logger="etude.trace"), traced(background, "t"):
        for name in ("good", "bad", "after"):
            with span("op", name):
                pass
        background.close()
    assert [each.name for each in slow.spans] == ["good"]
    assert [record.message for record in caplog.records] == ["tracing stopped: RuntimeError: the service said no"]
