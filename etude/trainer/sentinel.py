"""`trainer.sentinel`: an independent scorer of validation answers, which the policy is never trained on.

What it says is only reported; `etude.checks.step_hacks` has what the sentinel finds in rollouts without one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from etude.checks.step_hacks import PREFIX
from etude.rewards import load_named, usage
from etude.rewards.default import Scorer
from etude.rewards.manager import ScoreText
from etude.rewards.rescore import rescore
from etude.trainer.learning_signal import JUDGE

logger = logging.getLogger(__name__)


def load_sentinel(given: str | None) -> Scorer | None:
    """Loads `trainer.sentinel`, `file.py:function`; None if it is not set.

    Raises:
        ConfigError: there is no such function, or it cannot be called as a reward function of one answer is.
    """
    return None if given is None else load_named(given, "trainer.sentinel")


def second_opinion(
    records: Iterable[Mapping[str, Any]], scorer: Scorer, score_text: ScoreText = "assistant"
) -> dict[str, float]:
    """Scores the dump records of a validation with an independent scorer: its mean, and the share of the answers right by
    the reward that it calls wrong (right is `acc`, or a score of 1). Answers that it fails on are logged and left out.
    What judges used for it is counted, too. `score_text`: what the reward reads, which is what is compared."""
    used = Counter[str]()
    with usage.counting(used):
        asked = list(rescore(records, scorer, score_text=score_text))
    rescored = [each for each in asked if each.new is not None]
    if failed := [each for each in asked if each.new is None]:
        logger.warning("trainer.sentinel failed on %d of %d answers: %s", len(failed), len(asked), failed[0].error)
    right = [each for each in rescored if each.was_right]
    found = {f"val/{PREFIX}{JUDGE}/{name}": float(amount) for name, amount in sorted(used.items())}
    found |= {f"val/{PREFIX}score/mean": fmean(each.new or 0.0 for each in rescored)} if rescored else {}
    return found | ({f"val/{PREFIX}wrong": fmean(not each.is_right for each in right)} if right else {})
