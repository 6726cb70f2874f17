"""The gallery's own parts: the order of its runs, what is run again, and what the page gets."""

import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from etude.quickstart.example import Example, ExampleOptions


@pytest.fixture(scope="module")
def gallery():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield importlib.import_module("gallery")


def an_example(name, **options):
    return Example(Path("/examples") / name, ExampleOptions(shows=f"What {name} does.", **options))


FOUND = {
    each.name: each
    for each in (
        an_example("pupil", start="base", teacher="master"),
        an_example("base"),
        an_example("master", start="base"),
        an_example("alone", metric="turns", margin=-1.5),
    )
}


def a_summary(before=0.2, after=0.9, *, held=True, cpu=(10.0, 30.0)):
    ends = {"before": before, "after": after}
    claim = {when: {"value": value, "low": value - 0.1, "high": value + 0.05} for when, value in ends.items()}
    return {"claim": {**claim, "held": held}, "cpu_seconds": dict(zip(("warm_up", "train"), cpu))}


def finish(gallery, work, job, summary=None, found=FOUND):
    folder = gallery.folder_of(work, found[job.name], job.seed)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary or a_summary()))
    return folder


def stand_in(monkeypatch, gallery, program):
    """What is started for a job is this Python program; its arguments are NAME, SEED and the run's folder."""
    real, started = gallery.subprocess.Popen, []

    def start(command, **given):
        name, seed = command[command.index("--example") + 1], command[command.index("--seed") + 1]
        started.append(gallery.Job(name, int(seed)))
        assert given["env"]["OMP_NUM_THREADS"] == "1"
        folder = gallery.folder_of(given["cwd"], FOUND[name], int(seed))
        return real([sys.executable, "-c", program, name, seed, str(folder), json.dumps(a_summary())], **given)

    monkeypatch.setattr(gallery.subprocess, "Popen", start)
    return started


WORKS = """
import pathlib, sys
name, seed, folder, summary = sys.argv[1:]
print("this is", name)
if name == "base" and seed == "2":
    sys.exit(3)
folder = pathlib.Path(folder)
folder.mkdir(parents=True)
(folder / "summary.json").write_text(summary)
"""


def test_every_example_of_the_repository_is_found_and_can_be_ordered(gallery):
    found = gallery.read_examples()
    assert next(iter(found)) == "calculator"
    assert "phone_book" in found
    sorter = gallery.plan([gallery.Job(name, 1) for name in found], found)
    ready = sorter.get_ready()
    assert gallery.Job("calculator", 1) in ready
    assert all(found[job.name].options.start is None for job in ready)
    real = gallery.read_examples(gallery.REAL)
    assert not set(real) & {*found, *gallery.read_examples(gallery.ENVIRONMENTS)}
    assert (
        gallery.Job("smollm2/distillation", 1)
        not in gallery.plan([gallery.Job(name, 1) for name in real], real).get_ready()
    )


def test_a_run_waits_for_what_it_starts_from(gallery):
    jobs = [gallery.Job(name, seed) for seed in (1, 2) for name in FOUND]
    sorter = gallery.plan(jobs, FOUND)
    assert set(sorter.get_ready()) == {gallery.Job(name, seed) for name in ("base", "alone") for seed in (1, 2)}
    sorter.done(gallery.Job("base", 2))
    assert sorter.get_ready() == (gallery.Job("master", 2),)  # of that seed only
    sorter.done(gallery.Job("master", 2))
    assert sorter.get_ready() == (gallery.Job("pupil", 2),)
    alone = gallery.plan([gallery.Job("pupil", 1)], FOUND)  # it makes for itself what is not among the jobs
    assert alone.get_ready() == (gallery.Job("pupil", 1),)


def test_what_has_finished_is_read_and_what_fails_does_not_stop_the_rest(gallery, tmp_path, monkeypatch, capfd):
    started = stand_in(monkeypatch, gallery, WORKS)
    jobs = [gallery.Job(name, seed) for seed in (1, 2) for name in FOUND]
    finish(gallery, tmp_path, gallery.Job("base", 1))
    assert gallery.run(jobs, FOUND, tmp_path) == [gallery.Job("base", 2)]
    assert sorted(started) == sorted(set(jobs) - {gallery.Job("base", 1)})
    assert started.index(gallery.Job("master", 1)) < started.index(gallery.Job("pupil", 1))
    log = gallery.log_of(tmp_path, gallery.Job("base", 2))
    assert log.read_text() == "this is base\n"
    said = capfd.readouterr().out
    assert "base, seed 1: finished before" in said
    assert f"base, seed 2: failed with status 3: see {log}" in said
    assert "pupil, seed 2: 0.20 (0.10 to 0.25) → 0.90 (0.80 to 0.95), claim held" in said
    started.clear()
    assert gallery.run(jobs, FOUND, tmp_path) == [gallery.Job("base", 2)]
    assert started == [gallery.Job("base", 2)]  # tried again, and nothing else


@pytest.mark.slow
def test_an_interrupt_stops_what_is_running(gallery, tmp_path, monkeypatch, capfd):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    program = f"""
import pathlib, signal, sys, time
def leave(*_):
    print("stopped", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
open({str(ready)!r}, "w").close()
while True:
    time.sleep(60)
"""
    stand_in(monkeypatch, gallery, program)
    job = gallery.Job("alone", 1)

    def interrupt():
        ready.open().close()  # opens once the run has its handler
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        gallery.run([job], FOUND, tmp_path)
    thread.join()
    assert caught.value.code == 130
    assert gallery.log_of(tmp_path, job).read_text() == "stopped\n"
    assert signal.getsignal(signal.SIGTERM) == before
    assert "the same command goes on" in capfd.readouterr().out


def test_the_table_shows_what_came_of_each_seed(gallery):
    summaries = {
        gallery.Job("base", 1): a_summary(),
        gallery.Job("base", 2): a_summary(0.3, 0.5, held=False, cpu=(20.0, 60.0)),
        gallery.Job("alone", 1): a_summary(6.0, 2.0),
    }
    head, rule, pupil, base, _, alone = gallery.table(FOUND, (1, 2), summaries, [gallery.Job("alone", 2)]).split("\n")
    assert head == "| example | shows | claim | seed 1 | seed 2 | CPU s | claim held |"
    assert rule == "|---|---|---|---|---|---|---|"
    assert pupil.endswith("| What pupil does. | success +0.4 | – | – | – | – |")
    assert "](../" in base
    cells = ("0.20 (0.10 to 0.25) → 0.90 (0.80 to 0.95)", "0.30 (0.20 to 0.35) → 0.50 (0.40 to 0.55)")
    assert base.endswith(f"| success +0.4 | {' | '.join(cells)} | 60 | 1 of 2 |")
    assert "| turns -1.5 |" in alone
    assert alone.endswith("| failed: `logs/alone-seed-2.txt` | 40 | 1 of 2 |")


@pytest.mark.parametrize("name", ["gallery", "gallery_real"])
def test_the_page_gets_table_and_plot_the_same_each_time(name, gallery, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    work, docs = tmp_path / "work", tmp_path / "docs"
    docs.mkdir()
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    for page in ("gallery.md", "gallery.zh.md"):
        (docs / page).write_text(f"# Gallery\n\n{begin}\nold\n{end}\n\nthe end\n")
    assert not gallery.show(FOUND, (1,), work, [], name)  # nothing has finished
    base = finish(gallery, work, gallery.Job("base", 1))
    rows = [{"step": 0, "val": 1}, *({"step": step, "reward/success/mean": step / 4} for step in (1, 2, 3, 2))]
    (base / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = finish(gallery, work, gallery.Job("alone", 1), a_summary(6.0, 2.0))
    (alone / "rollouts").mkdir()
    for step, turns in ((1, (4, 6)), (10, (2, 2))):
        lines = "".join(json.dumps({"assistant_turns": count}) + "\n" for count in turns)
        (alone / "rollouts" / f"{step}.jsonl").write_text(lines)
    assert gallery.read_curve(base, "success") == {1: 0.25, 2: 0.5, 3: 0.75}
    assert gallery.read_curve(alone, "turns") == {1: 5.0, 10: 2.0}
    pictures = []
    for _ in range(2):
        assert gallery.show(FOUND, (1,), work, [], name)
        gallery.publish(name, work, docs)
        pictures.append((docs / f"{name}.svg").read_bytes())
    assert pictures[0] == pictures[1]
    page = (docs / "gallery.md").read_text()
    assert page == (docs / "gallery.zh.md").read_text()
    assert page.startswith(f"# Gallery\n\n{begin}\n\nLast measured on ")
    assert page.endswith(f"![Learning curves]({name}.svg)\n\n{end}\n\nthe end\n")
    assert "old" not in page
    assert page.count("| What base does. |") == 1
    (docs / "gallery.md").write_text("# Gallery\n")
    with pytest.raises(SystemExit, match="has no marks"):
        gallery.publish(name, work, docs)


def test_the_page_has_the_marks(gallery):
    page = (gallery.DOCS / "gallery.md").read_text(encoding="utf-8")
    for name in ("gallery", "gallery_real"):
        assert page.count(f"<!-- {name}: begin -->") == page.count(f"<!-- {name}: end -->") == 1
