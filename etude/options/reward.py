"""Options of scoring: `reward_model`, `custom_reward_function`."""

from __future__ import annotations

from typing import Literal

from etude.options.declare import Names, When, key, options
from etude.options.types import Count, Flag, FreeForm, Number, Positive, Sections, Text

MANAGED = When("with reward_model.enable=true", lambda own, run: own.enable)
MODEL = When("where reward_model.model.path is set", lambda own, run: run.reward_model.model.path is not None)
CUSTOM = When("where custom_reward_function.path is set", lambda own, run: own.path is not None)


@options
class RewardModelOptions:
    """The reward model."""

    path: Text | None = key(
        "Its folder, or a hub name. A sequence classifier with one label reads each conversation, in its own chat template; "
        "a language model is asked by your function (etude.rewards.judge) or environment. Null: there is none.",
        default=None,
        path="model",
    )
    weight: Number = key("Weight of a classifier's score beside those of your functions.", default=1.0, when=MODEL)


@options
class RewardOptions:
    """The score of a finished trajectory, on top of its tools' rewards."""

    enable: Flag = key(
        "False: no reward manager; the reward comes from tools, interactions and environments only. A run without any "
        "reward is refused.",
        default=True,
        verl_default="null",
        verl_meaning="turns on a reward model; scoring functions always run",
    )
    reward_manager: Text = key(
        "A registered reward manager, or parallel: the environment's own score.",
        default="naive",
        names=Names("etude.rewards:REWARD_MANAGERS", late=True),
        when=MANAGED,
        verl_default="null",
    )
    reward_kwargs: FreeForm = key("Options of the reward manager; any keys.", default_factory=dict, when=MANAGED)
    score_text: Literal["assistant", "final_turn", "full"] = key(
        "What a scorer gets as solution_str: the assistant's own words, those of its last turn, or all that followed the "
        "prompt, tools' answers included (verl's way: a tool that prints the answer then earns the reward).",
        default="assistant",
        when=MANAGED,
    )
    tool_reward_weight: Number = key("Weight of the tools' rewards (step rewards and calc_reward).", default=1.0)
    score_weight: Number = key("Weight of the reward function's score.", default=1.0, when=MANAGED)
    model: RewardModelOptions = key("", default_factory=RewardModelOptions)
    micro_batch_size_per_gpu: Count = key("Conversations that a classifier reads at once.", default=16, when=MODEL)
    max_length: Count | None = key(
        "Longest conversation that a classifier reads; of a longer one, its end. Null: the model's own limit.",
        default=None,
        unit="tokens",
        when=MODEL,
    )
    response_length: Count = key(
        "Longest answer of a language model as reward model.", default=1024, unit="tokens", when=MODEL
    )
    budget: Positive | None = key(
        "What judges may cost in this run, at the prices in their reward_kwargs: above it the run stops with a checkpoint. "
        "Null: no limit.",
        default=None,
        when=MANAGED,
    )

    @property
    def scores(self) -> bool:
        """Whether a reward manager scores; RL-Factory's `parallel` is the environment's own score."""
        return self.enable and self.reward_manager != "parallel"


@options
class WeightedFunction:
    """An entry of `custom_reward_function.rewards`."""

    path: Text = key("File or dotted module that defines it.")
    name: Text = key("The function's name in that file.", default="compute_score")
    weight: Number = key("Its weight in the score.", default=1.0)
    label: Text | None = key("Its name in metrics and dumps. Null: the function's, or the file's.", default=None)
    reward_kwargs: FreeForm = key("Extra keyword arguments of every call.", default_factory=dict)


@options
class CustomRewardOptions:
    """Your scoring function, called by the reward manager instead of the built-in one for the row's data_source."""

    path: Text | None = key(
        "File (path/to/file.py) or dotted module that defines it. Null: built-in scorers.",
        default=None,
        path="code",
    )
    name: Text = key("The function's name in that file.", default="compute_score", when=CUSTOM, verl_default="null")
    reward_kwargs: FreeForm = key("Extra keyword arguments of every call; any keys.", default_factory=dict, when=CUSTOM)
    rewards: Sections = key(
        "Several functions instead of one, [{path, name, weight, label, reward_kwargs}]: the score is their weighted sum, "
        "and each is reported by its label.",
        default=(),
        path="code",
    )
