"""Options of scoring: `reward_model`, `custom_reward_function`."""

from __future__ import annotations

from typing import Literal

from etude.options.declare import Names, When, key, options
from etude.options.types import Flag, FreeForm, Number, Sections, Text

MANAGED = When("with enable=true", lambda own, run: own.enable)
CUSTOM = When("where custom_reward_function.path is set", lambda own, run: own.path is not None)


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
    score_weight: Number = key("Weight of the manager's score.", default=1.0, when=MANAGED)


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
