"""Checkpoints are whole or absent, whatever interrupts the writing."""

import json
import os

import pytest

from etude.errors import CheckpointError
from etude.trainer.checkpoints import LATEST, Checkpoints, write_whole


def write(folder):
    with open(os.path.join(folder, "weights"), "w") as file:
        file.write("w")


def fail(error):
    def broken(folder):
        write(folder)
        raise error

    return broken


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", None)
    assert checkpoints.latest() is None
    folder = checkpoints.save(3, {"kl_coef": 0.5}, write)
    assert checkpoints.latest() == folder == tmp_path / "run" / "global_step_3"
    assert Checkpoints.read_state(folder) == {"step": 3, "kl_coef": 0.5}
    assert names(folder) == ["trainer.json", "weights"]


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3]), (2, [2, 3]), (1, [3]), (0, [3])])
def test_old_checkpoints_go(tmp_path, keep, left):
    checkpoints = Checkpoints(tmp_path, keep)
    for step in (1, 2, 3):
        checkpoints.save(step, {}, write)
    assert names(tmp_path) == sorted([*(f"global_step_{step}" for step in left), LATEST])


def test_what_else_lies_there_is_left_alone(tmp_path):
    for name in ("global_step_1.bak", "global_step_best", "global_step_9", "notes"):
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, {}, write)
    checkpoints.save(2, {}, write)
    assert {"global_step_1.bak", "global_step_best", "global_step_9", "notes"} <= set(names(tmp_path))
    assert not (tmp_path / "global_step_1").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), CheckpointError("x")])
def test_a_failed_write_leaves_the_earlier_one_and_nothing_half_written(tmp_path, error):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, {}, write)
    with pytest.raises(CheckpointError, match=r"cannot write .*global_step_2: .*free space"):
        checkpoints.save(2, {}, fail(error))
    assert names(tmp_path) == ["global_step_1", LATEST]
    assert checkpoints.latest() == tmp_path / "global_step_1"


def test_an_interrupt_or_a_bug_while_writing_is_passed_on(tmp_path):
    for error in (KeyboardInterrupt(), ZeroDivisionError()):
        with pytest.raises(type(error)):
            Checkpoints(tmp_path, None).save(1, {}, fail(error))
    assert names(tmp_path) == []


def test_a_step_is_written_again_in_place_of_the_old(tmp_path):
    checkpoints = Checkpoints(tmp_path, None)
    checkpoints.save(1, {"n": 1}, write)
    with pytest.raises(CheckpointError):
        checkpoints.save(1, {"n": 2}, fail(OSError("full")))
    assert Checkpoints.read_state(tmp_path / "global_step_1")["n"] == 1
    checkpoints.save(1, {"n": 3}, write)
    assert Checkpoints.read_state(tmp_path / "global_step_1")["n"] == 3
    assert names(tmp_path) == ["global_step_1", LATEST]


def test_what_a_killed_run_left_is_cleared(tmp_path):
    (tmp_path / ".incomplete-global_step_7").mkdir()
    (tmp_path / f".incomplete-{LATEST}").write_text("7")
    Checkpoints(tmp_path, None).save(8, {}, write)
    assert names(tmp_path) == ["global_step_8", LATEST]


def test_a_pointer_to_nothing_is_one_line(tmp_path):
    for text in ("5", "", "../elsewhere"):
        (tmp_path / LATEST).write_text(text)
        with pytest.raises(CheckpointError, match="correct or remove the file"):
            Checkpoints(tmp_path, None).latest()


@pytest.mark.parametrize("text", ["{", "[]", '{"step": "3"}', "{}"])
def test_a_damaged_state_is_one_line(tmp_path, text):
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"trainer\.json|no step number"):
        Checkpoints.read_state(tmp_path)


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    target = tmp_path / "deep" / "model"
    for number in (1, 2):
        with write_whole(target) as folder:
            (folder / "part").mkdir()
            (folder / "part" / "file").write_text(json.dumps(number))
            assert target.exists() == (number == 2)
    assert (target / "part" / "file").read_text() == "2"
    assert names(target.parent) == ["model"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="free space or set"), write_whole(tmp_path / "file" / "model"):
        pass
