"""The row contract of RL data, the same as in verl's and Search-R1's files.

A row is `data_source, prompt [{role, content}], images?, ability, reward_model {style, ground_truth}, agent_name?,
extra_info {index, split, need_tools_kwargs, tools_kwargs {tool: {create_kwargs, execute_kwargs, calc_reward_kwargs,
release_kwargs}}, tool_selection?, interaction_kwargs?, …}`. Other columns are kept unchanged.

Invariant: a row returned by `check_row` names only tools that exist and are active for it, and its `tools_kwargs` and
`interaction_kwargs` hold no null-valued key: Arrow pads rows with nulls, so a null there means "not given" and the
tool's default applies. Prompt lengths are left to `dataset`.

`interaction_kwargs` without a name, as verl's tool scripts write them, select the interaction `gsm8k`, as in verl; if no
interaction is configured they are dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.data.files import Row, plain, without_nulls
from etude.data.messages import check_messages
from etude.errors import DataError
from etude.registry import unknown_name
from etude.rewards.default import check_truth
from etude.tools.session import SECTIONS

_NAMELESS = "gsm8k"
_OWN_LOOPS = (None, "tool_agent", "single_turn_agent")  # they read no more of extra_info than these keys


def check_row(
    row: Mapping[str, Any],
    where: str,
    tool_names: Sequence[str] | None,
    prompt_key: str = "prompt",
    interactions: Sequence[str] = (),
    agent_loops: Sequence[str] | None = None,
    environments: Sequence[str] | None = None,
) -> Row:
    """Returns `row` validated and normalised: with `extra_info` and `reward_model`, without nulls under the kwargs.

    Args:
        row: as read from the file.
        where: location for error messages, such as `train.parquet: row 17`.
        tool_names: the configured tools; None if tools are turned off, and then the rows' tool settings are dropped.
        prompt_key: the column that holds the messages.
        interactions: the configured interactions.
        agent_loops: the registered agent loops; None if unknown.
        environments: those that rows pick from; None if they pick none.

    Raises:
        DataError: the row violates the contract; one line that names `where`.
    """
    checked: Row = plain(row)
    if prompt_key not in checked:
        problem = f"{where}: no column '{prompt_key}' (data.prompt_key)"
        raise unknown_name(DataError, problem, prompt_key, checked, f"(columns: {', '.join(checked)})")
    _check_not_of_trl(checked, where, prompt_key)
    checked[prompt_key] = check_messages(checked[prompt_key], f"{where}: {prompt_key}", images=True)
    if not isinstance(checked.get("data_source"), str):
        raise DataError(f"{where}: needs 'data_source', a text that picks the scorer and groups the metrics")
    name = checked.get("agent_name")
    if name is None:
        checked.pop("agent_name", None)
    elif not isinstance(name, str):
        raise DataError(f"{where}: agent_name must be text, got {type(name).__name__}")
    elif agent_loops is not None and name not in agent_loops:
        problem = f"{where}: agent_name: unknown agent loop '{name}'"
        raise unknown_name(DataError, problem, name, agent_loops, f"(known: {', '.join(agent_loops)})")
    for key in ("reward_model", "extra_info"):
        checked[key] = _object(checked.get(key), f"{where}: {key}")
    extra_info = checked["extra_info"]
    for key in ("tools_kwargs", "interaction_kwargs"):
        if key in extra_info:
            extra_info[key] = without_nulls(_object(extra_info[key], f"{where}: extra_info.{key}"))
    _check_selection(extra_info.get("tool_selection"), where, tool_names)
    if environments is not None:
        _check_environment(extra_info.get("env"), where, environments)
    if tool_names is None:
        extra_info.pop("tools_kwargs", None)
        extra_info.pop("interaction_kwargs", None)
    else:
        _check_tools_kwargs(extra_info, where, tool_names)
        _check_interaction(extra_info, where, interactions)
    return checked


def question_of(row: Mapping[str, Any], prompt: Any, agent: str | None = None, env: str | None = None) -> str:
    """A digest of what two rows share that ask the same: prompt, images, and what tools, users and environments are given.
    Where an environment or an agent of the user's may read it, that is all of `extra_info` but the row's place. `agent` and
    `env`: the run's own, of rows that name none."""
    info = dict(row.get("extra_info") or {})
    own = info.get("env") or env, row.get("agent_name") or agent
    keys = (
        [*info]
        if own[0] or own[1] not in _OWN_LOOPS
        else ("tools_kwargs", "interaction_kwargs", "task", "env_seed", "tool_selection")
    )
    told = {key: info[key] for key in sorted(keys) if info.get(key) is not None and key not in ("index", "split")}
    return hashlib.blake2b(repr((prompt, row.get("images"), own, told)).encode("utf-8", "surrogatepass")).hexdigest()


def raw_truth(row: Mapping[str, Any]) -> Any:
    """The row's ground truth as it stands there; None without one."""
    return (row.get("reward_model") or {}).get("ground_truth")


def truth_of(row: Mapping[str, Any]) -> str | None:
    """The row's ground truth as text; None without one."""
    truth = raw_truth(row)
    return None if truth is None else str(truth).strip()


def check_ground_truth(row: Row, where: str) -> None:
    """Checks that the built-in scorer of `row`, as `check_row` returned it, can read its ground truth.

    Raises:
        DataError: it cannot: one line that names `where`.
        ConfigError: there is no scorer for its data source.
    """
    try:
        check_truth(row["data_source"], row["reward_model"].get("ground_truth"))
    except DataError as error:
        raise error.at(where) from error


def active_tools(row: Mapping[str, Any], tool_names: Sequence[str]) -> list[str]:
    """Returns the configured tools that a row may use, in order: those in its `extra_info.tool_selection`, or all."""
    selection = (row.get("extra_info") or {}).get("tool_selection")
    return [name for name in tool_names if selection is None or name in selection]


def _object(value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object, got {type(value).__name__}")
    return value


def _check_not_of_trl(row: Row, where: str, prompt_key: str) -> None:
    """Says at once all that a row as TRL takes it lacks: what is said of one column is followed by the next otherwise."""
    answer = next((name for name in ("answer", "solution") if name in row), None)
    if answer is None or "data_source" in row or "reward_model" in row:
        return
    worked = {
        "data_source": "mine",
        prompt_key: [{"role": "user", "content": "…"}],
        "reward_model": {"style": "rule", "ground_truth": "…"},
    }
    problem = f"{where}: a row as TRL has it: no data_source, and '{answer}' where reward_model should be"
    raise DataError(problem, fix=f"write {json.dumps(worked, ensure_ascii=False)} (docs/from-trl.md)")


def _check_environment(name: object, where: str, environments: Sequence[str]) -> None:
    if name is None and len(environments) == 1:
        return
    if name not in environments:
        problem = f"{where}: extra_info.env: " + ("is missing" if name is None else f"there is no environment '{name}'")
        raise unknown_name(DataError, problem, str(name), environments, f"(configured: {', '.join(environments)})")


def _check_selection(selection: object, where: str, tool_names: Sequence[str] | None) -> None:
    if selection is None:
        return
    if not (isinstance(selection, list) and all(isinstance(name, str) for name in selection)):
        raise DataError(f"{where}: extra_info.tool_selection must be a list of tool names")
    known: Sequence[str] = selection if tool_names is None else tool_names
    for name in selection:
        if name not in known:
            problem = f"{where}: tool_selection names the tool '{name}'"
            raise unknown_name(DataError, problem, name, known, f"(configured: {', '.join(known) or 'none'})")


def _check_interaction(extra_info: dict[str, Any], where: str, interactions: Sequence[str]) -> None:
    kwargs = extra_info.get("interaction_kwargs")
    if not kwargs:
        return
    if "name" not in kwargs and not interactions:
        del extra_info["interaction_kwargs"]
        return
    if "name" not in kwargs and _NAMELESS in interactions:
        kwargs["name"] = _NAMELESS
    name = kwargs.get("name")
    if not isinstance(name, str):
        raise DataError(f"{where}: extra_info.interaction_kwargs needs 'name', a text that picks the interaction")
    if name not in interactions:
        known = f"configured: {', '.join(interactions)}" if interactions else "set multi_turn.interaction_config_path"
        problem = f"{where}: interaction_kwargs names the interaction '{name}'"
        raise unknown_name(DataError, problem, name, interactions, f"({known})")


def _check_tools_kwargs(extra_info: Mapping[str, Any], where: str, tool_names: Sequence[str]) -> None:
    tools_kwargs: dict[str, Any] = extra_info.get("tools_kwargs") or {}
    if extra_info.get("need_tools_kwargs") and not tools_kwargs:
        raise DataError(f"{where}: need_tools_kwargs is true but extra_info.tools_kwargs is missing or empty")
    active = active_tools({"extra_info": extra_info}, tool_names)
    for tool, kwargs in tools_kwargs.items():
        if tool not in tool_names:
            known = f"configured: {', '.join(tool_names)}" if tool_names else "no tool is configured"
            problem = f"{where}: tools_kwargs names the tool '{tool}'"
            raise unknown_name(DataError, problem, tool, tool_names, f"({known})")
        if tool not in active:
            raise DataError(f"{where}: tools_kwargs names the tool '{tool}', which tool_selection leaves out")
        for kind, values in _object(kwargs, f"{where}: tools_kwargs.{tool}").items():
            if kind not in SECTIONS:
                problem = f"{where}: tools_kwargs.{tool} has the unknown key '{kind}'"
                raise unknown_name(DataError, problem, kind, SECTIONS)
            _object(values, f"{where}: tools_kwargs.{tool}.{kind}")
