"""`check_environment`: conformance test of one environment, without a model: what `EnvironmentSession` promises of it, and
what training needs of it.

Invariant: everything is played through sessions, as a run plays it; the environment is really called, also with nonsense.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, takewhile
from types import SimpleNamespace
from typing import Any

from etude.checks.findings import Findings, Result, check, error, warning
from etude.environments import Environment, EnvironmentEntry, EnvironmentSession
from etude.environments.base import tool_methods
from etude.environments.loader import load_environments
from etude.environments.tasks import task_rows
from etude.errors import EtudeError, InfrastructureError, ToolError
from etude.options import EnvironmentOptions
from etude.schemas import example_of

_TOGETHER = 16  # sessions of one seed at once
_TURNS = 12  # of nonsense
_NONSENSE = ("", "zorp quibble flum", "1", "[0]", "left", "\u202enaïve\x00", "x" * 2000)
_REPEATED = 200  # characters of an earlier observation that a later one should not have again


def check_environment(options: EnvironmentOptions) -> Findings:
    """Checks the environment that an entry of `env` opens; its plug-in is already imported."""
    findings = Findings()
    opened: list[EnvironmentEntry] = []

    def open_entry() -> Iterator[str]:
        environments = load_environments([options])
        assert environments is not None
        opened.extend(environments.entries.values())
        yield f"{options.id} {opened[0].version}".strip()

    findings.run("id", open_entry, "correct the id or its args: `etude env list`")
    if not findings.failed and opened[0].drives:
        findings.run("conformance", lambda: iter(["it drives itself: a run plays it"]), "report this: it is a bug")
    elif not findings.failed:
        code = "where the model is wrong, raise InvalidAction(text); where the environment is, "
        code += f"mend {options.id}, or leave it out of env"
        findings.run_stage("conformance", Trial(opened[0]), fix=code)
    return findings


async def _execute(session: EnvironmentSession, name: str, arguments: Mapping[str, Any]) -> Any:
    """Calls a tool of an environment as an agent loop does."""
    return await session.tools[name].execute("check", dict(arguments), agent_data=SimpleNamespace(environment=session))


class Trial:
    """Plays sessions of an entry, and counts those that are open."""

    def __init__(self, entry: EnvironmentEntry) -> None:
        self.most = self.closed = self.made = 0
        self.entry = replace(entry, make=self._make, kind=entry.kind)
        self._inner = entry.make
        self._tasks = [*islice(task_rows(entry, "train", 3), 3)]
        self.starts: list[Any] = []

    def _make(self) -> Environment:
        made = self._inner()
        self.made += 1
        self.most = max(self.most, self.made - self.closed)
        close = made.close

        def closed() -> Any:
            self.closed += 1
            return close()

        made.close = closed  # type: ignore[method-assign]
        return made

    def session(self, number: int = 0) -> EnvironmentSession:
        """A session of task `number`."""
        row = {**self._tasks[number % len(self._tasks)], "group_seed": number % len(self._tasks)}
        return EnvironmentSession(self.entry, row)

    async def start(self, number: int = 0) -> Any:
        """What `reset` observes."""
        async with self.session(number) as session:
            return session.observation, {name: tool.tool_schema.to_openai() for name, tool in session.tools.items()}

    async def play(self, act: Callable[[EnvironmentSession, int], Any], number: int = 0, turns: int = _TURNS) -> float:
        """Plays a session until it is over or has had its turns; returns its reward."""
        total = 0.0
        async with self.session(number) as session:
            for turn in range(turns):
                if session.done:
                    break
                step, _ = await act(session, turn)
                total += step.reward or 0.0
            score, _ = await session.score(completed=session.done)
        return total + (score or 0.0)

    # -- what is checked -----------------------------------------------------------------------------------------

    @check("conformance", "same seed")
    def _seeds(self) -> Result:
        self.starts = [asyncio.run(self.start(number)) for number in range(len(self._tasks))]
        first = self.starts[0]

        async def together() -> list[Any]:
            return await asyncio.gather(*(self.start() for _ in range(_TOGETHER)))

        for found in [asyncio.run(self.start()), *asyncio.run(together())]:
            if found != first:
                line = f"one seed has two starts: {str(first[0])[:100]!r} and {str(found[0])[:100]!r}"
                yield error(line, "draw from the seed of reset alone (`GlobalRandom` lends the global generators)")
                return
        if len(self.starts) > 1 and all(start == first for start in self.starts):
            yield warning("all tasks have one start", "let reset draw from its seed, unless this is meant")
        yield f"one start, also for {_TOGETHER} sessions at once"

    @check("conformance", "nonsense")
    def _nonsense(self) -> Result:
        async def act(session: EnvironmentSession, turn: int) -> Any:
            return await session.step(_NONSENSE[turn % len(_NONSENSE)])

        earned = max(asyncio.run(self.play(act, number)) for number in range(len(self._tasks)))
        if earned >= 1.0:
            yield warning(
                f"nonsense earns {earned:g}", "pay for what was achieved, unless each turn may be worth something"
            )
        yield f"nonsense earns at most {earned:g}"

    @check("conformance", "tools")
    def _tools(self) -> Result:
        earned = dict[str, float]()

        async def call(name: str, arguments: Mapping[str, Any]) -> None:
            async with self.session() as session:
                with contextlib.suppress(ToolError):  # the model is told
                    earned[f"{name} {arguments}"] = (await _execute(session, name, arguments))[1]

        schemas = self.starts[0][1] if self.starts else {}
        for name, schema in schemas.items():
            for number in range(3):
                asyncio.run(call(name, example_of(schema["function"].get("parameters") or {}, number) or {}))
        kind, own = self.entry.kind, {*tool_methods(self.entry.kind), *dir(Environment), "answer", "solve"}
        unmarked = [name for name in vars(kind) if name[0] != "_" and callable(getattr(kind, name)) and name not in own]
        if not schemas and unmarked and kind.step is Environment.step:
            yield warning(
                f"none, and no step: {', '.join(unmarked)} cannot be called", "write @tool before those that are tools"
            )
        if len(earned) > 1 and (least := min(earned.values())) > 0.0:
            yield warning(
                f"each call earns {least:g} or more, whatever its arguments",
                "pay for what was achieved, unless each turn may be worth something",
            )
        called = f"{len(schemas)} called" if schemas else "none: every turn is an action"
        more = f"; no @tool, so not for the model: {', '.join(unmarked)}"
        yield called + (more if unmarked and tool_methods(kind) else "")

    @check("conformance", "fresh state")
    def _fresh_state(self) -> Result:
        """The same calls, or the same words, in a session after another."""

        async def answers() -> list[tuple[str, str]]:
            """What a session says, and what it pays for that, one after another."""
            async with self.session() as session:
                found = []
                for name, tool in session.tools.items():
                    schema = tool.tool_schema.to_openai()["function"].get("parameters") or {}
                    for number in range(2):
                        with contextlib.suppress(ToolError):
                            given = await _execute(session, name, example_of(schema, number) or {})
                            found.append((f"{name} answers {str(given[0].text)[:100]!r}", f"{name} pays {given[1]}"))
                if not session.tools:
                    for text in takewhile(lambda _: not session.done, ("1", "[0]", "left")):
                        step, messages = await session.step(text)
                        found.append((repr(messages)[:200], f"{text!r} earns {step.reward}"))
                score, _ = await session.score(completed=session.done)
                return [*found, ("", f"the score is {score}")]

        advice = "set all state in reset, on self: what belongs to the class is every session's"
        for (said, paid), (said_next, paid_next) in zip(asyncio.run(answers()), asyncio.run(answers())):
            if said != said_next:
                line = f"sessions share their state: {said} in one session and {said_next} in the next of the same seed"
                yield error(line, advice)
                return
            if paid != paid_next:
                line = f"one session pays other than the next of the same seed: {paid}, then {paid_next}"
                yield warning(line, f"{advice}; unless a judge scores it, which may differ")
                return
        yield "a session says and pays what the one before did"

    @check("conformance", "own answer")
    def _answer(self) -> Result:
        kind: Any = self.entry.kind

        async def act(session: EnvironmentSession, turn: int) -> Any:
            environment: Any = session.environment
            if hasattr(kind, "solve"):
                await environment.solve()
            return await session.step(environment.answer() if hasattr(kind, "answer") else "Done.")

        if not hasattr(kind, "answer") and not hasattr(kind, "solve"):
            yield "there is none"
            return
        earned = [asyncio.run(self.play(act, number, 1)) for number in range(len(self._tasks))]
        if min(earned) < 0.99:
            yield warning(f"its own answers earn {min(earned):g}", "do not train on it unless other answers earn 1")
        yield "earns 1"

    @check("conformance", "history")
    def _history(self) -> Result:
        async def repeats() -> str:
            async with self.session() as session:
                seen = [str(session.observation)]
                for text in ("1", "[0]", "left"):
                    if session.done:
                        break
                    _, messages = await session.step(text)
                    shown = "".join(str(message["content"]) for message in messages)
                    if any(len(each) >= _REPEATED and each in shown for each in seen):
                        return shown
                    seen.append(shown)
            return ""

        if found := asyncio.run(repeats()):
            line = f"an observation repeats an earlier one: {found[:100]!r}"
            yield warning(line, "observe what is new: the conversation has the rest already")
        yield "observations are new"

    @check("conformance", "endings")
    def _endings(self) -> Result:
        """Finished, cut, raising, cancelled: each session is closed once, and there are never more than `limit`."""
        asyncio.run(self._end_in_every_way())
        if self.closed != self.made:
            yield error(f"{self.made} sessions begun, {self.closed} closed", "let close succeed in every state")
        if self.entry.sessions is not None and self.most > self.entry.sessions:
            yield error(f"{self.most} sessions at once, and limit is {self.entry.sessions}", "report this: it is a bug")
        yield f"{self.made} sessions, at most {self.most} at once, all closed"

    async def _end_in_every_way(self) -> None:
        async def broken() -> None:
            async with self.session():
                raise InfrastructureError("gone")

        async def cancelled() -> None:
            async with self.session():
                await asyncio.sleep(60)

        tasks = [asyncio.ensure_future(work()) for work in (broken, cancelled, self.start) for _ in range(4)]
        await asyncio.sleep(0.2)
        for task in tasks[4:8]:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, EtudeError):
                raise found

    @check("conformance", "time")
    def _time(self) -> Result:
        began, sessions = time.process_time(), 20

        async def act(session: EnvironmentSession, turn: int) -> Any:
            return await session.step("1")

        for number in range(sessions):
            asyncio.run(self.play(act, number, 3))
        yield f"{1000 * (time.process_time() - began) / sessions:.1f} ms CPU for a session of up to 3 turns"
