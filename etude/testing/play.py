"""`play`: a person types the model's turns in a real rollout, with the run's prompt, tools, loop and reward, or the model
writes them; the trajectory is dumped.

Invariant: the text shown is decoded from the ids that the model gets, special tokens included. Typed text becomes ids as if
the model had sampled them: a tool call is written in the format that the run's parser reads.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from etude.dumps import list_dump_steps
from etude.environments import EnvironmentEntry, EnvironmentSession
from etude.environments.loader import load_environments
from etude.environments.tasks import task_rows
from etude.errors import ConfigError, DataError, EtudeError, ToolError, one_line, plural
from etude.options import EnvironmentOptions
from etude.rewards import COMPONENTS
from etude.testing.trial import TrialRollouts, open_trial
from etude.timeouts import BlockingCalls
from etude.trainer.rollouts import rollouts_of
from etude.trajectory import Rollout, Trajectory
from etude.viewer.conversations import sanitize_text

Echo = Callable[[str], None]

HELP = """Type an answer, or a call: {"name": "TOOL", "arguments": {…}} or TOOL key=value …
A line that ends with \\ goes on in the next one. /raw TEXT is taken as it is, /tools lists the tools, /quit leaves."""
_SECONDS = 24 * 3600.0
_keyboard = BlockingCalls("etude-keyboard", limit=1)


class Left(EtudeError):
    """Raised when the player leaves before the end."""


class Seat:
    """Turns typed lines into token ids; its `turn` is a script for `ScriptedEngine`. The worker waits as long as a person
    takes."""

    def __init__(self, worker: TrialRollouts, typed: TextIO, echo: Echo) -> None:
        patient = replace(worker.context.options.multi_turn, max_seconds=None)
        options = replace(worker.context.options, multi_turn=patient, trajectory_timeout=_SECONDS)
        worker.__dict__["context"] = replace(worker.context, options=options)
        self._worker, self._typed, self._echo = worker, typed, echo
        self._seen: list[int] = []
        echo(f"{HELP}\n")

    async def turn(self, request_id: str, prompt_ids: list[int], number: int) -> list[int]:
        """Prints the part of the context that is new, and returns the ids of the typed turn."""
        known = len(self._seen) if prompt_ids[: len(self._seen)] == self._seen else 0
        self._echo(sanitize_text(self._worker.tokenizer.decode(prompt_ids[known:])))
        ids = None
        while ids is None:
            ids = await self._read()
        self._seen = [*prompt_ids, *ids]
        return ids

    async def _read(self) -> list[int] | None:
        """Reads one input and returns its ids; None if it was a command or invalid."""
        line = await read_line(self._typed)
        command, _, rest = line.partition(" ")
        if command == "/quit":
            raise Left("left before the end: nothing is scored")
        if command == "/raw":
            return self._worker.say(rest)
        if command == "/tools":
            for schema in self._worker.schemas:
                self._echo(json.dumps(schema["function"], ensure_ascii=False))
            return None
        if command.startswith("/"):
            self._echo(HELP)
            return None
        try:
            call = read_call(line, {schema["function"]["name"]: schema for schema in self._worker.schemas})
        except DataError as error:
            self._echo(f"not sent: {error}")
            return None
        if call is None:
            return self._worker.say(line)
        ids = await self._worker.call_ids(*call)
        if ids is None:
            self._echo(
                "not sent: the run's parser reads no format known here; type the call as it wants it, after /raw"
            )
        return ids


async def read_line(typed: TextIO) -> str:
    """Reads a line, and those that it goes on in.

    Raises:
        Left: the input ended.
    """
    lines = []
    while True:
        line = await _keyboard.run(typed.readline)
        if not line:
            raise Left("the input ended before the conversation: nothing is scored")
        line = line.rstrip("\n").encode(errors="replace").decode()  # invalid UTF-8 arrives as lone surrogates
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def read_call(line: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """Parses a typed line into (tool, arguments); None if it is an answer. Unknown tools are allowed, as for a model.

    Raises:
        DataError: it looks like a call but is malformed.
    """
    text = line.strip()
    if text.startswith("{"):
        try:
            made = json.loads(text)
            name, arguments = made["name"], made.get("arguments") or {}
        except (ValueError, KeyError, RecursionError) as error:
            raise DataError('a call is JSON such as {"name": "TOOL", "arguments": {}}') from error
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise DataError('"name" must be a text, and "arguments" an object')
        return name, arguments
    name, _, rest = text.partition(" ")
    if name not in schemas:
        return None
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise DataError(f"{error}: quote values with spaces: {name} key='two words'") from error
    arguments = read_arguments(words, schemas[name])
    return None if arguments is None else (name, arguments)  # "price is 3" is an answer


def read_arguments(words: Sequence[str], schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Reads the arguments `key=value` of a call of the tool with this OpenAI schema; None if a word is of another form."""
    properties = (schema["function"].get("parameters") or {}).get("properties") or {}
    arguments = {}
    for word in words:
        key, found, value = word.partition("=")
        if not found or not key:
            return None
        arguments[key] = value if (properties.get(key) or {}).get("type") == "string" else _value(value)
    return arguments


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def play(
    config_name: str | None,
    overrides: tuple[str, ...],
    config_path: str | None,
    *,
    row: int,
    validation: bool,
    folder: Path | None,
    typed: TextIO | None,
    echo: Echo,
    question: str | None = None,
) -> bool:
    """Plays one row to its end, prints its score in parts, and dumps the trajectory; returns whether it ended.

    Args:
        typed: where the turns are read from; None: the run's model writes them.
        question: replaces the row's last question. Nothing is scored then: the right answer is not known.

    Raises:
        DataError: there is no such row, or it asks nothing that could be replaced.
        ConfigError: the run could not start, or the folder cannot be written; raised before the first prompt.
        Left: the player left.
    """
    worker, setup = open_trial(config_name, overrides, config_path, _SECONDS)
    try:
        files = setup.options.data.val_files if validation else setup.options.data.train_files
        rows = setup.dataset(files, row + 1, split="val" if validation else "train")
        if row >= len(rows):
            raise DataError(f"{', '.join(map(str, files))}: no row {row}: there are {len(rows)}")
        place = folder or Path(setup.options.trainer.default_local_dir) / "play"
        check_writable(place)
        task = rows[row]
        if question is not None:
            task = _ask(task, question)
            worker.__dict__["scorer"] = None
        script = None if typed is None else Seat(worker, typed, echo).turn
        if script is None:
            sys.stderr.write(f"loading {setup.options.actor_rollout_ref.model.path}\n")
            worker.init_model()
            worker.update_weights(0)
        batch = worker.roll_out([task], script)
        [rollout] = rollouts_of(batch)
        if script is None and rollout.trajectory is not None:
            shown = worker.tokenizer.decode(rollout.trajectory.context_ids())
            echo(sanitize_text(shown))
        echo("")
        if rollout.trajectory is None:
            echo(f"dropped: {rollout.cause or (rollout.dropped and rollout.dropped.value)}")
            return False
        _print_score(worker, rollout, rollout.trajectory, echo)
        step = max(list_dump_steps(place), default=-1) + 1
        worker.dump(place, batch, step)
        echo(f"kept in {place / f'{step}.jsonl'}")
        return True
    finally:
        worker.end()


def _ask(row: Mapping[str, Any], question: str) -> dict[str, Any]:
    """Returns the row with another last question; its ids, rendered from the old one, are left out."""
    messages = list(row["raw_prompt"])
    if not messages or messages[-1]["role"] != "user":
        raise DataError("the row's prompt does not end with a question that --ask could replace; choose another --row")
    asked = [*messages[:-1], {"role": "user", "content": question}]
    return {key: value for key, value in row.items() if key != "raw_prompt_ids"} | {"raw_prompt": asked}


def check_writable(folder: Path) -> None:
    """Creates `folder`; raises ConfigError if no file can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {one_line(error)}; give another --output-dir") from error


def _print_score(worker: TrialRollouts, rollout: Rollout, trajectory: Trajectory, echo: Echo) -> None:
    rewards, weights = trajectory.rewards, worker.options.reward_model
    echo(f"ended: {trajectory.stop_reason.value}, {plural(trajectory.assistant_turns, 'assistant turn')}")
    scored = rewards.score is not None or worker.scorer is not None
    unscored = ", of calls alone: the answer to your question is not scored"
    echo(f"reward {worker.total(rollout) or 0.0:g}{'' if scored else unscored}")
    tools = [(value, f"{source}, turn {turn}") for turn, source, value in rewards.steps]
    for value, source in [*tools, *((value, f"{tool}, calc_reward") for tool, value in rewards.final.items())]:
        if value:
            echo(f"  {weights.tool_reward_weight:g} × {value:g}  {source}")
    if rewards.score is not None:
        echo(f"  {weights.score_weight:g} × {rewards.score:g}  reward function{_details(rewards.score_info)}")


def _details(values: Mapping[str, Any]) -> str:
    """What a scorer told beside the score, such as `: acc 1, format 0.5`."""
    flat = {**values, **(values.get(COMPONENTS) or {})}
    told = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in flat.items()
        if name not in ("score", COMPONENTS)
    ]
    return sanitize_text(f": {', '.join(told)}") if told else ""


def play_environment(
    options: EnvironmentOptions, *, row: int, validation: bool, typed: TextIO, echo: Echo
) -> float | None:
    """Plays task number `row` of an environment, without a run or a model; returns its reward.

    Raises:
        ConfigError: the environment cannot be opened.
        DataError: it has no such task.
        Left: the player left.
    """
    environments = load_environments([options])
    assert environments is not None
    [entry] = environments.entries.values()
    rows = [*task_rows(entry, "val" if validation else "train", row + 1)]
    if row >= len(rows):
        raise DataError(f"{entry.label}: no task {row}: there are {len(rows)}")
    return asyncio.run(_play_session(entry, rows[row], typed, echo))


async def _play_session(entry: EnvironmentEntry, row: Mapping[str, Any], typed: TextIO, echo: Echo) -> float | None:
    total, rewarded = 0.0, False
    async with EnvironmentSession(entry, {**row, "group_seed": 0, "request_id": "play"}) as session:
        schemas = {name: tool.tool_schema.to_openai() for name, tool in session.tools.items()}
        for schema in schemas.values():
            echo(json.dumps(schema["function"], ensure_ascii=False))
        shown = session.observation
        echo(
            sanitize_text(shown if isinstance(shown, str) else "\n".join(f"{m['role']}: {m['content']}" for m in shown))
        )
        while not session.done:
            line = await read_line(typed)
            if line == "/quit":
                break
            reward = None
            try:
                if (call := read_call(line, schemas)) is not None and call[0] in schemas:
                    response, reward, _ = await session.call_tool(*call)
                    echo(sanitize_text(response.text or ""))
                else:
                    step, messages = await session.step(line)
                    reward = step.reward
                    echo(sanitize_text("\n".join(str(message["content"]) for message in messages)))
            except (ToolError, DataError) as error:
                echo(f"error: {sanitize_text(one_line(error))}")
            total, rewarded = total + (reward or 0.0), rewarded or reward is not None
        score, info = await session.score(completed=session.done)
    if score is None and not rewarded:
        return None
    echo(f"reward {total + (score or 0.0):g}{_details(info)}")
    return total + (score or 0.0)
