"""The program that runs rollouts of verifiers 0.4, in the interpreter that has it; see `verifiers`. It imports nothing of
Étude.

Its argument is the configuration of an `Env`. It writes lines of JSON: first the number of tasks, then an answer for each
line that it reads, in any order. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, TextIO

_keys: dict[str, str] = {}  # not in the environment, which the programs of a model inherit


async def main(wire: TextIO) -> None:
    """Answers until the input ends."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.clients import eval as clients
    from verifiers.v1.types import SamplingConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    given = clients.resolve_api_key
    clients.resolve_api_key = lambda config: _keys.get(config.api_key_var) or given(config)
    env = load_environment(resolve_env_config(json.loads(sys.argv[1])))
    tasks = list(env.taskset.load())
    running: dict[str, asyncio.Task[None]] = {}

    async def run(id: str, task: int, base_url: str, api_key: str) -> None:
        _keys[id], answer = api_key, dict[str, Any]()
        try:
            client = EvalClientConfig(base_url=base_url, api_key_var=id)
            [slot] = env.slots(tasks[task])
            episode = await env.run_slot(slot, ModelContext(client=client, model="policy", sampling=SamplingConfig()))
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            answer["errors"] = [error.model_dump(mode="json", exclude={"traceback"}) for error in errors]
            if episode.traces:
                answer |= {"reward": episode.traces[-1].reward, "metrics": dict(episode.traces[-1].metrics)}
        except Exception as error:
            answer["errors"] = [{"type": type(error).__name__, "message": str(error)}]
        finally:
            del _keys[id], running[id]
        print(json.dumps({"id": id, **answer}, default=str), file=wire)

    async with env.serving():
        print(json.dumps({"tasks": len(tasks)}), file=wire)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            asked = json.loads(line)
            if "cancel" not in asked:
                running[asked["id"]] = asyncio.ensure_future(run(**asked))
            elif asked["cancel"] in running:
                running[asked["cancel"]].cancel()
        for each in running.values():
            each.cancel()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what packages print goes where errors go
    asyncio.run(main(answers))
