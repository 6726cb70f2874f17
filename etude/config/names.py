"""Names of registered things in a configuration.

Invariant: nothing is refused that a plugin may still register, and no room that needs torch is imported to look: what such
a room comes with is part of the declaration, and a room that is imported already is asked itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from etude.errors import raise_faults
from etude.options import declarations
from etude.options.declare import Names
from etude.options.validate import value_of
from etude.registry import Registry, did_you_mean, import_object

_ALSO = {"reward_model.reward_manager": ("parallel",)}
"""Names that stand for something that is not registered."""
_MOST_NAMES = 12
_NOT_FOR_RUNS = ("scripted",)
"""The engine that plays what a test gives it."""


def unknown_names(options: Any, *, starting: bool = False) -> Iterator[tuple[str, str]]:
    """Keys whose name nothing is registered under, each with what is.

    `starting` says that what registers names has been imported; until then only what nothing can register is refused.
    """
    if options.plugins and not starting:
        return
    own_loops = hasattr(options, "actor_rollout_ref") and options.actor_rollout_ref.rollout.agent.agent_loop_config_path
    for key, declared in declarations(type(options)).items():
        value = value_of(options, key)
        if declared.about.names is None or value in (None, declared.default):
            continue
        may_come = declared.about.names.late or (own_loops and key.endswith("default_agent_loop"))
        if may_come and not starting:
            continue
        known = [name for name in known_names(declared.about.names) if name not in _NOT_FOR_RUNS]
        known += _ALSO.get(key, ())
        for name in value if isinstance(value, tuple) else (value,):
            if name not in known:
                few = ", ".join(known[:_MOST_NAMES]) + (", …" if len(known) > _MOST_NAMES else "")
                yield key, f"nothing is registered as '{name}'{did_you_mean(name, known)} (known: {few})"
                break


def check_names(options: Any) -> None:
    """Refuses names that nothing is registered under, now that the plugins are imported.

    Raises:
        ConfigError: names every key, and the nearest name.
    """
    raise_faults([f"{key}: {text}" for key, text in unknown_names(options, starting=True)])


def known_names(names: Names) -> list[str]:
    """What is registered now, as far as can be known without importing torch."""
    module, _, _ = names.registry.partition(":")
    if names.builtin and module not in sys.modules:
        return list(names.builtin)
    registry: Registry[Any] = import_object(names.registry)
    return registry.names()
