"""One server of the Tinker API for all its tests, over a tiny model; they skip without the SDK (`etude[tinker]`)."""

import pytest
from tinker_stage import KEY, Server


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """A tiny model's folder."""
    from etude.models import TinyModelSpec, build_tiny_model, save_pretrained
    from etude.models.tiny import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer(["a cat sat on a mat", "the dog and the cat", "0 1 2 3 4 5 6 7 8 9"], 300)
    spec = TinyModelSpec(hidden_size=32, num_layers=2, intermediate_size=64, initializer_range=0.3)
    path = tmp_path_factory.mktemp("tinker") / "deep" / "model"
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, path)
    return path


@pytest.fixture(scope="package")
def base(folder):
    """The model, as the server loads it."""
    pytest.importorskip("tinker.types")
    from etude.tinker.adapters import Base

    return Base(folder, (str(folder), "tiny"), max_tokens=64)


@pytest.fixture(scope="package")
def server(base, tmp_path_factory):
    made = Server(base, tmp_path_factory.mktemp("checkpoints"))
    yield made
    made.stop()


@pytest.fixture(scope="package")
def client(server):
    """The SDK's client of that server."""
    import tinker

    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as made:
        yield made
