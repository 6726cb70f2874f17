"""A pytest plug-in that holds one configuration key at its default, whatever a test sets it to: a test that observes the
key's effect then fails.

    HOLD_KEY=algorithm.gamma PYTHONPATH=tests python -m pytest -p hold_key tests/reference

The key is held where a configuration is composed and, since some tests build options by hand, in the options class of its
section. `tests/reference/test_reference_keys.py` says which test observes which key, and proves it with this.
"""

import functools
import json
import os
import subprocess
import sys
import typing
from pathlib import Path

from omegaconf import OmegaConf

from etude.options.tree import TrainOptions
from etude.options.validate import flatten, plain


def hold_in_options(key):
    """Makes the options class of the key's section drop what it is given for it."""
    *sections, field = key.split(".")
    cls = TrainOptions
    for section in sections:
        if section not in (hints := typing.get_type_hints(cls)):
            return
        cls = hints[section]
    original = cls.__init__

    @functools.wraps(original)
    def held(self, *args, **given):
        given.pop(field, None)
        original(self, *args, **given)

    cls.__init__ = held


def hold_in_compositions(key):
    """Makes compositions forget what was given for the key, on the command line or in a file."""
    from importlib import import_module

    module = import_module("etude.config.compose")
    original = module.compose_with_sources

    @functools.wraps(original)
    def held(config_name=None, overrides=(), config_path=None, *, root=module.DEFAULT_ROOT, **given):
        kept = [each for each in overrides if each.lstrip("+~").split("=")[0] != key]
        if key in dict(flatten(plain(original(None, (), None, root=root).options))):  # else one of the other tree
            default = OmegaConf.to_container(original(None, (), None, root=root, resolve=False).config, resolve=False)
            kept.append(f"{key}={json.dumps(dict(flatten(default))[key])}")
        return original(config_name, kept, config_path, root=root, **given)

    module.compose_with_sources = held
    import etude.config

    etude.config.compose_with_sources = held


def run_held(key, witness, folder):
    """The outcome of the test `witness` (a file of tests/, `::`, a name), run in `folder` with `key` held."""
    tests = Path(__file__).parent
    plugins = ["-p", "hold_key", "-p", "no:cacheprovider"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *plugins,
        "-c",
        f"{tests.parent}/pyproject.toml",
        f"{tests}/{witness}",
    ]
    environment = {**os.environ, "HOLD_KEY": key, "PYTHONPATH": str(tests)}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)


if KEY := os.environ.get("HOLD_KEY"):
    hold_in_compositions(KEY)
    hold_in_options(KEY)
