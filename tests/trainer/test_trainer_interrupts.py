"""Ctrl-C and SIGTERM: the step in hand is finished or abandoned, tools are released, and nothing that is done is lost."""

import os
import signal
import time
import weakref

import pytest
from house_stage import Launched, metrics, same, steps, weights
from trainer_tools import STUBBORN, Moody

from etude.run_folder import metrics_of
from etude.trainer.interrupts import Interrupted, Interrupts
from etude.trainer.run import train

ENDLESS = ("trainer.total_training_steps=5000", "trainer.logger=[jsonl,console]")
FIRST_NOTE = "stopping after this step"


def until(condition, launched):
    """Waits until `condition()`; a process that ends before that is a failure."""
    while not condition():
        assert launched.process.is_alive(), launched.text()
        time.sleep(0.02)


def lines(run):
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_the_run_after_the_step(tiny, tmp_path, number):
    run = tmp_path / "run"
    launched = Launched(["train", *tiny.arguments(run, *ENDLESS)], tmp_path / "log")
    until(lambda: lines(run) >= 1, launched)
    launched.signal(number)
    assert launched.wait() == 128 + number
    done = steps(run)[-1]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(done)
    assert launched.text().splitlines()[-1].startswith(f"stopped after step {done} of 5000;")
    assert launched.text().rstrip().endswith(f"the same command goes on from step {done + 1}")
    assert launched.text().count(FIRST_NOTE) == 1
    assert "Traceback" not in launched.text()


@pytest.mark.parametrize(
    ("number", "mood"), [(signal.SIGINT, STUBBORN), (signal.SIGTERM, "await asyncio.sleep(3600)")], ids=["INT", "TERM"]
)
def test_the_second_signal_abandons_a_rollout_and_releases_its_tools(tiny, tmp_path, number, mood):
    """Also those of tools that ignore their cancellation."""
    run, tool = tmp_path / "run", Moody(tmp_path / "tool", mood, timeout=7200)
    launched = Launched(["train", *tiny.arguments(run, *ENDLESS, tool.override)], tmp_path / "log")
    until(lambda: tool.count("mood") >= 1, launched)
    launched.signal(number)
    until(lambda: FIRST_NOTE in launched.text(), launched)
    launched.signal(number)
    assert launched.wait() == 128 + number
    assert "Traceback" not in launched.text()
    assert tool.count("release") == tool.count("create") == 16
    assert steps(run) == [1]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "1"
    train(tiny.config(run, "trainer.total_training_steps=2"))  # the abandoned step, done again with a tool that works
    train(tiny.config(tmp_path / "whole", "trainer.total_training_steps=2"))
    assert same(weights(run, 2), weights(tmp_path / "whole", 2))


def test_an_interrupt_that_strikes_inside_a_task_still_releases_every_tool(tiny, tmp_path):
    once = "if LOG.read_text().count('mood') == 1: raise KeyboardInterrupt"  # as if the signal had come at this moment
    tool = Moody(tmp_path / "tool", once)
    with pytest.raises(Interrupted, match="stopped after step 1 of 6"):
        train(tiny.config(tmp_path / "run", tool.override))
    assert tool.count("release") == tool.count("create") == 16
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_an_abandoned_validation_loses_neither_the_step_nor_its_figures(tiny, tmp_path):
    tool = Moody(tmp_path / "tool", "raise KeyboardInterrupt", good=3 + 8)  # the first validation, the first step
    run = tmp_path / "run"
    settings = (tool.override, f"data.val_files={tiny.folder}/data/val.parquet", "trainer.test_freq=1")
    with pytest.raises(Interrupted, match="stopped after step 1 of 6"):
        train(tiny.config(run, *settings))
    assert steps(run) == [0, 1]
    assert "actor/loss" in metrics(run)[1]
    assert "val-core/etude/arithmetic/reward/mean@1" not in metrics(run)[1]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.parametrize(("last", "then"), [(1, "makes the validation that is missing"), (2, "goes on from step 2")])
def test_an_abandoned_validation_is_made_when_the_run_goes_on(tiny, tmp_path, last, then):
    """Also that of the last step, without which the run is not complete."""
    tool = Moody(tmp_path / "tool", "raise KeyboardInterrupt", good=3 + 8)
    settings = [f"data.val_files={tiny.folder}/data/val.parquet", "trainer.test_freq=1"]
    settings.append(f"trainer.total_training_steps={last}")
    run, whole = tmp_path / "run", tmp_path / "whole"
    with pytest.raises(Interrupted, match=f"stopped after step 1 of {last}; .* the same command {then}$"):
        train(tiny.config(run, tool.override, *settings))
    said = []
    train(tiny.config(run, *settings), said.append)  # with a tool that works
    assert "; the validation of step 1 is made now" in said[0].text
    train(tiny.config(whole, *settings))
    mean = "val-core/etude/arithmetic/reward/mean@1"
    assert [each[mean] for each in metrics_of(run)] == [each[mean] for each in metrics_of(whole)]
    before = (run / "metrics.jsonl").read_bytes()
    train(tiny.config(run, *settings))
    assert (run / "metrics.jsonl").read_bytes() == before  # once


def test_an_abandoned_first_validation_leaves_no_checkpoint(tiny, tmp_path):
    tool = Moody(tmp_path / "tool", "raise KeyboardInterrupt", good=0)
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match=r"after step 0 of 6; there is no checkpoint yet, .* starts over$"):
        train(tiny.config(run, tool.override, f"data.val_files={tiny.folder}/data/val.parquet"))
    assert not list(run.glob("global_step_*"))


def test_a_second_signal_waits_where_something_is_being_changed():
    notes = []
    held = signal.getsignal(signal.SIGINT)
    with Interrupts(notes.append) as interrupts:
        interrupts.step_seconds = 12.4
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.stop
        [note] = notes
        assert "this step (the last one took 12 s)" in note.text
        with pytest.raises(KeyboardInterrupt), interrupts.abandonable():
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.signal_number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # outside again
    assert signal.getsignal(signal.SIGINT) is held


def test_a_hang_up_that_nohup_holds_off_stays_off():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.stop
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_in_a_callback_of_the_garbage_collectors_is_not_lost():
    """Python lets no exception out of such a callback: the signal was printed, and the step went on."""
    held = [Interrupts()]
    watch = weakref.ref(held[0], lambda _: signal.raise_signal(signal.SIGINT))

    def drop_and_wait():
        held.clear()
        time.sleep(20)

    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt), interrupts.abandonable():
            drop_and_wait()
    assert watch() is None
    assert time.monotonic() - began < 15
