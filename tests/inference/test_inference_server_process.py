"""Servers that a rollout worker starts itself: they come back with the trainer's weights, and never outlive it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import sglang_server
from serving_stage import CONTEXT, bigram_score, save_bigram
from wait_stage import is_running, until

from etude.errors import ConfigError, EngineError
from etude.inference import EngineSetup, Router, check_serving
from etude.inference.server_process import ServerProcess
from etude.inference.sglang import SGLangEngine
from etude.options import RolloutOptions

PROMPT = [3, 1, 4]
COMMAND = (sys.executable, sglang_server.__file__, "{model}", "0.005", "{port}")


def setup(folder, command=COMMAND, **given):
    return EngineSetup(str(folder), None, CONTEXT, server_command=command, server_timeout=300.0, **given)


def server_pid(process):
    """Of the server below its guard."""
    return until(lambda: psutil.Process(process._process.pid).children(), "the server was not started")[0].pid


def test_a_server_that_dies_is_started_again_and_gets_the_weights_before_it_serves(tmp_path):
    """It starts with old weights each time; no token is of these."""
    old, new, newest = (save_bigram(tmp_path / name, seed) for seed, name in enumerate(("old", "new", "newest")))
    router = SGLangEngine.from_setup(setup(old))
    assert isinstance(router, Router)
    process = router._replicas[0].process

    async def answers(count, tokens):
        names = [f"u/{number}/0" for number in range(count)]
        router.open(names)
        drawn = [router.generate(name, PROMPT, {"max_tokens": tokens, "seed": 1}) for name in names]
        made = await asyncio.gather(*drawn)
        for name in names:
            router.close(name)
        return made

    def check(outputs, folder, version):
        rows = [(PROMPT, output.token_ids) for output in outputs]
        for output, expected in zip(outputs, bigram_score(folder)(rows, 1.0)):
            assert output.log_probs == pytest.approx(expected)
            assert set(output.weight_versions) == {version}

    async def scenario():
        await router.update_weights(new, 7)
        check(await answers(2, 4), new, 7)
        dead = server_pid(process)
        rolling = asyncio.ensure_future(answers(3, 100))
        while not router._under_way:
            await asyncio.sleep(0.01)
        os.kill(dead, signal.SIGKILL)
        check(await rolling, new, 7)
        assert router.metrics()["ejections"] >= 1.0
        again = server_pid(process)
        assert again != dead
        os.kill(again, signal.SIGKILL)  # between two rollouts: nobody asks for it
        while process.is_alive:
            await asyncio.sleep(0.01)
        await router.update_weights(newest, 8)
        check(await answers(2, 4), newest, 8)
        last = server_pid(process)
        await router.shutdown()
        until(lambda: not is_running(last), "the server is left")

    asyncio.run(asyncio.wait_for(scenario(), 900))


def test_a_command_that_fails_is_one_line_with_its_last_words(tmp_path):
    router = SGLangEngine.from_setup(
        setup(tmp_path, (sys.executable, "-c", "raise SystemExit('no {model} at {port}')"))
    )
    port = router._replicas[0].name.rpartition(":")[2]
    with pytest.raises(EngineError, match=rf"the server has ended: no {tmp_path} at {port}"):
        asyncio.run(router.update_weights(tmp_path, 0))
    missing = SGLangEngine.from_setup(setup(tmp_path, ("no-such-program",)))
    with pytest.raises(EngineError, match="no-such-program"):
        asyncio.run(missing.update_weights(tmp_path, 0))


HOLDER = """
import sys, time
from etude.inference.server_process import ServerProcess
process = ServerProcess([sys.executable, "-c", "import time; time.sleep(3600)"], "model")
process.start()
print(process._process.pid, flush=True)
time.sleep(3600)
"""


def test_a_server_ends_with_whoever_started_it_however_that_ends():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    guard = int(holder.stdout.readline())
    [server] = until(lambda: psutil.Process(guard).children(), "the server was not started")
    holder.kill()
    holder.communicate()
    until(lambda: not is_running(guard) and not is_running(server.pid), "the server is left")


def test_what_a_server_wrote_goes_with_it():
    process = ServerProcess([sys.executable, "-c", "print('once upon a time')"], "model")
    process.start()
    log = process._log
    until(lambda: not process.is_alive, "it goes on")
    assert process.log_tail() == "once upon a time"
    process.end()
    assert not Path(log).exists()
    assert process.log_tail() == "(no output)"


def test_addresses_are_shared_out_among_the_ranks():
    urls = [f"http://127.0.0.1:{port}" for port in range(9, 14)]

    def of(rank, ranks):
        made = EngineSetup("m", None, 8, server_urls=urls, rank=rank, ranks=ranks)
        return [server.url for server in made.servers(made.own_urls())]

    assert of(0, 1) == urls
    assert [of(rank, 2) for rank in range(2)] == [urls[::2], urls[1::2]]
    assert of(3, 6) == urls  # too few: each is a spare for all
    one_each = EngineSetup("m", None, 8, server_urls=urls[:2], rank=1, ranks=2)
    assert list(SGLangEngine.from_setup(one_each).replicas) == [urls[1]]


def test_what_does_not_go_with_a_command_is_one_line():
    given = {"name": "sglang", "server_command": ["serve"]}
    check_serving(RolloutOptions(**given))
    with pytest.raises(ConfigError, match=r"server_command: starts a server, and .*server_urls.*; leave it empty"):
        check_serving(RolloutOptions(**given, server_urls=["http://127.0.0.1:9"]))
    for name in ("native", "openai"):
        with pytest.raises(ConfigError, match=rf"'{name}' takes weights from no server"):
            check_serving(RolloutOptions(**(given | {"name": name})))
