"""The stage of killed runs: a run that dies after so much of its processor time, wherever it is then, and what it must have
left once it was resumed."""

import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from house_stage import Launched, metrics, same, steps, weights

from etude.dumps import read_rollouts
from etude.trainer.run import train
from etude.workers.checkpoint import read_state

SAVES = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null")
# The timer's signal ends a process at once, as SIGKILL does: no handler runs, no file is closed. It counts the time that the
# processor worked for the process, so that a busy machine does not move the point.
DIES = """
import signal

signal.signal(signal.SIGPROF, signal.SIG_DFL)
signal.setitimer(signal.ITIMER_PROF, {seconds})
"""


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run of six steps, and the processor time it took."""

    folder: Path
    seconds: float

    @classmethod
    def run(cls, tiny, folder):
        begun = time.process_time()
        train(tiny.config(folder, *SAVES))
        return cls(folder, time.process_time() - begun)

    def kill_and_resume(self, tiny, folder, number, *settings):
        """Runs the same, killed at the random point `number`; resumes it, and compares all it left."""
        seconds = max(0.001, random.Random(number).random() * self.seconds)
        (folder / "dies.py").write_text(DIES.format(seconds=seconds))
        run, plugins = folder / "run", f"plugins=[{tiny.folder}/agent.py,{folder}/dies.py]"
        launched = Launched(["train", *tiny.arguments(run, *SAVES, *settings, plugins)], folder / "log")
        assert launched.wait() in (-signal.SIGPROF, 0), launched.text()
        train(tiny.config(run, *SAVES, *settings))
        self.compare(run)

    def compare(self, run):
        """All that is left is that of the uninterrupted run, bit for bit; timings aside."""
        assert (run / "latest_checkpointed_iteration.txt").read_text() == "6"
        assert not list(run.glob(".incomplete*"))
        assert steps(run) == [1, 2, 3, 4, 5, 6]
        for ours, theirs in zip(metrics(run), metrics(self.folder)):
            assert {n: v for n, v in ours.items() if is_of_training(n)} == {
                n: v for n, v in theirs.items() if is_of_training(n)
            }
        for step in range(1, 7):
            assert same(weights(run, step), weights(self.folder, step))
            ours, theirs = (read_state(each / f"global_step_{step}" / "actor" / "state") for each in (run, self.folder))
            assert same(ours, theirs)
            ours, theirs = (list(read_rollouts(each / "rollouts" / f"{step}.jsonl")) for each in (run, self.folder))
            for key in ("uid", "response_ids", "response_mask", "response_log_probs", "score"):
                assert [record[key] for record in ours] == [record[key] for record in theirs]


def is_of_training(name):
    return name.startswith(("actor/", "critic/", "response_length/", "reward/", "training/"))
