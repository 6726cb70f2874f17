"""`etude gateway` as a process: it serves, records every session however it ends, and what it recorded is proven."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest
from house_stage import one_line_error
from judge_stage import rig_judge
from vision_stage import picture, save_vision_model

from etude.cli.main import cli, run
from etude.dumps import read_rollouts, sequences_of
from etude.errors import InfrastructureError
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.rewards import judge, usage
from etude.tools.builtin.images import image_url

USER = {"role": "user", "content": "What is 2 + 3?"}
SPEC = TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=64, initializer_range=0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway") / "model"
    tokenizer = build_tiny_tokenizer(["What is 2 + 3? The answer is 5."] * 4, 400)
    save_pretrained(build_tiny_model(SPEC, tokenizer), tokenizer, folder)
    return folder


class Gateway:
    """The command in a process of its own."""

    def __init__(self, model, folder, *arguments):
        self.record, self.log = folder / "rollouts.jsonl", folder / "log"
        command = [
            sys.executable,
            "-m",
            "etude.cli.main",
            "gateway",
            str(model),
            "--port",
            "0",
            "--record",
            self.record,
        ]
        environment = os.environ | {"ETUDE_GATEWAY_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command), *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        deadline = time.monotonic() + 120
        while "/s/NAME/v1" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.url = self.log.read_text().split()[0].removesuffix("/s/NAME/v1")

    def client(self, path, key="secret"):
        return openai.OpenAI(base_url=f"{self.url}{path}", api_key=key, max_retries=0, timeout=60)

    def send(self, path, body=None, method=None):
        """(status, body) of a plain request."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": "Bearer secret"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers, method=method), timeout=60
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self, number):
        """The exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def records(self):
        return {record["uid"]: record for record in read_rollouts(self.record)}


def test_a_judge_asks_a_real_server(model, tmp_path, monkeypatch):
    """By the rubric, with votes, in pairs (which this model has no verdict on), and paid for by the server's own counts."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    gateway = Gateway(rig_judge(model, tmp_path / "judge"), tmp_path)
    options = {"base_url": f"{gateway.url}/v1", "model": "judge", "api_key_env": "JUDGE_KEY", "retries": 0}
    used = usage.Counter()
    try:

        async def ask():
            scores = await asyncio.gather(
                *(judge.compute_score(f"It is {n}.", "5", votes=3, completion_price=1e6, **options) for n in range(4))
            )
            pair = await judge.rank_group("ab", "55", [{}, {}], [None, None], **options)
            assert all(isinstance(each, InfrastructureError) and "holds no verdict" in str(each) for each in pair)
            with pytest.raises(InfrastructureError, match="longer than max_tokens"):
                await judge.compute_score("cut", "5", max_tokens=1, **options)
            return scores

        with usage.counting(used):
            scores = asyncio.run(ask())
        assert [each["score"] for each in scores] == [0.7] * 4
        assert used["cost"] == 4 * 3 * 2  # "7" and the end of the turn
        assert used["prompt_tokens"] > 100 * used["requests"]
        with pytest.raises(InfrastructureError, match="HTTP 401"):
            asyncio.run(judge.compute_score("x", "5", **options | {"api_key_env": ""}))
    finally:
        gateway.end(signal.SIGTERM)


def test_sessions_are_served_recorded_and_proven(model, tmp_path, capsys):
    gateway = Gateway(model, tmp_path, "--max-sessions", "3", "actor_rollout_ref.rollout.temperature=0.8")
    try:
        growing, rewritten = gateway.client("/s/growing/v1"), gateway.client("/s/rewritten/v1")
        assert [each.id for each in growing.models.list()] == ["model"]
        history = [USER]
        for _ in range(3):
            made = growing.chat.completions.create(model="model", messages=history, max_tokens=12, n=2)
            history += [made.choices[1].message.model_dump(), USER]
        assert gateway.send("/s/growing/reward", {"reward": 0.5, "name": "env"})[0] == 200
        rewritten.chat.completions.create(model="model", messages=[USER], max_tokens=12)
        rewritten.chat.completions.create(model="model", messages=[USER, USER], max_tokens=12, temperature=0)

        same = [growing.chat.completions.create(model="m", messages=[USER], seed=4, max_tokens=9) for _ in range(2)]
        other = rewritten.chat.completions.create(model="m", messages=[USER], seed=4, max_tokens=9)
        assert len({made.choices[0].message.content for made in [*same, other]}) == 1

        alone = gateway.client("/v1").chat.completions.create(model="model", messages=[USER], max_tokens=5)
        assert alone.usage.completion_tokens <= 5
        status, line = gateway.send("/s/growing/rollout")
        assert (status, json.loads(line)["uid"]) == (200, "growing")

        gateway.client("/s/third/v1").chat.completions.create(model="m", messages=[USER], max_tokens=3)
        with pytest.raises(openai.RateLimitError, match="sessions are in use"):
            gateway.client("/s/fourth/v1").chat.completions.create(model="m", messages=[USER])
        assert gateway.send("/s/third/end", {})[0] == 200
        assert "third" in gateway.records()
        assert json.loads(gateway.send("/health")[1])["sessions"] == 2

        with pytest.raises(openai.AuthenticationError):
            gateway.client("/s/growing/v1", key="wrong").models.list()
        with pytest.raises(openai.BadRequestError, match="session's name"):
            gateway.client("/s/a%20b/v1").chat.completions.create(model="m", messages=[USER])
        status, body = gateway.send("/s/growing/v1/chat/completions", {"messages": [USER], "n": 1, "foo": 1})
        assert (status, json.loads(body)["error"]["param"]) == (400, "foo")
    finally:
        status = gateway.end(signal.SIGTERM)
    assert status in (-signal.SIGTERM, 128 + signal.SIGTERM)
    found = gateway.records()
    assert {"growing", "rewritten", "third"} <= set(found)
    assert len(found) == 4
    assert found["growing"]["score"] == 0.5
    assert [found[name]["score"] for name in ("rewritten", "third")] == [None, None]  # nobody gave one
    assert len(sequences_of(found["growing"])) >= 4
    sampled = [sequence["sampling"]["temperature"] for sequence in sequences_of(found["rewritten"])]
    assert sorted(set(sampled)) == [0.0, 0.8]
    for row in range(len(found)):
        capsys.readouterr()
        status = run(cli, ["explain", str(gateway.record), "--row", str(row), "--model", str(model), "--no-tokens"])
        assert status == 0, capsys.readouterr().out


def test_a_vision_model_is_shown_what_clients_send(tmp_path):
    gateway = Gateway(save_vision_model("qwen2_5_vl", tmp_path / "model"), tmp_path)
    try:
        client = gateway.client("/s/seeing/v1")
        part = {"type": "image_url", "image_url": {"url": image_url(picture(24, 16))}}
        history = [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]
        made = client.chat.completions.create(model="m", messages=history, max_tokens=8)
        history += [made.choices[0].message.model_dump(), USER]
        client.chat.completions.create(model="m", messages=history, max_tokens=8)
    finally:
        assert gateway.end(signal.SIGINT) in (0, 130)
    [record] = gateway.records().values()
    assert [image["tokens"] for image in record["images"]] == [6]
    assert record["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    assert len(record["segments"]) >= 3


def test_ctrl_c_records_what_is_open_and_idle_sessions_end_by_themselves(model, tmp_path):
    gateway = Gateway(model, tmp_path, "--idle-seconds", "0.4")
    try:
        gateway.client("/s/idle/v1").chat.completions.create(model="m", messages=[USER], max_tokens=3)
        deadline = time.monotonic() + 30
        while not gateway.record.exists() or "idle" not in gateway.records():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        gateway.client("/s/idle/v1").chat.completions.create(model="m", messages=[USER], max_tokens=3)
    finally:
        status = gateway.end(signal.SIGINT)
    assert status == 130
    assert len(list(read_rollouts(gateway.record))) == 2


def test_a_second_ctrl_c_loses_no_session(model, tmp_path):
    gateway = Gateway(model, tmp_path)
    headers = "Host: localhost\r\nAuthorization: Bearer secret\r\nContent-Length: 9\r\n"
    head = f"POST /s/late/v1/chat/completions HTTP/1.1\r\n{headers}\r\n"
    with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as unfinished:
        try:
            gateway.client("/s/open/v1").chat.completions.create(model="m", messages=[USER], max_tokens=3)
            unfinished.sendall(head.encode())
            time.sleep(0.2)
            gateway.process.send_signal(signal.SIGINT)  # waits for the request
            time.sleep(0.3)
        finally:
            status = gateway.end(signal.SIGINT)
    assert status == 130
    assert list(gateway.records()) == ["open"]


def test_wrong_arguments_are_one_line(model, tmp_path, capsys):
    assert "model folder not found" in one_line_error(capsys, ["gateway", tmp_path / "none"])
    assert "unknown key" in one_line_error(capsys, ["gateway", model, "actor_rollout_ref.rollout.temprature=1"])
    evaluating = ["actor_rollout_ref.rollout.name=openai", "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:9]"]
    assert "`etude eval` only" in one_line_error(capsys, ["gateway", model, *evaluating])
    assert "cannot listen" in one_line_error(capsys, ["gateway", model, "--host", "256.0.0.1", "--token", "x"])
    assert "token is empty" in one_line_error(capsys, ["gateway", model, "--token", " "])
