"""Tiny model folders for all tests of the workers."""

import pytest
from gpu_stage import WAYS
from vision_stage import save_vision_model
from workers_stage import save_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def ways_paths(model_path, tmp_path_factory):
    """The model's folder of each way of `gpu_stage`."""
    folders = {"": model_path}
    for kind in sorted({name.partition(" of ")[2] for name in WAYS} - {""}):
        folders[kind] = str(save_vision_model(kind, tmp_path_factory.mktemp(kind), initializer_range=0.1))
    return {name: folders[name.partition(" of ")[2]] for name in WAYS}
