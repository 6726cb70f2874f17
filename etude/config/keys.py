"""Which keys exist, and what type each has where its default value does not say it.

Invariant: the package's own YAML is the list of keys; there is no second one. A key whose default is `{}` is free-form:
its section takes anything. Leaves reading files to `layers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Any, Literal

from etude.config.layers import Layer, flatten, plain
from etude.config.values import coerce, mismatch
from etude.errors import ConfigError

_Paths = list[str] | None
_KINDS: dict[str, Any] = {
    "*.path": str | None,
    "target_success.data_files": _Paths,
    "*_files": list[str],
    "*tool_config": _Paths,
    "*tool_config_path": _Paths,
    "*function_tool_path": _Paths,
    "plugins": list[str],
    "trainer.logger": list[str],
    "trainer.*_data_dir": str | None,
    "trainer.resume_from_path": str | None,
    "trainer.resume_mode": Literal["auto", "disable", "resume_path"],
    "trainer.total_training_steps": int | None,
    "trainer.num_threads": int | None,
    "trainer.max_actor_ckpt_to_keep": int | None,
    "data.val_batch_size": int | None,
    "data.image_key": str | None,
    "data.truncation": Literal["error", "drop"],
    "*.clip_ratio_low": float | None,
    "*.clip_ratio_high": float | None,
    "*.loss_scale_factor": float | None,
    "*optim.name": Literal["adamw", "muon"],
    "*optim.betas": tuple[float, float],
    "*optim.lr_scheduler_type": Literal["constant", "linear", "cosine"],
    "*.rollout.mode": Literal["async", "sync"],
    "*.rollout.max_model_len": int | None,
    "*.rollout.kv_cache_memory_mb": int | None,
    "*.rollout.dtype": str | None,
    "*.rollout.trajectory_timeout": float,
    "*.rollout.server_urls": list[str],
    "*.rollout.server_model": str | None,
    "*.rollout.server_api_key_env": str | None,
    "*.rollout.server_timeout": float,
    "*.rollout.weight_transfer": Literal["folder", "cuda_ipc"],
    "*.rollout.weight_sync_dir": str | None,
    "*.rollout.weight_sync_timeout": float,
    "*.rollout.weight_probe_tolerance": float | None,
    "*.trace.backend": str | None,
    "*.max_samples_per_step_per_worker": int | None,
    "*.max_assistant_turns": int | None,
    "*.max_user_turns": int | None,
    "*.max_seconds": float | None,
    "*.interaction_config_path": str | None,
    "*.malformed_calls": Literal["tell", "penalise", "end"],
    "*.tool_response_length_unit": Literal["tokens", "characters"],
    "*.rollout.stop": list[str] | None,
    "*.agent.default_agent_loop": str | None,
    "*.agent.agent_loop_config_path": str | None,
    "*.agent.openai_agent.function": str | None,
    "*.agent.openai_agent.command": list[str],
    "*.rollout.max_turns": int | None,
    "actor_rollout_ref.env.timeout": float,
    "actor_rollout_ref.env.use_process_reward": bool,
    "actor_rollout_ref.env.config_path": _Paths,
    "actor_rollout_ref.env.*": str | None,
    "*.tool_response_truncate_side": Literal["left", "right", "middle"],
    "algorithm.kl_ctrl.type": Literal["fixed", "adaptive"],
}
"""Patterns of keys and their types; the first match counts, then the type of the default value."""


class KeyTable:
    """The keys of one root: built from the package's layers."""

    def __init__(self, package_layers: Iterable[Layer]) -> None:
        self._defaults: dict[str, Any] = {}
        self._free: set[str] = set()
        for layer in package_layers:
            for key, value in flatten(plain(layer)):
                if value == {}:
                    self._free.add(key)
                elif self.free_form(key) is None:
                    self._defaults[key] = value
        self._sections = {section for key in self for section in _ancestors(key)}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._defaults, *self._free])

    def free_form(self, key: str) -> str | None:
        """The free-form section that `key` is or lies in, if any."""
        return next((free for free in self._free if key == free or key.startswith(free + ".")), None)

    def knows(self, key: str) -> bool:
        """Whether `key` is one of ours: a key, a section, or within a free-form section."""
        return key in self._defaults or key in self._sections or self.free_form(key) is not None

    def faults(self, layer: Layer) -> list[str]:
        """A line for each key of `layer` that does not exist, or holds a value where a section belongs."""
        faults = dict.fromkeys(self._fault(key, value) for key, value in flatten(plain(layer)))
        return [f"{fault[0]} ({layer.source}){fault[1]}" for fault in faults if fault]  # a section's keys share a line

    def _fault(self, key: str, value: Any) -> tuple[str, str] | None:
        """(what is wrong with a key that was set to `value`, what follows the place where it was), if anything."""
        if key in self._sections or key in self._free:
            return None if isinstance(value, Mapping) else (str(mismatch(value, dict, key)), "")
        if self.knows(key):
            return None
        leaf = next((part for part in _ancestors(key) if part in self._defaults), None)
        if leaf:
            return str(mismatch("a section", self.kind(leaf), leaf)), ""
        return f"unknown key {self._unknown_part(key)}", self._nearest(key)

    def convert(self, values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
        """The entries of `values` (dotted key → value) whose type had to change, with the right type.

        Raises:
            ConfigError: a value has the wrong type; names the key and where the value came from.
        """
        changed = {}
        for key, value in values.items():
            if key not in self._defaults:
                continue
            try:
                right = coerce(value, self.kind(key), key)
            except ConfigError as error:
                raise _at(sources.get(key, ""), error) from error
            right = list(right) if isinstance(right, tuple) else right
            if type(right) is not type(value) or right != value:
                changed[key] = right
        return changed

    def kind(self, key: str) -> Any:
        """The type annotation of a known key."""
        for pattern, kind in _KINDS.items():
            if fnmatchcase(key, pattern):
                return kind
        default = self._defaults[key]
        is_filled_in = isinstance(default, str) and "${" in default
        if is_filled_in:
            target = default.removeprefix("${").removesuffix("}")
            return self.kind(target) if target in self._defaults else str
        return type(default)

    def _unknown_part(self, key: str) -> str:
        """`key` up to and including its first name that does not exist."""
        return next((part for part in _ancestors(key) if part not in self._sections), key)

    def _nearest(self, key: str) -> str:
        """`"; did you mean …?"`: the key of the same section whose name is spelled most alike, else of another one."""
        parent, _, name = self._unknown_part(key).rpartition(".")

        def likeness(known: str) -> tuple[bool, float]:
            known_parent, _, known_name = known.rpartition(".")
            ratio, is_near = SequenceMatcher(None, name, known_name).ratio(), known_parent == parent
            return (is_near, ratio) if ratio >= (0.75 if is_near else 0.85) else (False, 0.0)

        best = max(sorted([*self, *self._sections]), key=likeness)
        return f"; did you mean {best}?" if likeness(best)[1] else "; `etude config` lists the keys"


def _ancestors(key: str) -> list[str]:
    """The sections that `key` lies in, outermost first."""
    names = key.split(".")
    return [".".join(names[:depth]) for depth in range(1, len(names))]


def _at(source: str, error: ConfigError) -> ConfigError:
    return ConfigError(f"{error} ({source})") if source else error
