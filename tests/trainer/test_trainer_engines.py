"""Whole runs with engines behind HTTP: training with a replica that dies on the way, evaluating at an OpenAI server."""

import json

import pytest
from fastapi import FastAPI, Request
from house_stage import ROLLOUT, metrics, one_line_error
from serving_stage import serving_in_a_thread
from sglang_server import Network, SamplingParams, State, build_app, draw

from etude.cli.main import cli, run
from etude.models import load_tokenizer
from etude.trainer.run import train


@pytest.mark.slow
def test_a_run_survives_a_replica_that_dies(tiny, tmp_path):
    """Two replicas; one breaks in its seventh request of a rollout, and for good. No trajectory is lost for it."""
    states = [State(Network(tiny.model), 0.0) for _ in range(2)]
    answer = states[1].model.logits

    def dying(ids):
        if sum(not request.rid.startswith("probe") for request in states[1].requests) > 6:
            states[1].fault = "unhealthy"
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return answer(ids)

    states[1].model.logits = dying
    with serving_in_a_thread(build_app(states[0])) as first, serving_in_a_thread(build_app(states[1])) as second:
        config = tiny.config(
            tmp_path,
            "trainer.total_training_steps=3",
            f"{ROLLOUT}.name=sglang",
            f"{ROLLOUT}.server_urls=[{first},{second}]",
            f"{ROLLOUT}.infrastructure_retries=0",
        )
        train(config)
    records = [record for record in metrics(tmp_path) if record["step"] > 0]
    assert len(records) == 3
    assert all(record["rollout/infrastructure_failures"] == record["rollout/dropped"] == 0 for record in records)
    assert all(record["weight_sync/largest_difference"] < 1e-3 for record in records)
    assert sum(record["engine/ejections"] for record in records) == 1
    assert sum(record["engine/retries"] for record in records) >= 1
    assert records[-1]["engine/replicas"] == 1
    assert states[0].version == "3"


@pytest.fixture
def openai_server(tiny):
    """OpenAI's completions around the model: greedy text, without the token that ends the turn."""
    model, tokenizer, app = Network(tiny.model), load_tokenizer(tiny.model), FastAPI()

    @app.get("/v1/models")
    async def models():
        return {"data": [{"id": "remote"}]}

    @app.post("/v1/completions")
    async def complete(request: Request):
        body = json.loads(await request.body())
        ids = tokenizer.encode(body["prompt"], add_special_tokens=False)
        drawn, ending = [], "length"
        while len(drawn) < body["max_tokens"]:
            token, *_ = draw(model.logits(ids + drawn), SamplingParams(temperature=0.0), None)
            if token == tokenizer.eos_token_id:
                ending = "stop"
                break
            drawn.append(token)
        return {"choices": [{"text": tokenizer.decode(drawn), "finish_reason": ending}]}

    with serving_in_a_thread(app) as url:
        yield url


def evaluation(tiny, folder, *overrides):
    arguments = [a for a in tiny.arguments(folder) if a.split("=")[0] not in ("trainer.report", "trainer.logger")]
    name, *rest = arguments
    return ["eval", name, f"data.val_files={tiny.folder}/data/val.parquet", *rest, *overrides]


def test_an_evaluation_by_an_openai_server_is_that_of_the_model(tiny, tmp_path, openai_server):
    results = []
    remote = (f"{ROLLOUT}.name=openai", f"{ROLLOUT}.server_urls=[{openai_server}/v1]")
    for name, overrides in (("native", ()), ("openai", remote)):
        output = tmp_path / f"{name}.json"
        command = [*evaluation(tiny, tmp_path, *overrides), "--output", str(output), "--dump", str(tmp_path / name)]
        assert run(cli, command) == 0
        dump = [json.loads(line) for line in (tmp_path / name / "0.jsonl").read_text().splitlines()]
        result = json.loads(output.read_text())
        del result["folder"]
        results.append((result, [record["output"] for record in dump]))
    assert results[0] == results[1]  # greedy texts: tool calls, results and answers
    assert results[0][0]["tool_use"] > 0


def test_training_refuses_an_engine_without_ids(tiny, tmp_path, capsys):
    arguments = ["train", *tiny.arguments(tmp_path, f"{ROLLOUT}.name=openai", f"{ROLLOUT}.server_urls=[http://a:1]")]
    assert "rollout.name=openai (command line): is for `etude eval` only" in one_line_error(capsys, arguments)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{ROLLOUT}.name=sglang",), "name=sglang (command line): needs actor_rollout_ref.rollout.server_urls"),
        ((f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.server_urls=[127.0.0.1]"), "'127.0.0.1' is no server address"),
        ((f"{ROLLOUT}.server_urls=[http://a:1]",), "the engine 'native' runs in this process"),
        ((f"{ROLLOUT}.name=vlm",), "nothing is registered as 'vlm'; did you mean 'vllm'?"),
        ((f"{ROLLOUT}.engine_kwargs.vlm.seed=1",), "no engine 'vlm'"),
        ((f"{ROLLOUT}.weight_transfer=cuda_ipc",), "weight_transfer=cuda_ipc (command line): shares"),
        ((f"{ROLLOUT}.weight_transfer=nccl",), "weight_transfer must be one of folder, adapter, cuda_ipc, got 'nccl'"),
        (
            (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_command=[vllm,serve,--weight-transfer-config,ipc]"),
            f"leave it out: {ROLLOUT}.weight_transfer says how weights come",
        ),
    ],
)
def test_a_rollout_section_that_cannot_work_is_one_line(tiny, tmp_path, capsys, overrides, message):
    assert message in one_line_error(capsys, ["train", *tiny.arguments(tmp_path, *overrides)])
