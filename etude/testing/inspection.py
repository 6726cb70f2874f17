"""`Inspection`: the state of `inspect_run`, which its checks fill in and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etude.agents import AgentContext
from etude.chat import ChatTemplate
from etude.checks.findings import Findings
from etude.checks.setup import Setup
from etude.config import Composition
from etude.data import RLDataset
from etude.models import build_tiny_tokenizer
from etude.options import CustomRewardOptions, MultiTurnOptions
from etude.testing import advice
from etude.testing.trial import TrialRollouts
from etude.workers.tokenizer_bundle import TokenizerBundle

_BYTES = 512  # tokens of a tokenizer in the place of the model's
_ANY_LENGTH = 10**9  # of the prompts that it reads


class Inspection(Setup):
    """Adds what only a trial finds out."""

    composition: Composition
    worker: TrialRollouts
    context: AgentContext
    train: RLDataset
    own_tokenizer: TokenizerBundle
    """The model's; missing where the model is."""

    def __init__(self, rows: int, seconds: float) -> None:
        self.findings = Findings()
        self.rows, self.seconds = rows, seconds
        self.maker = ""  # the function that makes an example's rows
        self.kinds: dict[tuple[str, type], int] = {}  # the first row of each type of ground truth, by data source
        self.reference: dict[str, str] = {}  # by data source, the form of the answer that its scorer pays

    def choose_tokenizer(self) -> None:
        """Without the model's tokenizer, takes one of bytes: tools, columns and reward are checked with any. No length is
        limited then, since none is known."""
        if hasattr(self, "bundle"):
            self.own_tokenizer = self.bundle
        elif hasattr(self, "placement"):
            tokenizer = build_tiny_tokenizer((), _BYTES)
            self.bundle = TokenizerBundle(tokenizer, ChatTemplate(tokenizer))
            policy, rollout = self.options.actor_rollout_ref, self.options.rollout
            talks = replace(rollout.multi_turn, format="hermes", tools_in_system=False)
            policy = replace(policy, rollout=replace(rollout, multi_turn=talks))
            data = replace(self.options.data, max_prompt_length=_ANY_LENGTH)
            self.options = replace(self.options, actor_rollout_ref=policy, data=data)

    @property
    def measures(self) -> bool:
        """Whether lengths in tokens are the model's."""
        return hasattr(self, "own_tokenizer")

    @property
    def custom(self) -> CustomRewardOptions:
        return self.options.custom_reward_function

    @property
    def talks(self) -> MultiTurnOptions:
        return self.options.actor_rollout_ref.rollout.multi_turn

    @property
    def first_file(self) -> str:
        return str([*self.options.data.train_files, "ROWS"][0])

    @property
    def rows_file(self) -> str:
        return self.maker or self.first_file

    @property
    def schemas(self) -> Mapping[str, dict[str, Any]] | None:
        """The tools' schemas; None also where a tool could not be loaded: rows are read without tools then."""
        return super().schemas if hasattr(self, "context") else None

    @property
    def own_scorer(self) -> bool:
        """Whether the scorer is the user's."""
        paths = [self.custom.path, *(each.get("path") for each in self.custom.rewards)]
        return any(path and not str(path).startswith("etude.") for path in paths)

    def code_of(self, tool: str) -> str:
        """The user's file that defines a tool, else the one that configures it."""
        return advice.code_of(self.worker.context.tools[tool], self.talks)

    @property
    def try_scorer(self) -> str:
        return advice.try_scorer(self.custom, self.first_file)
