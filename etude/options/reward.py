"""Options of scoring: `reward_model`, `custom_reward_function`."""

from __future__ import annotations

from etude.options.declare import Names, When, key, options
from etude.options.types import Flag, FreeForm, Number, Text

MANAGED = When("with enable=true", lambda own, run: own.enable)
CUSTOM = When("where custom_reward_function.path is set", lambda own, run: own.path is not None)


@options
class RewardOptions:
    """The score of a finished trajectory, beside what its tools award."""

    enable: Flag = key(
        "False: no manager's score; the reward is what tools, users and environments give. A run that nothing can reward is "
        "refused.",
        default=True,
        verl_default="null",
        verl_meaning="whether a reward model scores; functions always do",
    )
    reward_manager: Text = key(
        "A registered reward manager, or parallel: the score that the environment gives.",
        default="naive",
        names=Names("etude.rewards:REWARD_MANAGERS", late=True),
        when=MANAGED,
        verl_default="null",
    )
    reward_kwargs: FreeForm = key("Its options; any keys.", default_factory=dict, when=MANAGED)
    tool_reward_weight: Number = key("Weight of the tools' rewards (step rewards and calc_reward).", default=1.0)
    score_weight: Number = key("Weight of the manager's score.", default=1.0, when=MANAGED)


@options
class CustomRewardOptions:
    """A scoring function of yours, called by the reward manager in place of the built-in one for the row's data_source."""

    path: Text | None = key(
        "File (path/to/file.py) or dotted module that defines it. Null: the built-in scorers.",
        default=None,
        path="code",
    )
    name: Text = key("The function's name in that file.", default="compute_score", when=CUSTOM, verl_default="null")
    reward_kwargs: FreeForm = key(
        "Extra keyword arguments handed to every call; any keys.", default_factory=dict, when=CUSTOM
    )
