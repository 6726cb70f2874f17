"""One tiny model folder for all tests of the workers."""

import pytest
from workers_stage import save_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))
