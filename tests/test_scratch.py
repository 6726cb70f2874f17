"""Folders that go with the process that made them."""

import os
import subprocess
import sys

from etude.scratch import Scratch, sweep


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_folders_of_a_killed_process_are_removed_by_the_next(tmp_path):
    mine = Scratch.make("kind-", tmp_path)
    killed = (
        "import os, sys\nfrom etude.scratch import Scratch\nScratch.make('kind-', sys.argv[1])\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False).returncode == -9
    assert len(names(tmp_path) - {mine.folder.name}) == 1
    (tmp_path / "kind-other").mkdir()  # without a lock: somebody may be about to make one
    (tmp_path / "kind-old").mkdir()
    os.utime(tmp_path / "kind-old", (0, 0))
    (tmp_path / "another-old").mkdir()
    os.utime(tmp_path / "another-old", (0, 0))
    new = Scratch.make("kind-", tmp_path)
    assert names(tmp_path) == {mine.folder.name, new.folder.name, "kind-other", "another-old"}
    (new.folder / "more").mkdir()
    mine.remove()
    new.remove()
    assert names(tmp_path) == {"kind-other", "another-old"}


def test_the_folders_of_other_hosts_stay(tmp_path, monkeypatch):
    theirs = Scratch.make("kind-", tmp_path)
    os.close(theirs.lock)  # as if its process had been killed
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    mine = Scratch.make("kind-", tmp_path)
    assert names(tmp_path) == {theirs.folder.name, mine.folder.name}
    monkeypatch.undo()
    sweep(tmp_path, "kind-")
    assert names(tmp_path) == {mine.folder.name}
    mine.remove()


def test_without_a_place_it_stands_among_the_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Scratch.make("kind-")
    assert made.folder.parent == tmp_path
    assert made.folder.stat().st_mode & 0o777 == 0o700
    made.remove()


def test_a_file_system_without_locks_keeps_everything(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refused)
    made = [Scratch.make("kind-", tmp_path) for _ in range(2)]
    assert names(tmp_path) == {each.folder.name for each in made}
    for each in made:
        each.remove()
