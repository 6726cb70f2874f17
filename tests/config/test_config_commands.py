"""verl's own example commands: all that must change in one message, and what the message says is enough."""

import logging

import pytest
from commands_stage import COMMANDS, arguments_of, corrected
from omegaconf import ListConfig, OmegaConf

from etude.config import compose, compose_with_sources
from etude.config.foreign_keys import ALIASES
from etude.errors import ConfigError


@pytest.mark.parametrize("name", COMMANDS)
def test_one_message_lists_all_that_must_change(name, tmp_path):
    place, arguments = arguments_of(name, tmp_path)
    with pytest.raises(ConfigError) as caught:
        compose(overrides=arguments, **place)
    changes = COMMANDS[name][2]
    lines = str(caught.value).splitlines()
    assert len(lines) == len(changes) + (len(changes) > 1)
    for (key, change), line in zip(changes.items(), lines[-len(changes) :], strict=True):
        assert line.startswith(key)
        assert ("write" in line) is bool(change)
        assert change is None or change.partition("=")[0].rpartition(".")[2] in line or "truncation" in key
        assert "did you mean" not in line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_corrected_command_composes_and_names_what_has_no_effect(name, tmp_path, caplog):
    place, arguments = arguments_of(name, tmp_path)
    with caplog.at_level(logging.WARNING, "etude"):
        config = compose_with_sources(overrides=corrected(name, arguments), **place).config
    [line] = [message for message in caplog.messages if message.startswith("no effect here: ")]
    for argument in corrected(name, arguments):
        key, _, value = argument.lstrip("+").partition("=")
        ours = OmegaConf.select(config, ALIASES.get(key, key), default=None)
        assert (key in line.replace(",", " ").split()) is (ours is None), key
        assert ours is None or isinstance(ours, ListConfig) or _number(ours) == _number(value), key


def _number(value):
    try:
        return float(str(value))
    except ValueError:
        return str(value).lower()
