"""Checkpoints are whole or absent, whatever interrupts the writing."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading

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
    checkpoints.save(3, {"kl_coef": 0.5}, write)
    folder = checkpoints.latest()
    assert folder == tmp_path / "run" / "global_step_3"
    assert Checkpoints.read_state(folder) == {"step": 3, "kl_coef": 0.5}
    assert names(folder) == ["trainer.json", "weights"]


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3]), (-1, [1, 2, 3]), (2, [2, 3]), (1, [3]), (0, [3])])
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


def test_checkpoints_after_the_resumed_one_are_set_aside(tmp_path):
    checkpoints, other = Checkpoints(tmp_path / "run", None), Checkpoints(tmp_path / "other", None)
    assert checkpoints.set_aside_later(None) is None
    other.save(7, {}, write)
    for step in (1, 2, 3):
        checkpoints.save(step, {}, write)
    assert checkpoints.set_aside_later(tmp_path / "run" / "global_step_3") is None
    line = f"global_step_3 of an earlier run: now in {tmp_path}/run/checkpoints.1, yours to remove"
    assert checkpoints.set_aside_later(tmp_path / "run" / "global_step_2") == line
    assert checkpoints.latest() == tmp_path / "run" / "global_step_2"
    assert Checkpoints(tmp_path / "run" / "checkpoints.1", None).latest().name == "global_step_3"
    assert "global_step_1, global_step_2 of" in checkpoints.set_aside_later(other.latest())
    assert (checkpoints.latest(), names(tmp_path / "run")) == (None, ["checkpoints.1", "checkpoints.2"])


def test_a_link_is_a_checkpoint_of_the_folder_and_a_copy_of_another_name_is_left_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", None)
    for step in (1, 2):
        checkpoints.save(step, {}, write)
    (tmp_path / "run" / "global_step_2").rename(tmp_path / "big")
    (tmp_path / "run" / "global_step_2").symlink_to(tmp_path / "big")
    shutil.copytree(tmp_path / "run" / "global_step_1", tmp_path / "run" / "global_step_1_best")
    assert checkpoints.set_aside_later(checkpoints.latest()) is None
    assert "global_step_1, global_step_2 of" in checkpoints.set_aside_later(None)
    assert names(tmp_path / "run") == ["checkpoints.1", "global_step_1_best"]


def test_a_checkpoint_that_was_not_yet_named_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, None)
    for step in (1, 2):
        checkpoints.save(step, {}, write)
    (tmp_path / LATEST).write_text("1")  # killed before it named the second
    assert checkpoints.set_aside_later(checkpoints.latest()) is None


def test_checkpoints_that_cannot_be_moved_are_an_error(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, None)
    checkpoints.save(1, {}, write)

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("shutil.copyfile", refuse)
    with pytest.raises(CheckpointError, match=r"cannot move checkpoints of an earlier run from .*Read-only"):
        checkpoints.set_aside_later(None)


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


KILLED_AT_EACH_STEP = """
import os, pathlib, shutil, signal, sys
from etude.trainer.checkpoints import Checkpoints

folder, step = pathlib.Path(sys.argv[1]), int(sys.argv[2])


def save(number, text):
    def write(into):
        for name in ("a", "b"):
            with open(os.path.join(into, name), "w") as file:
                file.write(text)
    Checkpoints(folder, 1).save(number, {"text": text}, write)


def killed(limit):
    # The child dies before its operation number `limit` on the folder; True if it had that many.
    child = os.fork()
    if not child:
        count = 0
        def note(event, arguments):
            nonlocal count
            if event.partition(".")[0] in ("open", "os", "shutil") and str(folder) in repr(arguments):
                count += 1
                if count == limit:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(note)
        save(step, "new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


limit, seen = 1, []
while True:
    shutil.rmtree(folder, ignore_errors=True)
    save(2, "old")
    if not killed(limit):
        break
    latest = Checkpoints(folder, 1).latest()
    text = Checkpoints.read_state(latest)["text"]
    assert [(latest / name).read_text() for name in "ab"] == [text] * 2, (limit, latest)
    seen.append(text)
    save(3, "after")
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_3", "latest_checkpointed_iteration.txt"], limit
    limit += 1
print(" ".join(seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_a_save_killed_at_any_of_its_operations_leaves_a_whole_checkpoint(tmp_path, step):
    """Of a new step, and of one that is written once more."""
    given = [sys.executable, "-c", KILLED_AT_EACH_STEP, str(tmp_path / "run"), str(step)]
    done = subprocess.run(given, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = done.stdout.split()
    assert len(seen) > 15
    assert seen == sorted(seen, reverse=True)  # the old one up to some operation, the new one from there on
    assert {*seen} == {"old", "new"}


# -- in the background -------------------------------------------------------------------------------------------


class Slow:
    """Writes only once it is let go; `copies` counts the copies made for it."""

    def __init__(self):
        self.go, self.writing, self.copies = threading.Event(), threading.Event(), 0

    def copy(self):
        self.copies += 1

    def write(self, folder):
        self.writing.set()
        assert self.go.wait(60)
        write(folder)


def test_one_save_runs_in_the_background_and_a_second_waits_for_it(tmp_path):
    checkpoints, slow, state = Checkpoints(tmp_path, None, in_background=True), Slow(), {"measured": [1]}
    checkpoints.save(1, state, slow.write, slow.copy)
    state["measured"].append(2)
    assert slow.writing.wait(60)
    assert slow.copies == 1
    checkpoints.wait(only_if_done=True)
    assert checkpoints.latest() is None

    def copied():
        assert checkpoints.latest() == tmp_path / "global_step_1"  # the first is done before the second is copied

    threading.Timer(0.05, slow.go.set).start()
    checkpoints.save(2, {}, write, copied)
    checkpoints.wait()
    assert checkpoints.latest() == tmp_path / "global_step_2"
    assert Checkpoints.read_state(tmp_path / "global_step_1")["measured"] == [1]


@pytest.mark.parametrize("ending", ["wait", "save", "awaited"])
def test_an_error_in_the_background_is_raised_at_the_next_occasion(tmp_path, ending):
    checkpoints = Checkpoints(tmp_path, None, in_background=True)

    def use():
        with checkpoints.awaited():
            checkpoints.save(1, {}, fail(OSError("full")))
            if ending == "save":
                checkpoints.save(2, {}, write)
            elif ending == "wait":
                checkpoints.wait()

    with pytest.raises(CheckpointError, match=r"cannot write .*global_step_1"):
        use()
    checkpoints.wait()  # raised once
    assert names(tmp_path) == []


def test_a_saves_error_does_not_hide_that_of_the_run(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, None, in_background=True)

    def use():
        with checkpoints.awaited():
            checkpoints.save(1, {}, fail(OSError("full")))
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
        use()
    assert "cannot write" in caplog.text
