"""What is refused and how, sessions that end, futures that wait, and a server that is killed."""

import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("tinker.types")
import httpx
import numpy as np
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as messages
from tinker_stage import KEY, TOKENS, Server, datum, weighted

from etude.errors import DataError
from etude.tinker.wire import read_training_request

PROMPT = types.ModelInput.from_ints(TOKENS)


@pytest.fixture(scope="module")
def trainer(client):
    return client.create_lora_training_client("tiny", rank=2, seed=3).result()


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        ("gspo", weighted(TOKENS)),
        ("cross_entropy", datum(TOKENS)),
        ("ppo", weighted(TOKENS)),
        ("cross_entropy", datum([1, 10_000], weights=[1.0])),
        ("cross_entropy", datum([1] * 2000, weights=[1.0] * 1999)),
    ],
)
def test_data_that_do_not_fit_are_the_users_error_and_leave_no_gradient(trainer, loss, data):
    with pytest.raises(tinker.RequestFailedError) as refused:
        trainer.forward_backward([data], loss).result()
    assert refused.value.category is tinker.types.RequestErrorCategory.User
    assert trainer.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"] == 0


def test_numbers_that_are_not_finite_are_refused_and_a_gradient_that_overflows_is_not_stepped_on(trainer):
    """Else the step's answer was a 500, which the SDK asks for again without end."""
    count = len(TOKENS) - 1
    for given in ({"advantages": [float("nan")] * count}, {"logprobs": [float("inf")] * count}):
        inputs = {"advantages": [1.0] * count, "logprobs": [-1.0] * count} | given
        with pytest.raises(tinker.BadRequestError, match="is not finite"):
            trainer.forward_backward([datum(TOKENS, **inputs)], "importance_sampling").result()
    inputs = {"advantages": [3e38] * count, "logprobs": [-9.0] * count}
    with pytest.raises(tinker.BadRequestError, match="must be a finite number"):
        trainer.forward_backward([datum(TOKENS, **inputs)], "dro", {"beta": float("nan")}).result()
    trainer.forward_backward([datum(TOKENS, **inputs)], "importance_sampling").result()
    metrics = trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics
    assert (metrics["skipped_steps"], "grad_norm" in metrics) == (1, False)


def huge(message):
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.shape[:] = [1, 1 << 40]
    parts = tensor.sparse_csr
    parts.crow_indices, parts.col_indices, parts.values = bytes(8) + b"\1" + bytes(7), bytes(8), bytes(4)


def padded(message):
    (short, long), inputs = message.data, {"target_tokens": np.int64, "weights": np.float32}
    for name, kind in inputs.items():
        for each, shape in ((short, [1, 1 << 16]), (long, [1 << 12])):
            each.loss_fn_inputs[name].shape[:] = shape
            each.loss_fn_inputs[name].dense = np.ones(shape, kind).tobytes()
    long.model_input[0].encoded_text.tokens = np.ones(1 << 12, np.int32).tobytes()


def odd(message):
    message.data[0].model_input[0].encoded_text.tokens = b"abc"


def real(message):
    target = message.data[0].loss_fn_inputs["target_tokens"]
    target.dtype, target.dense = messages.DTYPE_FLOAT32, np.array([1.7], np.float32).tobytes()


@pytest.mark.parametrize(
    ("change", "why"),
    [(huge, "is too large"), (padded, "are padded to 536,870,912 targets"), (odd, "32 bits"), (real, "so integers")],
)
def test_a_small_request_for_much_memory_or_without_sense_is_refused(change, why):
    message = messages.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    for _ in range(2):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(1, np.int32).tobytes()
        for name, kind, dtype in (
            ("target_tokens", np.int64, messages.DTYPE_INT64),
            ("weights", np.float32, messages.DTYPE_FLOAT32),
        ):
            datum.loss_fn_inputs[name].dtype = dtype
            datum.loss_fn_inputs[name].shape.append(1)
            datum.loss_fn_inputs[name].dense = np.ones(1, kind).tobytes()
    assert len(read_training_request(message.SerializeToString()).tokens) == 2
    change(message)
    with pytest.raises(DataError, match=why):
        read_training_request(message.SerializeToString())


def test_what_is_not_offered_is_refused_at_once(client, trainer, server):
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    with pytest.raises(tinker.BadRequestError, match="images"):
        trainer.forward(
            [types.Datum(types.ModelInput(chunks=[image]), {"target_tokens": [1]})], "cross_entropy"
        ).result()
    with pytest.raises(tinker.BadRequestError, match="is not here"):
        client.create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.BadRequestError, match="tinker://"):
        client.create_sampling_client(model_path="tinker://x/../y").result()
    with pytest.raises(tinker.BadRequestError, match="is not a name: up to 200 letters"):
        trainer.save_state("a" * 300).result()
    answer = server.post("save_weights_external", {"model_id": trainer.model_id})
    assert (answer.status_code, answer.json()["category"]) == (404, "user")


def test_a_request_needs_the_key_and_a_name_of_the_server(server):
    assert httpx.get(server.url + "/api/v1/healthz").json()["category"] == "user"
    assert httpx.get(server.url + "/api/v1/healthz", headers={"x-api-key": KEY}).json() == {"status": "ok"}
    assert (
        httpx.get(server.url + "/api/v1/healthz", headers={"x-api-key": KEY, "host": "evil.example"}).status_code == 400
    )


def test_a_request_that_is_sent_again_runs_once(server, trainer):
    body = {"model_id": trainer.model_id, "seq_id": 10_000, "adam_params": {"learning_rate": 0.0}}
    ids = {server.post("optim_step", body).json()["request_id"] for _ in range(3)}
    assert len(ids) == 1


def test_waiting_gives_try_again_and_says_why(base, tmp_path, monkeypatch):
    monkeypatch.setattr("etude.tinker.service._POLL_SECONDS", 0.05)
    server = Server(base, tmp_path)
    release = threading.Event()
    try:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
            trainer = client.create_lora_training_client("tiny", rank=1).result()
            server.service._thread.submit(release.wait)  # another model's long request
            first = trainer.forward([weighted(TOKENS)], "cross_entropy")
            time.sleep(0.2)
            [session] = server.service.sessions.values()
            [waiting] = [name for name, each in session.pending.items() if not each.task.done()]
            answer = server.post("retrieve_future", {"request_id": waiting}).json()
            assert (answer["type"], answer["queue_state"]) == ("try_again", "active")
            release.set()
            assert first.result().metrics["loss:sum"] > 0
    finally:
        release.set()
        server.stop()


def test_a_client_that_dies_frees_its_session(base, tmp_path):
    server = Server(base, tmp_path, session_seconds=0.4)
    try:
        session_id = server.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}).json()[
            "session_id"
        ]
        asked = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 1}}
        server.post("create_model", asked)
        assert session_id in server.service.sessions
        end = time.monotonic() + 20
        while session_id in server.service.sessions:
            assert time.monotonic() < end
            time.sleep(0.05)
        gone = server.post("session_heartbeat", {"session_id": session_id})
        assert (gone.status_code, gone.json()["category"]) == (410, "user")
    finally:
        server.stop()


def test_a_cancelled_sample_ends_and_training_goes_on(client, trainer):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=1000))
    time.sleep(0.1)
    drawn.future().cancel()
    assert trainer.forward([weighted(TOKENS)], "cross_entropy").result().metrics["loss:sum"] > 0


def test_old_snapshots_are_dropped_and_say_so(base, tmp_path):
    server = Server(base, tmp_path, max_snapshots=1)
    try:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
            trainer = client.create_lora_training_client("tiny", rank=1).result()
            old, new = (trainer.save_weights_and_get_sampling_client().result() for _ in range(2))
            params = types.SamplingParams(max_tokens=1)
            assert new.sample(PROMPT, 1, params).result().sequences
            with pytest.raises(tinker.APIStatusError, match="newest snapshots"):
                old.sample(PROMPT, 1, params).result()
            path = trainer.save_weights_for_sampler("w").result().path
            first, second = (client.create_sampling_client(path).result() for _ in range(2))
            assert first.sample(PROMPT, 1, params).result().sequences  # dropped for the second, and loaded again
            trainer.save_weights_for_sampler("w").result()
            client.create_sampling_client(path).result()
            with pytest.raises(tinker.RequestFailedError, match="was saved anew since"):
                second.sample(PROMPT, 1, params).result()
    finally:
        server.stop()


@pytest.mark.slow
def test_a_killed_server_loses_no_checkpoint(base, folder, tmp_path):
    options = ["--port", "0", "--checkpoints", str(tmp_path), "--name", "org/tiny", "--token", KEY]
    command = [sys.executable, "-m", "etude.cli.main", "tinker", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[0]
        client = tinker.ServiceClient(base_url=url, api_key=KEY)
        trainer = client.create_lora_training_client("org/tiny", rank=2).result()
        trainer.forward_backward([weighted(TOKENS)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
        path = trainer.save_state("kept").result().path
        loss = trainer.forward([weighted(TOKENS)], "cross_entropy").result().metrics["loss:sum"]
        process.kill()
    client.holder.close()
    about = tmp_path / trainer.model_id / "weights" / "kept" / "checkpoint.json"
    about.write_text(about.read_text().replace("org/tiny", base.name))  # the next server has another name for the model
    server = Server(base, tmp_path)
    try:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as again:
            loaded = again.create_training_client_from_state_with_optimizer(path).result()
            assert loaded.forward([weighted(TOKENS)], "cross_entropy").result().metrics["loss:sum"] == loss
    finally:
        server.stop()
