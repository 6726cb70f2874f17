"""`inspect_environment`: conformance test of a tool set or environment, with scripted agents on the run's own rows.

Agents that say nothing, write without end, copy their input, guess everything or call tools at random must earn no reward.
Trajectories must be isolated from each other; resources must be released, even if a call is cancelled or hangs; the same
seed must give the same trajectory.

Invariant: an agent's turn is a function of (seed, row, turn) and of its context, so that any difference between two plays
comes from the environment. Tools are actually called, sometimes with arguments that no sane model would write.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MethodType
from typing import Any

import psutil

from etude.checks.findings import Findings, Result, check, error, place_in, skipped, warning
from etude.data.rows import raw_truth, truth_of
from etude.environments import Environment, EnvironmentEntry
from etude.environments.entry import task_of
from etude.errors import DataError, EtudeError, plural
from etude.inference.scripted import Script
from etude.schemas import FunctionCall
from etude.testing import advice
from etude.testing.trial import (
    TrialRollouts,
    example_arguments,
    open_trial,
    row_number,
    tool_calls_of,
    tools_of,
    worked_examples,
)
from etude.tools import BaseTool, ToolRuntime
from etude.tools.arguments import ArgumentError
from etude.tools.contract import overrides
from etude.trainer.rollouts import rollouts_of
from etude.trajectory import Rollout, ToolCallRecord

_METHODS = ("create", "execute", "calc_reward", "release")
_TURNS = 3  # tool-call turns of an agent before it answers
_NONSENSE = ("zorp", "quibble", "flum", "drast", "ookle", "vinth")
_GUESSES = (*map(str, range(21)), "1/2", "0.5", "A", "B", "C", "D", "E", "yes", "no", "true", "false")
_LAST = "987654321"  # an implausible guess: a scorer that reads only the last number is not fooled
_ODD: tuple[Any, ...] = (
    "",
    None,
    -1,
    10**12,
    3.7,
    True,
    [],
    {},
    "x" * 200,
    "naïve \u202e\x00",
    {"a": [1, {"b": None}]},
)
_DUST = 1e-9
_SHORT = 20  # characters of a ground truth that is one guess among others
_OURS = ("etude", "asyncio_", "MainThread")
"""Name prefixes of pooled threads, which do not count as leaks."""
_ROUNDS = 3  # plays between two counts of leaked resources


def inspect_environment(
    config_name: str | None,
    overrides_: Sequence[str],
    config_path: str | None,
    *,
    rows: int = 6,
    seed: int = 0,
    seconds: float = 10.0,
) -> Findings:
    """Plays the first `rows` rows of `data.train_files`; `seconds` is the time limit of a trajectory.

    Raises:
        ConfigError, DataError: the run could not start.
    """
    worker, setup = open_trial(config_name, overrides_, config_path, seconds)
    dataset = setup.dataset(setup.options.data.train_files, rows)
    if not len(dataset):
        raise DataError("data.train_files: there is no row to play")
    try:
        test = Conformance(worker, [dataset[number] for number in range(len(dataset))], seed)
        return Findings().run_stage("environment", test, fix=test.fix)
    finally:
        worker.end()


class Spy:
    """Wraps the lifecycle methods of tools and of the environment to count successful calls; with `hangs`, every tool call
    blocks forever."""

    def __init__(self, worker: TrialRollouts) -> None:
        self.calls: Counter[str] = Counter()  # successful calls only
        self.executing = asyncio.Event()
        self.hangs = False
        environment = worker.context.environment
        if environment is not None:  # first: copies of entries have tools of their own
            entries = {name: replace(each, make=self._spied(each)) for name, each in environment.entries.items()}
            worker.__dict__["context"] = replace(worker.context, environment=replace(environment, entries=entries))
        for tool in tools_of(worker.context).values():
            for method in _METHODS:
                if overrides(tool, method):
                    spied = self._wrap(getattr(type(tool), method), f"{tool.name}.{method}")
                    setattr(tool, method, MethodType(spied, tool))

    def _spied(self, entry: EnvironmentEntry) -> Callable[[], Environment]:
        def make() -> Environment:
            made = entry.make()
            for method in ("reset", "close"):
                setattr(made, method, self._wrap(getattr(made, method), f"{entry.name}.{method}"))
            return made

        return make

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Lets every tool call block forever inside the block."""
        self.hangs = True
        try:
            yield
        finally:
            self.hangs = False

    def _wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        executes = name.endswith(".execute")

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            if executes:
                self.executing.set()
                if self.hangs:
                    await asyncio.Event().wait()
            returned = await function(*args, **kwargs)
            self.calls[name] += 1
            return returned

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            returned = function(*args, **kwargs)
            self.calls[name] += 1
            return returned

        return awaited if inspect.iscoroutinefunction(function) else called

    def unbalanced(self) -> Iterator[tuple[str, int, int]]:
        """Yields (name, begun, ended) where the counts differ."""
        for begin, end in (("create", "release"), ("reset", "close")):
            for name in {key.rpartition(".")[0] for key in self.calls if key.endswith((begin, end))}:
                begun, ended = self.calls[f"{name}.{begin}"], self.calls[f"{name}.{end}"]
                if f"{name}.{begin}" in self.calls and begun != ended and (ended or begin == "reset"):
                    yield name, begun, ended


class Conformance:
    """Plays the rows with scripted agents; each check stores what later ones compare with."""

    def __init__(self, worker: TrialRollouts, rows: Sequence[dict[str, Any]], seed: int) -> None:
        self._worker, self._rows, self._seed = worker, list(rows), seed
        self._isolated = range(1 + len(self._rows))  # two trajectories of the first row: state may also belong to a row
        first = next(iter(tools_of(worker.context)), None)
        if first and worker.call(first, example_arguments(worker.context, first)) is None:
            worker.read_plain_calls()
        self._shown = worked_examples(worker.context, self._rows)
        self._words = (*_GUESSES, *_NONSENSE, *_words_of(self._rows))
        self._spy = Spy(worker)
        self._tools: dict[str, BaseTool] = tools_of(worker.context)
        self._first: list[object] = []  # trace of each row, played alone
        self._repeats = False
        self._records: list[ToolCallRecord] = []  # tool calls of all plays
        talks, env = worker.options.rollout.multi_turn, worker.options.actor_rollout_ref.env
        self._code = {name: f"'{name}' ({advice.code_of(tool, talks)})" for name, tool in self._tools.items()}
        entries = worker.context.environment.entries.values() if worker.context.environment else ()
        files = {each.label: advice.file_of(each.kind) or f"{each.key}={each.id}" for each in entries}
        self._environment = f"the environment actor_rollout_ref.env.name={env.name}"
        if not env.chosen:
            self._environment = ", ".join(f"{label} ({file})" for label, file in files.items())
        self._code |= {name: f"'{name}' ({files[each.label]})" for each in entries for name in each.tools}
        self._owners = self._environment if entries else ", ".join(self._code.values())
        self.fix = f"mend {self._environment}" if entries else advice.try_alone(talks)
        ends = (reversed(worker.context.chat.initial_ids([{"role": "user", "content": text}])) for text in "ab")
        self._answer_begins = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends)))
        self._budget = max(1, worker.context.options.response_length // (_TURNS + 2))

    # -- agents --------------------------------------------------------------------------------------------------

    def _say_truncated(self, text: str, first: str = "", end: str = "") -> list[int]:
        """Says `first`, and `text` as far as it fits before `end`."""
        ending, least = self._worker.say(end), len(self._worker.say(first))
        return [*self._worker.say(first + text)[:-1][: max(self._budget - len(ending), least)], *ending]

    def _guessing_agent(self, request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        """Says the truth of its row among others; last a wrong answer of its shape, for a scorer that reads the last one."""
        truths = [truth if len(truth) <= _SHORT else "" for truth in (truth_of(row) or "" for row in self._rows)]
        truth = truths[row_number(request_id) % len(self._rows)]
        wrong = next((each for each in truths if each and truth and each.casefold() != truth.casefold()), "")
        return self._say_truncated(f" {' '.join(_GUESSES)}", truth, f" {f'{wrong} {_LAST}'.strip()}")

    async def _copying_agent(self, request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        """Calls the first tools once each with example arguments, then repeats the end of the prompt and of the rest."""
        names = [*self._worker.context.tools][:_TURNS]  # an environment's are acts, which may be right by chance
        if turn < len(names):
            arguments = example_arguments(self._worker.context, names[turn])
            return await self._worker.call_ids(names[turn], arguments) or self._worker.say("")
        asked, decode = len(self._rows[row_number(request_id)]["raw_prompt_ids"]), self._worker.tokenizer.decode
        told = prompt_ids[: len(prompt_ids) - self._answer_begins]  # so that its end is what was told last
        parts = [decode(ids, skip_special_tokens=True) for ids in (told[:asked], told[asked:])]
        # a copied call must not be parsed as a call
        copied = [self._worker.say(re.sub(r'[<>"|`\[\]]', " ", part)) for part in parts]
        return [*copied[0][-self._budget : -1], *copied[1][-self._budget :]]

    async def _random_agent(self, request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        """Mostly calls tools, with arguments that are valid and differ between trajectories, odd, or missing; then answers
        nonsense."""
        draw = random.Random(f"{self._seed}/{row_number(request_id)}/{turn}")
        words = " ".join(draw.choices(_NONSENSE, k=draw.randint(1, 4)))
        if turn >= _TURNS or not self._tools or draw.random() < 0.1:
            return self._say_truncated(words)
        name = draw.choice([*self._tools])
        arguments = self._varied_arguments(name, row_number(request_id) + (1 + len(self._rows)) * turn)
        for key in [*arguments]:
            if (chance := draw.random()) < 0.3:
                arguments[key] = draw.choice(_ODD)
            elif chance < 0.4:
                del arguments[key]
        ids = await self._worker.call_ids(name, arguments)
        return self._say_truncated(words) if ids is None else ids

    async def _acting_agent(self, request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        """The random agent; without tools one that also says what tells the rows of an environment apart."""
        if self._tools:
            return await self._random_agent(request_id, prompt_ids, turn)
        return self._say_truncated(random.Random(f"{self._seed}/{row_number(request_id)}/{turn}").choice(self._words))

    async def _calling_agent(self, request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        name = next(iter(self._tools))
        ids = await self._worker.call_ids(name, example_arguments(self._worker.context, name)) if turn == 0 else None
        return ids or self._worker.say("")

    def _varied_arguments(self, name: str, number: int) -> dict[str, Any]:
        """Returns valid arguments that differ for each `number`, as far as the schema allows."""
        runtime, arguments = ToolRuntime.of(self._tools[name]), self._arguments(name, 0)
        for key, value in self._arguments(name, number).items():
            varied = {**arguments, key: value}
            with contextlib.suppress(ArgumentError):
                runtime.read(FunctionCall(name=name, arguments=json.dumps(varied)), None)
                arguments = varied
        return arguments

    def _arguments(self, name: str, number: int) -> dict[str, Any]:
        """The schema's example `number`; where prompts show calls, each second one is theirs: as it stands, later with other
        numbers."""
        made, half = example_arguments(self._worker.context, name, number), number // 2
        if number % 2 or not (shown := self._shown.get(name)):
            return made
        given, more = shown[half % len(shown)], half // len(shown)
        return {**made, **{key: _with_other_numbers(value, more) for key, value in given.items()}}

    def _play(self, script: Script, rows: Sequence[int] | None = None) -> list[Rollout]:
        """Plays rows concurrently; returns their rollouts in row order. A number past the last row is the first one, once
        more, with its seed, as of another rollout of its prompt."""
        numbers = range(len(self._rows)) if rows is None else rows
        groups = [n % len(self._rows) for n in numbers]
        played, first = [self._rows[group] for group in groups], numbers[0]
        rollouts = rollouts_of(self._worker.roll_out(played, script, seed=self._seed, first=first, groups=groups))
        self._records += tool_calls_of(rollouts)
        return rollouts

    # -- what must not be paid -----------------------------------------------------------------------------------

    @check("environment", "empty agent")
    def _test_empty(self) -> Result:
        return self._unpaid(lambda *_: self._worker.say(""), "return 0 without an answer")

    @check("environment", "cut agent")
    def _test_cut(self) -> Result:
        if self._worker.context.environment is None or self._worker.scorer is not None:
            return
        endless = self._worker.say(" ".join(_NONSENSE))[:-1] * (1 + self._worker.options.rollout.response_length)
        yield from self._unpaid(lambda *_: endless, "return 0 without an action: step never sees a turn that is cut")

    @check("environment", "copying agent")
    def _test_copying(self) -> Result:
        return self._unpaid(self._copying_agent, _COPIED)

    @check("environment", "guessing agent")
    def _test_guessing(self) -> Result:
        return self._unpaid(self._guessing_agent, _GUESSED)

    def _unpaid(self, script: Script, fix: str) -> Result:
        rollouts = self._play(script)
        yield from self._dropped(rollouts)
        totals = self._totals(rollouts)
        paid = {number: total for number, total in totals.items() if total > _DUST}
        for number, total in [*paid.items()][:1]:
            more = f", and in {plural(len(paid) - 1, 'other')}" if len(paid) > 1 else ""
            yield error(f"it earns {total:g} in row {number}{more}", f"let {self._payer(rollouts[number])} {fix}")
        yield f"earns at most {max(totals.values(), default=0.0):g}"

    def _payer(self, rollout: Rollout) -> str:
        """Names the code that rewarded a trajectory, for advice."""
        assert rollout.trajectory is not None
        rewards = rollout.trajectory.rewards
        if (rewards.score or 0.0) > 0 and self._worker.scorer is not None:
            return advice.scorer(self._worker.options.custom_reward_function)
        paying = [self._code.get(name, self._environment) for name, value in rewards.final.items() if value > 0]
        return f"calc_reward of {paying[0]}" if paying else self._environment

    def _totals(self, rollouts: Sequence[Rollout], steps: bool = False) -> dict[int, float]:
        """Returns row → reward of rollouts that were not dropped. Tools' step rewards count only with `steps`, since a tool
        may legitimately reward a call."""
        found, weight = {}, self._worker.options.reward_model.tool_reward_weight
        for number, rollout in enumerate(rollouts):
            total = self._worker.total(rollout)
            if rollout.trajectory is not None and total is not None:
                paid = sum(value for _, source, value in rollout.trajectory.rewards.steps if source in self._tools)
                found[number] = total if steps else total - weight * paid
        return found

    def _dropped(self, rollouts: Sequence[Rollout]) -> Result:
        lost = [each for each in rollouts if each.trajectory is None]
        if lost:
            line = f"{len(lost)} of {len(rollouts)} trajectories were dropped: {lost[0].cause or lost[0].dropped}"
            code = advice.scorer(self._worker.options.custom_reward_function) if "scoring: " in line else self._owners
            place = place_in(line)
            yield EtudeError(line, fix=f"{place and f'mend {place}; '}a failure drops the trajectory: see {code}")

    @check("environment", "random agent")
    def _test_random(self) -> Result:
        rollouts = self._play(self._random_agent)
        yield from self._dropped(rollouts)
        records = tool_calls_of(rollouts)
        for name, call in {call.name: call for call in records if call.error == "exception"}.items():
            fix = f"let {self._code[name]} check the argument, and raise ToolError(text): the model reads the text"
            yield warning(f"'{name}' raises on {call.arguments[:120]}: {call.response[:160]}", fix)
        paid = [total for total in self._totals(rollouts, steps=True).values() if total > _DUST]
        # By acting a row may be won by chance: calls that all pay are not.
        acts = len(self._tools) > len(self._worker.context.tools)
        if paid and (not acts or all(call.reward > 0 for call in records if call.error is None)):
            best = max((each for each in rollouts if each.trajectory), key=lambda each: self._worker.total(each) or 0.0)
            steps = {source for each in rollouts if each.trajectory for _, source, _ in each.trajectory.rewards.steps}
            payers = [code for name, code in self._code.items() if name in steps] or [self._payer(best)]
            yield warning(
                f"nonsense earns up to {max(paid):g} in {len(paid)} of {len(rollouts)} rows: {_earned(best)}",
                f"let {', '.join(payers)} pay for what was achieved: a reward for each call, or for its form, is what a "
                "policy learns to collect",
            )
        yield (
            f"{len(records)} calls, {sum(call.error is not None for call in records)} of them refused or corrected"
            + (f"; acting at random is paid in {len(paid)} of {len(rollouts)} rows" if acts else "")
        )

    @check("environment", "ground truth")
    def _test_truth_hidden(self) -> Result:
        given = [raw_truth(row) for row in self._rows]
        truths = [each.strip() if isinstance(each, str) else "" for each in given]
        if not any(truths):
            yield skipped("not known: no row has a text as reward_model.ground_truth")
            return
        prompts = [str(row["full_prompts"]) for row in self._rows]
        told = [n for n, truth in enumerate(truths) if len(truth) > 3 and truth in prompts[n]]
        # A shorter one may stand in a prompt by chance, but not each in its own.
        words = [
            len(each) > 1 and re.search(rf"(?<!\w){re.escape(each)}(?!\w)", prompts[n]) for n, each in enumerate(truths)
        ]
        if told or (all(words) and len(set(truths)) > 2):
            number = told[0] if told else 0
            line = f"row {number}: the prompt holds the ground truth, {truths[number][:80]!r}"
            yield warning(line, "leave it out of the prompt in data.train_files, unless it is a choice")
            return
        yield f"not in {'all' if any(words) else 'the'} prompts of {len(self._rows)} rows"

    # -- what trajectories leave to each other -------------------------------------------------------------------

    @check("environment", "determinism")
    def _test_determinism(self) -> Result:
        self._first, again = (
            [trace_of(self._play(self._acting_agent, [number])[0]) for number in self._isolated] for _ in range(2)
        )
        self._repeats = self._first == again
        if not self._repeats:
            number = next(n for n, (one, two) in enumerate(zip(self._first, again)) if one != two)
            differs = difference_of(self._first[number], again[number])
            yield warning(
                f"row {number % len(self._rows)}: the same calls were answered differently: {differs}",
                "seed randomness from the row's create_kwargs, or from reset(seed=…), and keep state under the instance "
                "id; what asks the world (a search, a clock) may differ",
            )
        yield "the same seed gives the same trajectories"

    @check("environment", "isolation")
    def _test_isolation(self) -> Result:
        if not self._repeats:
            yield skipped("not known: a trajectory does not repeat even alone")
            return
        rollouts = self._play(self._acting_agent, self._isolated)
        for number, (one, two) in enumerate(zip(self._first, map(trace_of, rollouts))):
            if one != two:
                fix = f"keep what belongs to a trajectory under its instance id, not on {self._owners} (see `StatefulTool`)"
                if self._worker.context.environment:
                    fix = f"set all state of {self._owners} in reset, on self: what its class has is every session's"
                yield error(f"row {number % len(self._rows)} sees the others: {difference_of(one, two)}", fix)
                return
        said = {
            name: {each.response for each in self._records if each.name == name and not each.error}
            for name in self._tools
        }
        alike = [name for name, answers in said.items() if len(answers) < 2]
        if not self._tools and len(replies_of(rollouts)) < 2:
            yield skipped("not known: all that was said got one answer; give rows of different state")
            return
        if alike and len(alike) == len(self._tools):
            why = "all calls got one answer" if any(said.values()) else "no call was answered"
            yield skipped(
                f"not known: {why}; show calls that it answers in the rows' prompts, or give the parameters examples "
                "(`examples` in tool_schema; in a function's hints, Annotated[str, Field(examples=[…])]), and rows of "
                "different state, that differ in it"
            )
            return
        unknown = f"; not known of {', '.join(alike)}, which gave no two answers" if alike else ""
        yield f"trajectories that run together answer as each does alone{unknown}"

    @check("environment", "leaks")
    def _test_leaks(self) -> Result:
        self._play(self._random_agent)  # warm-up: resources that are opened once and kept are not leaks
        before = self._left_behind()
        for _ in range(_ROUNDS):
            self._play(self._random_agent)
        fixes = {
            "processes": "end them, and wait for them,",
            "files": "close files, sockets and sessions",
            "threads": "share one pool, or join them",
            "tasks": "cancel and await them",
        }
        played = _ROUNDS * len(self._rows)
        for kind, count in self._left_behind().items():
            if (more := count - before[kind]) >= played / 2:
                fix = f"{fixes[kind]} in release (close) of {self._owners}"
                yield error(f"{more} more {kind} after {played} trajectories", fix)
        yield f"nothing is left of {played} trajectories"

    def _left_behind(self) -> dict[str, int]:
        me = psutil.Process()
        return {
            "processes": len(me.children(recursive=True)),
            "files": me.num_fds(),
            "threads": sum(not thread.name.startswith(_OURS) for thread in threading.enumerate()),
            "tasks": len(asyncio.all_tasks(self._worker._loop)),
        }

    # -- time, and calls that do not end -------------------------------------------------------------------------

    @check("environment", "time")
    def _test_times(self) -> Result:
        """Checks that calls stay below their timeout and do not block the event loop."""
        for name in {call.name for call in self._records if call.blocked_loop}:
            line = f"'{name}' blocks the event loop: all other trajectories wait for it"
            yield error(line, f"await what {self._code[name]} waits for, or use asyncio.to_thread")
        for name, tool in self._tools.items():
            slowest = max((call.seconds for call in self._records if call.name == name), default=0.0)
            if slowest > (limit := ToolRuntime.of(tool).policy.timeout) / 2:
                where = advice.tool_file(self._worker.options.rollout.multi_turn, name)
                line = f"'{name}' took {slowest:.2f} s of the {limit:g} s that it has"
                yield warning(line, f"raise config.timeout of '{name}' in {where}")
        slowest = max((call.seconds for call in self._records), default=0.0)
        yield f"{len(self._records)} calls, the slowest took {slowest:.3f} s"

    @check("environment", "cancelled call")
    def _test_cancelled_call(self) -> Result:
        """Checks that tools are released when a rollout is cancelled during a call."""
        if not self._tools:
            yield "no tools"
            return
        before = self._spy.calls.copy()

        async def cancel_in_a_call() -> None:
            self._spy.executing.clear()
            playing = asyncio.ensure_future(self._worker.play([self._rows[0]], self._calling_agent, self._seed))
            waiting = asyncio.ensure_future(self._spy.executing.wait())
            await asyncio.wait({playing, waiting}, return_when=asyncio.FIRST_COMPLETED)
            for task in (playing, waiting):
                task.cancel()
            await asyncio.gather(playing, waiting, return_exceptions=True)

        with self._spy.hanging():
            self._worker._run(cancel_in_a_call())
        yield from self._released_since(before)

    @check("environment", "late call")
    def _test_late_call(self) -> Result:
        """Checks that a call that times out is not answered, and that tools are released."""
        if not self._tools:
            yield "no tools"
            return
        before, kept = self._spy.calls.copy(), {}
        for tool in self._tools.values():
            runtime = ToolRuntime.of(tool)
            kept[runtime] = runtime.policy
            runtime.policy = runtime.policy.model_copy(update={"timeout": 0.2, "max_retries": 0})
        try:
            with self._spy.hanging():
                rollouts = self._play(self._calling_agent, [0])
        finally:
            for runtime, policy in kept.items():
                runtime.policy = policy
        if any(call.error is None for call in tool_calls_of(rollouts)):
            fix = f"let a late call of {self._owners} raise (catch no CancelledError): it is retried,"
            yield error("a call that never ended was answered", f"{fix} not scored as wrong")
        yield from self._released_since(before)

    def _released_since(self, before: Counter[str]) -> Result:
        since = self._spy.calls - before
        for name, tool in self._tools.items():
            begun, ended = since[f"{name}.create"], since[f"{name}.release"]
            if overrides(tool, "release") and ended < begun:
                fix = f"let release of {self._code[name]} succeed in every state, also during a call: pop(instance_id, None)"
                yield error(f"'{name}': {begun} created, {ended} released", fix)
        yield "what was created is released"

    @check("environment", "teardown")
    def _test_balance(self) -> Result:
        for name, begun, ended in self._spy.unbalanced():
            what = f"release of {self._code[name]}" if name in self._code else f"close of {self._environment}"
            line = f"'{name}': {begun} trajectories begun, {ended} ended"
            yield error(line, f"let {what} succeed in every state")


def _with_other_numbers(value: Any, more: int) -> Any:
    if isinstance(value, str):
        return re.sub(r"\d+", lambda found: str(int(found[0]) + more), value)
    return value + more if type(value) in (int, float) else value


def _earned(rollout: Rollout) -> str:
    """What each part of a trajectory's reward was paid for."""
    assert rollout.trajectory is not None
    rewards, said = rollout.trajectory.rewards, str(rollout.trajectory.messages[-1].get("content"))
    calls = [f"{value:g} for a call of {source}" for _, source, value in rewards.steps if value]
    ends = [f"{value:g} by calc_reward of {tool}" for tool, value in rewards.final.items() if value]
    return ", ".join([*calls, *ends, *([f"score {rewards.score:g} for {said!r:.60}"] if rewards.score else [])])


_COPIED = "score what the model did, not what stands anywhere in its answer; keep the truth out of prompts and schemas"
_GUESSED = "read one answer, such as the last number or what stands in \\boxed{}, not any that is mentioned"


def _words_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The short values of the rows' tasks, as often as there are other words: what an environment may be told."""
    tasks = (task_of(row) for row in rows)
    values = {str(each) for task in tasks for each in task.values() if isinstance(each, str | int | float)}
    words = sorted(each for each in values if 0 < len(each) <= _SHORT)
    return words * (1 + (len(_GUESSES) + len(_NONSENSE)) // max(1, len(words)))


def replies_of(rollouts: Sequence[Rollout]) -> set[object]:
    """The different answers to turns: what the model was told, and what it earned."""
    found: set[object] = set()
    for trajectory in (each.trajectory for each in rollouts if each.trajectory):
        roles = [message["role"] for message in trajectory.messages]
        later = trajectory.messages[roles.index("assistant") :] if "assistant" in roles else []
        found |= {str(message.get("content")) for message in later if message["role"] != "assistant"}
        found |= {value for *_, value in trajectory.rewards.steps if value}
    return found


def trace_of(rollout: Rollout) -> object:
    """Everything that must be reproducible in a trajectory: calls, messages, rewards and stop reason."""
    trajectory = rollout.trajectory
    if trajectory is None:
        return rollout.cause, str(rollout.dropped)
    calls = [(call.name, call.arguments, call.response, call.error, call.reward) for call in trajectory.tool_calls]
    said = [(message["role"], str(message.get("content"))) for message in trajectory.messages]
    rewards = trajectory.rewards
    return (
        calls,
        said,
        (tuple(rewards.steps), tuple(rewards.final.items()), rewards.score),
        trajectory.stop_reason.value,
    )


def difference_of(one: object, two: object) -> str:
    """Describes the first pair of nested elements that differ."""
    while isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)) and len(one) == len(two):
        pair = next(((a, b) for a, b in zip(one, two) if a != b), None)
        if pair is None:
            break
        one, two = pair
    return f"{str(one)[:150]!r} and {str(two)[:150]!r}"
