"""Sections as frozen dataclasses, and values as the types that annotations describe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from etude.config import compose, to_options
from etude.config.values import coerce
from etude.errors import ConfigError


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class Outer:
    steps: int
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    side: Side = Side.LEFT
    kind: Literal["fixed", "adaptive"] = "fixed"
    files: tuple[str, ...] = ()
    folder: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    flag: bool = False

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError("steps must not be negative")


def test_a_section_becomes_its_dataclass():
    section = OmegaConf.create(
        {
            "steps": "3",
            "inner": {"lr": "1e-3", "betas": [1, 0.5]},
            "maybe": {"lr": 2},
            "side": "right",
            "kind": "adaptive",
            "files": "a.parquet",
            "folder": "~/runs",
            "extra": {"a": [1]},
            "limit": None,
            "flag": True,
        }
    )
    options = to_options(Outer, section, "outer")
    assert options == Outer(
        steps=3,
        inner=Inner(lr=1e-3, betas=(1.0, 0.5)),
        maybe=Inner(lr=2.0),
        side=Side.RIGHT,
        kind="adaptive",
        files=("a.parquet",),
        folder=Path("~/runs").expanduser(),
        extra={"a": [1]},
        flag=True,
    )


def test_interpolations_are_filled_in():
    tree = OmegaConf.create({"seed": 3, "outer": {"steps": "${seed}"}})
    assert to_options(Outer, tree.outer, "outer") == Outer(steps=3)


def test_plain_mappings_and_defaults():
    assert to_options(Outer, {"steps": 1}) == Outer(steps=1)
    assert to_options(Outer, {"steps": 1, "other": 2}, ignore=("other",)) == Outer(steps=1)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, "outer.steps is required"),
        ({"steps": 1, "step": 2}, "unknown key outer.step; did you mean 'steps'?"),
        ({"steps": 1, "inner": {"lrr": 2}}, "unknown key outer.inner.lrr; did you mean 'lr'?"),
        ({"steps": 1.5}, "outer.steps must be a whole number, got 1.5"),
        ({"steps": -1}, "outer: steps must not be negative"),
        ({"steps": 1, "inner": 3}, "outer.inner must be a section of key: value, got 3"),
        ({"steps": 1, "inner": None}, "outer.inner must be a section of key: value, got null"),
        ({"steps": 1, "inner": {"lr": "fast"}}, "outer.inner.lr must be a number, got 'fast'"),
        ({"steps": 1, "inner": {"betas": [0.1]}}, "outer.inner.betas must be a list of 2 values, got 1"),
        ({"steps": 1, "side": "up"}, "outer.side must be one of left, right, got 'up'"),
        ({"steps": 1, "kind": "fixd"}, "did you mean 'fixed'?"),
        ({"steps": 1, "flag": "yes"}, "outer.flag must be true or false, got 'yes'"),
        ({"steps": 1, "limit": "x"}, "outer.limit must be a whole number or null, got 'x'"),
        ({"steps": 1, "files": {"a": 1}}, "outer.files must be a list"),
        ({"steps": 1, "extra": [1]}, "outer.extra must be a section of key: value, got [1]"),
        ({"steps": 1, "folder": 3}, "outer.folder must be a path or null, got 3"),
    ],
)
def test_what_does_not_fit_is_named(section, expected):
    with pytest.raises(ConfigError) as caught:
        to_options(Outer, section, "outer")
    assert expected in str(caught.value)


def test_a_long_wrong_value_is_cut():
    with pytest.raises(ConfigError) as caught:
        coerce("x" * 10_000, int, "key")
    assert len(str(caught.value)) < 200


def test_a_union_prefers_the_type_a_value_has():
    assert coerce("3", int | str, "key") == "3"
    assert coerce(3, str | int, "key") == 3
    assert coerce(3, float | int, "key") == 3
    assert coerce("a", list[str] | None, "key") == ["a"]
    with pytest.raises(ConfigError, match="whole number or true or false"):
        coerce("x", int | bool, "key")


@given(st.integers(-(10**18), 10**18))
def test_whole_numbers_survive_as_text_exactly(number):
    assert coerce(str(number), int, "key") == number


@given(st.floats(allow_nan=False))
def test_numbers_survive_as_text_exactly(number):
    assert coerce(repr(number), float, "key") == number


@given(st.one_of(st.none(), st.booleans(), st.floats(), st.text(), st.lists(st.integers()), st.just(float("inf"))))
def test_a_whole_number_is_one_or_refused(value):
    try:
        number = coerce(value, int, "key")
    except ConfigError:
        assert type(value) is not int
    else:
        assert type(number) is int
        assert number == float(value)


def test_a_real_section_fits_a_declared_dataclass():
    @dataclass(frozen=True)
    class KlControl:
        type: Literal["fixed", "adaptive"]
        kl_coef: float
        horizon: int
        target_kl: float

    section = compose("ppo_trainer").algorithm.kl_ctrl
    assert to_options(KlControl, section, "algorithm.kl_ctrl") == KlControl("fixed", 0.001, 10000, 0.1)
