"""Declared sections: what becomes an instance, and what is refused with its key."""

import dataclasses
import pickle
import subprocess
import sys
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.options import RolloutOptions, TrainOptions, declarations
from etude.options.declare import When, key, options
from etude.options.types import (
    BelowOne,
    Count,
    CountOrOff,
    Flag,
    FreeForm,
    NonNegative,
    RawTexts,
    Share,
    Text,
    Texts,
    allowed,
    allowed_shortly,
)
from etude.options.validate import build, plain, to_options


@options
class Inner:
    """A part."""

    lr: NonNegative = key("Rate.", default=1e-6)
    betas: tuple[BelowOne, BelowOne] = key("Decay.", default=(0.9, 0.999))


@options
class Outer:
    """A whole."""

    steps: Count = key("Steps.", default=1)
    inner: Inner = key("", default_factory=Inner, when=When("with flag=true", lambda own, run: own.flag))
    kind: Literal["fixed", "adaptive"] = key("Kind.", default="fixed")
    files: Texts = key("Files.", default=())
    stop: Texts | None = key("Stops.", default=None)
    words: RawTexts = key("Words.", default=())
    name: Text = key("Name.", default="x")
    extra: FreeForm = key("Anything.", default_factory=dict)
    limit: CountOrOff | None = key("Limit.", default=None)
    share: Share = key("Share.", default=0.5)
    flag: Flag = key("Flag.", default=False)

    def __post_init__(self) -> None:
        if self.steps == 13:
            raise ValueError("13 steps bring bad luck")


@options
class Needy:
    """A section that lacks a default."""

    file: Text = key("File.")
    steps: Count = key("Steps.", default=1)


@options
class Holder:
    """A section with such a one in it."""

    part: Needy = key("", default_factory=Needy)


def test_a_section_becomes_its_dataclass():
    section = {
        "steps": "3",
        "inner": {"lr": "1e-3", "betas": [0, 0.5]},
        "kind": "adaptive",
        "files": "a.parquet",
        "stop": ["a", "b"],
        "extra": {"a": [1]},
        "limit": -1,
        "flag": True,
    }
    made = to_options(Outer, section, "outer")
    assert made == Outer(
        steps=3,
        inner=Inner(lr=1e-3, betas=(0.0, 0.5)),
        kind="adaptive",
        files=("a.parquet",),
        stop=("a", "b"),
        extra={"a": [1]},
        limit=-1,
        flag=True,
    )
    assert plain(made)["inner"] == {"lr": 1e-3, "betas": [0.0, 0.5]}
    assert to_options(Outer, plain(made)) == made


def test_an_instance_is_frozen_and_crosses_processes():
    made = Outer(steps=2)
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, steps=4).steps == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.steps = 3
    with pytest.raises(ConfigError, match="steps must be a whole number of at least 1, got 0"):
        dataclasses.replace(made, steps=0)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"step": 2}, "unknown key outer.step; did you mean 'steps'?"),
        ({"inner": {"lrr": 2}}, "unknown key outer.inner.lrr; did you mean 'lr'?"),
        ({"steps": 1.5}, "outer.steps must be a whole number of at least 1, got 1.5"),
        ({"steps": 0}, "outer.steps must be a whole number of at least 1, got 0"),
        ({"steps": True}, "outer.steps must be a whole number of at least 1, got True"),
        ({"steps": 2**31}, "outer.steps must be a whole number of at least 1 (at most 2147483647), got 2147483648"),
        ({"steps": 13}, "outer: 13 steps bring bad luck"),
        ({"inner.lr": 1}, "unknown key outer.inner.lr: write one section in the other, not a dot"),
        ({"inner": {"a.b": 1}}, "unknown key outer.inner.a.b: write one section in the other"),
        ({1: 2}, "unknown key outer.1"),
        ({"inner": {1: 2}}, "unknown key outer.inner.1"),
        ({"inner": 3}, "outer.inner must be a section of key: value, got 3"),
        ({"inner": None}, "outer.inner must be a section of key: value, got null"),
        ({"inner": {"lr": "fast"}}, "outer.inner.lr must be a number of at least 0, got 'fast'"),
        ({"inner": {"lr": float("nan")}}, "outer.inner.lr must be a number of at least 0, got nan"),
        ({"inner": {"lr": float("inf")}}, "outer.inner.lr must be a number of at least 0, got inf"),
        (
            {"inner": {"betas": [0.1]}},
            "outer.inner.betas must be a list of 2 values, each a number from 0 below 1, got [0.1]",
        ),
        ({"inner": {"betas": [0.1, 1]}}, "outer.inner.betas must be a list of 2 values"),
        ({"kind": "fixd"}, "outer.kind must be one of fixed, adaptive, got 'fixd'; did you mean 'fixed'?"),
        ({"flag": "yes"}, "outer.flag must be true or false, got 'yes'"),
        ({"flag": 1}, "outer.flag must be true or false, got 1"),
        ({"limit": 0}, "outer.limit must be -1 or a whole number of at least 1 or null, got 0"),
        ({"share": 1.01}, "outer.share must be a number from 0 to 1, got 1.01"),
        ({"files": {"a": 1}}, "outer.files must be a list, got {'a': 1}"),
        ({"words": ["\n", ""]}, "outer.words[1] must be text that is not blank"),
        ({"files": ["a", ""]}, "outer.files[1] must be text that is not blank"),
        ({"name": " "}, "outer.name must be text that is not blank"),
        ({"name": "a\0b"}, "outer.name must be text that is not blank, without NUL"),
        ({"name": 3}, "outer.name must be text, got 3"),
        ({"extra": {"a": ["\ud800"]}}, "outer.extra.a[0] must be text that UTF-8 can hold, got '\\ud800'"),
        ({"extra": [1]}, "outer.extra must be a section of key: value, got [1]"),
    ],
)
def test_what_does_not_fit_is_named(section, expected):
    with pytest.raises(ConfigError) as caught:
        to_options(Outer, section, "outer")
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_all_that_does_not_fit_is_named_at_once_and_defaults_stand_in():
    made, wrong = build(Outer, {"steps": 0, "kind": 3, "inner": {"lr": -1, "betas": [0.5, 0.5]}, "name": "y"}, "o.")
    assert list(wrong) == ["o.steps", "o.inner.lr", "o.kind"]
    assert made == Outer(name="y", inner=Inner(betas=(0.5, 0.5)))
    with pytest.raises(ConfigError) as caught:
        to_options(Outer, {"steps": 0, "kind": 3})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, ["part.file is required: set it to text"]),
        ({"steps": 2}, ["part.file is required: set it to text"]),
        ({"file": 3}, ["part.file must be text, got 3"]),
        (
            {"steps": 0},
            ["part.file is required: set it to text", "part.steps must be a whole number of at least 1, got 0"],
        ),
        ({"fil": "x"}, ["part.file is required: set it to text", "unknown key part.fil; did you mean 'file'?"]),
    ],
)
def test_a_required_key_that_is_missing_or_wrong_leaves_no_instance(section, expected):
    made, wrong = build(Needy, section, "part.")
    assert (made, list(wrong.values())) == (None, expected)
    with pytest.raises(ConfigError):
        to_options(Needy, section, "part")
    assert to_options(Needy, {"file": "x"}) == Needy(file="x")


@pytest.mark.timeout(10)
def test_a_required_key_of_an_inner_section_is_named():
    made, wrong = build(Holder, {"part": {"steps": 2}})
    assert (made, list(wrong)) == (None, ["part.file"])


def test_a_long_wrong_value_is_cut():
    with pytest.raises(ConfigError) as caught:
        to_options(Outer, {"steps": "x" * 10_000})
    assert len(str(caught.value)) < 200


def test_the_callers_section_is_left_as_it_was():
    section = {"steps": 0, "inner": {"lr": -1}}
    build(Outer, section)
    assert section == {"steps": 0, "inner": {"lr": -1}}


@given(st.integers(1, 2**31 - 1))
def test_whole_numbers_survive_as_text_exactly(number):
    assert to_options(Outer, {"steps": str(number)} if number != 13 else {}).steps in (number, 1)


@given(st.floats(0, allow_infinity=False))
def test_numbers_survive_as_text_exactly(number):
    assert to_options(Inner, {"lr": repr(number)}).lr == number


@given(st.one_of(st.none(), st.booleans(), st.floats(), st.text(), st.lists(st.integers()), st.binary(), st.integers()))
def test_a_value_is_of_its_type_or_refused(value):
    for name in ("steps", "limit", "share", "name", "flag", "kind", "files"):
        made, wrong = build(Outer, {name: value})
        assert set(wrong) <= {name} or wrong == {"": "Outer: 13 steps bring bad luck"}
        assert to_options(Outer, plain(made)) == made


def test_ranges_in_words_and_shortly():
    hints = {name: each.hint for name, each in declarations(Outer).items()}
    assert allowed(hints["limit"]) == "-1 or a whole number of at least 1 or null"
    assert allowed_shortly(hints["limit"]) == "null | -1 | ≥ 1"
    assert (allowed(hints["share"]), allowed_shortly(hints["share"])) == ("a number from 0 to 1", "0 ≤ x ≤ 1")
    assert allowed_shortly(hints["inner.betas"]) == "2 × 0 ≤ x < 1"


def test_a_condition_of_a_section_is_one_of_its_keys():
    [(section, when)] = declarations(Outer)["inner.lr"].when
    assert (section, when.holds(Outer(flag=True), None), when.holds(Outer(), None)) == ("", True, False)
    assert declarations(Outer)["steps"].when == ()


def test_every_default_is_allowed_and_every_key_is_explained():
    for each in declarations(TrainOptions).values():
        assert each.about.meaning.endswith((".", "any keys.")), each.key
    assert plain(to_options(TrainOptions, plain(TrainOptions()))) == plain(TrainOptions())


def test_declarations_need_no_torch():
    code = "import sys, etude.options; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_relations_within_a_section():
    with pytest.raises(ConfigError, match="set function or command, not both"):
        to_options(RolloutOptions, {"agent": {"openai_agent": {"function": "a.py:f", "command": ["b"]}}}, "rollout")
