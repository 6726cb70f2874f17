"""Records of estimators and losses: what they promise is what their functions take, and what a user declares is checked."""

import inspect
from dataclasses import dataclass

import pytest
import torch

from etude.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    Estimator,
    PolicyLoss,
    compute_advantage,
    policy_loss,
    register_estimator,
    register_policy_loss,
)
from etude.algorithms.records import COLUMNS, Records
from etude.errors import ConfigError
from etude.registry import import_object

ONES = torch.ones(2, 3)
BUILT_IN = [r for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES) for r in registry._built_in.values()]


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        monkeypatch.setattr(registry, "_items", dict(registry._items))


@pytest.mark.parametrize("record", BUILT_IN, ids=lambda record: record.fn)
def test_a_built_in_record_says_what_its_function_takes(record):
    functions = [record.__wrapped__]
    if getattr(record, "selects", None):
        functions.append(import_object(record.selects))
    parameters = [p for function in functions for p in inspect.signature(function).parameters.values()]
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    assert record.needs == (required & COLUMNS.keys()) | (record.needs & named)
    options = record.option_names
    assert options <= named
    assert required - record.offered - record.needs <= options
    stated = {p.name: p.default for p in parameters if p.name in record.defaults and p.default is not p.empty}
    assert stated.items() <= record.defaults.items()


def test_a_plain_function_needs_nothing_and_is_given_what_it_names():
    @ADVANTAGE_ESTIMATORS.register("plain")
    def plain(token_level_rewards, response_mask, gamma):
        return gamma * token_level_rewards, token_level_rewards

    record = ADVANTAGE_ESTIMATORS.get("plain")
    assert (record.needs, record.min_group, record.episodes, record.ties_teach) == (frozenset(), 1, False, False)
    assert (record.reads("gamma"), record.reads("lam")) == (True, False)
    advantages, _ = compute_advantage("plain", token_level_rewards=ONES, response_mask=ONES, index=[0, 0], gamma=0.5)
    assert torch.equal(advantages, 0.5 * ONES)


def test_a_function_with_keywords_is_given_everything():
    @POLICY_LOSSES.register("everything")
    def everything(**given):
        return ONES.sum(), given

    _, given = policy_loss(
        "everything", old_log_prob=ONES, log_prob=ONES, advantages=ONES, response_mask=ONES, clip_ratio=0.3
    )
    assert given.keys() == {
        *("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "clip_ratio"),
    }


def test_what_is_needed_is_passed_in_float64_and_asked_for():
    @register_estimator("needy", needs={"values", "reward_baselines"})
    def needy(*, token_level_rewards, values, reward_baselines, **_):
        assert values.dtype == reward_baselines.dtype == torch.float64
        return token_level_rewards - reward_baselines[:, None], values

    assert ADVANTAGE_ESTIMATORS.get("needy").episodes  # values are of contexts
    given = {"token_level_rewards": ONES, "response_mask": ONES, "reward_baselines": torch.tensor([1.0, 3.0])}
    advantages, _ = compute_advantage("needy", **given, values=ONES)
    assert advantages.tolist() == [[0.0] * 3, [-2.0] * 3]
    with pytest.raises(ConfigError, match="adv_estimator=needy needs values: the critic's values"):
        compute_advantage("needy", **given)


def test_needs_that_nothing_computes_are_refused_where_they_are_declared():
    with pytest.raises(ConfigError, match="needs 'valeus', which nothing computes; did you mean 'values'"):
        register_estimator("x", needs={"valeus"})(lambda **_: None)
    with pytest.raises(ConfigError, match="'reward_baselines', which nothing computes"):
        register_policy_loss("x", needs={"reward_baselines"})(lambda **_: None)  # of rollouts, not of tokens

    def undeclared(*, token_level_rewards, sum_pi_squared):
        return token_level_rewards, sum_pi_squared

    with pytest.raises(ConfigError, match=r"takes 'sum_pi_squared' without declaring it: needs=\{'sum_pi_squared'\}"):
        Estimator(undeclared)
    with pytest.raises(ConfigError, match="min_group must be at least 1"):
        Estimator(lambda **_: None, min_group=0)
    with pytest.raises(ConfigError, match="is the record of something else"):
        ADVANTAGE_ESTIMATORS.register("x")(PolicyLoss(undeclared, needs={"sum_pi_squared"}))


def test_a_name_means_one_function():
    def first(**_):
        return None

    register_policy_loss("mine", needs="ref_log_prob")(first)
    register_policy_loss("mine", needs="ref_log_prob")(first)  # its file was imported again
    assert POLICY_LOSSES.get("mine").needs == {"ref_log_prob"}
    with pytest.raises(
        ConfigError, match=r"policy loss 'mine' is already registered by .*first \(.*\.py\), and again by .*lambda"
    ):
        register_policy_loss("mine")(lambda **_: None)
    with pytest.raises(ConfigError, match=r"'grpo' is already registered by etude\.algorithms\.advantages\.grpo"):
        register_estimator("grpo")(first)


# -- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    gamma: float = 0.9
    lam: float = 0.8
    colour: str = "red"


@dataclass(frozen=True)
class Declared:
    alpha: float
    rounds: int = 1


def shaped(*, token_level_rewards, gamma, alpha, beta=2.0):
    return token_level_rewards, gamma * alpha * beta


def declared(**given):
    return given


def settings(record, **own):
    records = Records("thing", Estimator, {"old": Estimator("a:b", options={"gamma", "lam"})})
    records.register("new")(record)
    return records.settings("new", Section(), own=own)


def test_options_are_the_sections_keys_and_ones_own():
    assert settings(shaped, alpha=1) == {"gamma": 0.9, "alpha": 1}
    assert settings(declared, any=1) == {"gamma": 0.9, "lam": 0.8, "any": 1}  # the keys that a built-in one reads
    assert settings(Estimator(declared, options=Declared), alpha="1.5") == {"alpha": 1.5, "rounds": 1}
    assert settings(Estimator(declared, options={"gamma"})) == {"gamma": 0.9}


@pytest.mark.parametrize(
    ("record", "own", "text"),
    [
        (shaped, {"alhpa": 1}, "shaped has no option 'alhpa'; did you mean 'alpha'? (known: alpha, beta)"),
        (shaped, {}, "shaped needs a value of its option 'alpha'"),
        (shaped, {"alpha": 1, "gamma": 1}, "'gamma' is a key of its own"),
        (shaped, {"alpha": 1, "values": 1}, "has no option 'values'"),
        (Estimator(declared, options=Declared), {"alpha": "high"}, "declared: option 'alpha': Input should be a valid"),
        (Estimator(declared, options=Declared), {}, "option 'alpha': Field required"),
        (Estimator(declared, options=Declared), {"alpha": 1, "ruonds": 1}, "did you mean 'rounds'"),
        (Estimator("a:b", options={"gamma"}), {"alpha": 1}, "a:b has no option 'alpha', and has none of its own"),
    ],
)
def test_options_that_a_function_does_not_take_are_refused(record, own, text):
    with pytest.raises(ConfigError) as caught:
        settings(record, **own)
    assert text in str(caught.value)
