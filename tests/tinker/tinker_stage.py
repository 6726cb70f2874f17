"""The stage of the Tinker API's tests: a server in a thread of this process, and data for it."""

import asyncio
import threading

import httpx
import uvicorn

KEY = "tml-of-these-tests"
TOKENS = [5, 9, 3, 17, 4, 8, 12, 30]


class Server:
    """Started by the constructor; `url` is where it listens."""

    def __init__(self, base, checkpoints, token=KEY, **options):
        from etude.serving.listening import listen, server_config, url_of
        from etude.tinker.checkpoints import CheckpointStore
        from etude.tinker.server import create_app
        from etude.tinker.service import TinkerService

        self.service = TinkerService(base, CheckpointStore(checkpoints), **options)
        self._listener = listen("127.0.0.1", 0)
        self.url = url_of(self._listener, "127.0.0.1")
        self._server = uvicorn.Server(server_config(create_app(self.service, token), "127.0.0.1", lifespan="on"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._listener])))
        self._thread.start()

    def stop(self):
        self._server.should_exit = True
        self._thread.join(60)
        self._listener.close()

    def post(self, path, body=None):
        """Sends a JSON body, as no client of the SDK would, and returns the response."""
        return httpx.post(f"{self.url}/api/v1/{path}", json=body or {}, headers={"x-api-key": KEY})


def datum(tokens, **inputs):
    """A datum whose targets are the next tokens."""
    from tinker import types

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def weighted(tokens, prompt=2):
    """A datum of supervised training, on what follows the prompt."""
    return datum(tokens, weights=[0.0] * (prompt - 1) + [1.0] * (len(tokens) - prompt))
