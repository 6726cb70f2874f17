"""What `etude tinker` adds to a training step: CPU seconds of `forward_backward` and `optim_step` through the SDK and the
server, and by the adapter alone, in alternation, in one process of one thread.

    python benchmarks/tinker_server.py $(etude models get smollm2) --rounds 6
"""

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import tinker
import torch
import uvicorn
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from etude.serving.listening import listen, server_config, url_of
from etude.tinker.adapters import Adapter, AdapterShape, Base
from etude.tinker.checkpoints import CheckpointStore
from etude.tinker.server import create_app
from etude.tinker.service import TinkerService
from etude.tinker.wire import read_training_request

KEY, RANK, TOKENS = "tml-benchmark", 16, 64
ADAM = types.AdamParams(learning_rate=1e-4)


def cpu_seconds(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=6, help="the first is not counted [6]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    base = Base(given.model, ("model",))
    listener = listen("127.0.0.1", 0)
    service = TinkerService(base, CheckpointStore(Path(tempfile.mkdtemp())))
    server = uvicorn.Server(server_config(create_app(service, KEY), "127.0.0.1", lifespan="on"))
    serving = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    serving.start()
    client = tinker.ServiceClient(base_url=url_of(listener, "127.0.0.1"), api_key=KEY)
    trainer = client.create_lora_training_client("model", rank=RANK, seed=1).result()
    adapter = Adapter(base, AdapterShape(RANK, 1))
    ids = list(range(100, 100 + TOKENS))
    inputs = {"target_tokens": ids[1:], "weights": [0.0] * 15 + [1.0] * (TOKENS - 16)}
    data = [types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs) for _ in range(2)]
    loss = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=loss, model_id="x", seq_id=1)
    body = forward_backward_request_to_proto(request).SerializeToString()

    def through() -> None:
        done, stepped = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM)
        done.result(), stepped.result()

    def alone() -> None:
        adapter.forward_backward(read_training_request(body))
        adapter.step(ADAM)

    rounds = [(cpu_seconds(through), cpu_seconds(alone)) for _ in range(given.rounds)][1:]
    served, direct = (statistics.median(column) for column in zip(*rounds))
    print(
        f"2 sequences of {TOKENS} tokens, rank {RANK}: {served:.2f} CPU s through the server, {direct:.2f} alone, ",
        end="",
    )
    print(f"{served / direct - 1:+.1%} (medians of {len(rounds)})")
    client.close("success").result()
    server.should_exit = True
    serving.join(60)


if __name__ == "__main__":
    main()
