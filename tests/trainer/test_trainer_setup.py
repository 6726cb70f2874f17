"""What sets up a run closes the groups that it opened, wherever it fails."""

from contextlib import closing

import pytest
from house_stage import ROLLOUT, TOOLS
from trainer_tools import Moody

from etude.config import compose
from etude.data.files import write_parquet
from etude.distributed import InProcessWorkerGroup
from etude.errors import EtudeError
from etude.trainer.run import evaluate, fine_tune, train
from etude.trainer.setup import prepare
from etude.workers import CriticWorker


@pytest.fixture
def groups(monkeypatch):
    """(opened, closed): the roles of the groups of a run."""
    opened, closed = [], []
    start, close = InProcessWorkerGroup.__init__, InProcessWorkerGroup.close

    def counted_start(self, worker_cls, *args, **kwargs):
        start(self, worker_cls, *args, **kwargs)
        opened.append(worker_cls.__name__)

    def counted_close(self):
        closed.append(self.worker_cls.__name__)
        close(self)

    monkeypatch.setattr(InProcessWorkerGroup, "__init__", counted_start)
    monkeypatch.setattr(InProcessWorkerGroup, "close", counted_close)
    return opened, closed


FAILURES = {
    "tools": f"{ROLLOUT}.multi_turn.tool_config_path={{folder}}/broken.yaml",
    "rows": "data.train_files={folder}/broken.parquet",
    "no rows": "data.train_files=[]",
    "engine": f"{ROLLOUT}.name=openai {ROLLOUT}.server_urls=[http://127.0.0.1:9] {ROLLOUT}.server_model=m",
    "checkpoint": "trainer.resume_mode=resume_path trainer.resume_from_path={folder}/nowhere",
}


@pytest.fixture
def folder(tmp_path):
    tool = Moody(tmp_path / "tool", "pass")
    broken = tool.yaml.read_text().replace(":Moody", ":Absent")
    (tmp_path / "broken.yaml").write_text(broken)
    write_parquet([{"question": "?"}], tmp_path / "broken.parquet")
    return tmp_path


@pytest.mark.parametrize("what", FAILURES)
def test_training_that_cannot_start_closes_its_groups(tiny, folder, groups, what):
    config = tiny.config(folder / "run", *FAILURES[what].format(folder=folder).split())
    with pytest.raises(EtudeError):
        train(config)
    opened, closed = groups
    assert sorted(closed) == sorted(opened) == ["ActorRolloutRefWorker"]


def test_an_evaluation_without_rows_closes_its_groups(tiny, folder, groups):
    with pytest.raises(EtudeError, match=r"data\.val_files is empty"):
        evaluate(tiny.config(folder / "run"))
    opened, closed = groups
    assert sorted(closed) == sorted(opened) == ["RolloutWorker"]


@pytest.mark.parametrize("what", ["tools", "rows", "no rows"])
def test_fine_tuning_that_cannot_start_closes_its_groups(tiny, folder, groups, what):
    changed = FAILURES[what].format(folder=folder).replace("actor_rollout_ref.rollout.", "")
    settings = [
        f"data.train_files={tiny.folder}/by_heart.parquet",
        f"model.path={tiny.model}",
        f"multi_turn.tool_config_path={TOOLS}",
        f"trainer.default_local_dir={folder}/run",
        changed,
    ]
    with pytest.raises(EtudeError):
        fine_tune(compose("sft", settings, root="sft"))
    opened, closed = groups
    assert sorted(closed) == sorted(opened) == ["ActorRolloutRefWorker"]


def test_a_role_that_cannot_start_closes_the_others(tiny, folder, groups, monkeypatch):
    def fails(self, *args, **kwargs):
        raise OSError("no room for a critic")

    monkeypatch.setattr(CriticWorker, "__init__", fails)
    with pytest.raises(OSError, match="no room"):
        train(tiny.config(folder / "run", "algorithm.adv_estimator=gae"))
    opened, closed = groups
    assert closed == opened == ["ActorRolloutRefWorker"]


@pytest.mark.parametrize(
    ("free", "given", "recomputes"), [(2**20, "null", True), (2**40, "null", False), (2**20, "false", False)]
)
def test_layers_are_computed_again_where_an_update_would_not_fit_otherwise(
    tiny, tmp_path, monkeypatch, free, given, recomputes
):
    monkeypatch.setattr("etude.checks.resources._memory_here", lambda _: (2**40, free, "here"))
    key = f"actor_rollout_ref.model.enable_gradient_checkpointing={given}"
    _, groups = prepare(tiny.config(tmp_path, key))
    with closing(groups):
        assert groups.actor._workers[0].placement.recomputes is recomputes
