"""Trial rollouts of a run's own rows, with a script in place of the model: each tool is called, and the ground truth
answered; calls without an answer must not be paid as well; conversations must not see each other.

Invariant: nothing but the engine differs from a run; tools get the arguments that their schemas give as examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etude.checks.findings import Findings, Level, Result, error, warning
from etude.data import active_tools
from etude.environments import EnvironmentEntry
from etude.errors import EtudeError, user_file
from etude.testing import advice
from etude.testing.conformance import Trial
from etude.testing.environment import difference_of, trace_of
from etude.testing.payment import reference_answer
from etude.testing.trial import example_arguments, rollouts_of, row_number
from etude.trainer.columns import reward_components
from etude.trajectory import Provenance, Rollout, Trajectory

if TYPE_CHECKING:
    from etude.testing.run import Inspection

_ROLLOUT = "actor_rollout_ref.rollout"
_CALLS = 3  # of each tool in a conversation without an answer
_ROWS = 3
_SEARCHED = 100  # rows, for two that give a tool different state
_SHORT = 64  # tokens (characters): an answer of a tool that fills a larger limit may be meant to be cut
_ENDINGS = {
    "response_length": "raise data.max_response_length",
    "tool_response_overflow": "raise data.max_response_length, or lower the tool's config.max_response_chars",
    "prompt_too_long": "raise data.max_prompt_length",
    "context_length": f"raise {_ROLLOUT}.max_model_len",
    "turn_length": f"raise {_ROLLOUT}.multi_turn.max_turn_tokens",
    "trajectory_length": f"raise {_ROLLOUT}.multi_turn.max_trajectory_tokens",
    "time_limit": f"raise {_ROLLOUT}.multi_turn.max_seconds",
    "context_refused": "take a chat template that writes the tools' answers; `etude chat check MODEL` says what it does",
    "max_assistant_turns": f"raise {_ROLLOUT}.multi_turn.max_assistant_turns to 2 or more",
    "max_user_turns": f"raise {_ROLLOUT}.multi_turn.max_user_turns",
}
"""Stop reasons that mean the model never saw the tool's response → advice."""


def roll_out(run: Inspection) -> Result:
    """Rolls out one trajectory per tool (a call, then an answer), or without tools a single answer."""
    worker, tools = run.worker, [*run.worker.context.tools]
    calls = {name: example_arguments(worker.context, name) for name in tools}
    written = {name: worker.call(name, arguments) for name, arguments in calls.items()}
    if None in written.values():
        worker.read_plain_calls()
        written = {name: worker.call(name, arguments) for name, arguments in calls.items()}
    rows = [_row_for(run, name) or run.train[0] for name in tools] or [run.train[0]]

    def play(request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        row = row_number(request_id)
        ids = written[tools[row]] if turn == 0 and tools else None
        return ids or worker.say(reference_answer(run, rows[row]))

    rollouts = rollouts_of(worker.roll_out(rows, play))
    wrong = [*_try_stops(run, written)]
    for name, row, rollout in zip(tools or [""], rows, rollouts):
        if rollout.trajectory is None:
            _dropped(run, name, calls.get(name, {}), rollout)
        else:
            wrong += _judge(run, name, calls.get(name, {}), row, rollout.trajectory)
    if not wrong and all(each.trajectory for each in rollouts):
        wrong += _components(run, rollouts)
        wrong += _try_unanswered(run, tools, written, rows, rollouts)
        for name in tools:
            wrong += _try_isolation(run, name, written[name])
        wrong += _try_worked_examples(run)
        wrong += _try_environments(run)
    yield from wrong
    scores = ", ".join(f"{worker.total(each) or 0:g}" for each in rollouts)
    records = [call for each in rollouts if each.trajectory for call in each.trajectory.tool_calls]
    refused = [f"{call.name} with an error: {call.response[:100]}" for call in records if call.error == "tool"]
    how = f" ({'; '.join(refused)})" if refused else ""
    yield f"{f'every tool was called and answered{how}' if tools else 'an answer was rolled out'}; rewards {scores}"


def _try_stops(run: Inspection, written: Mapping[str, list[int] | None]) -> Result:
    """Whether a stop string ends a turn within a call."""
    for name, ids in written.items():
        text = run.tokenizer.decode((ids or [])[:-1]).rstrip()
        for stop in run.options.rollout.stop or ():
            if stop in text and not text.endswith(stop):
                line = f"{_ROLLOUT}.stop: {stop!r} ends the model's turn within a call of '{name}'"
                yield warning(line, f"leave it out of {_ROLLOUT}.stop, or name what a call ends with")


def _components(run: Inspection, rollouts: Sequence[Rollout]) -> Result:
    keys = run.options.algorithm.gdpo_reward_keys
    if (estimator := run.options.algorithm.estimator) is None or "reward_components" not in estimator.needs:
        return
    known = reward_components([*rollouts])
    for key in keys:
        if key not in known or bool(known[key].isnan().any()):
            line = f"algorithm.gdpo_reward_keys: a rollout was scored without '{key}'; it had {', '.join(known)}"
            yield error(line, f"let {advice.scorer(run.custom)} return a dict with '{key}', or name what it returns")


def _try_unanswered(
    run: Inspection,
    tools: Sequence[str],
    written: Mapping[str, list[int] | None],
    rows: Sequence[dict[str, Any]],
    right: Sequence[Rollout],
) -> Result:
    """Whether calls that lead to no answer are paid as much as the ground truth is, or an environment pays for silence."""
    worker, environment = run.worker, run.worker.context.environment
    if not tools and environment is not None:
        rows = [run.train[number] for number in range(min(len(run.train), _ROWS))]

    def play(request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        ids = written[tools[row_number(request_id)]] if tools and turn < _CALLS else None
        return ids or worker.say("")

    rollouts = rollouts_of(worker.roll_out(rows, play))
    totals = [worker.total(each) or 0.0 for each in rollouts]
    if not tools and environment is not None and min(totals) >= 1.0:
        kinds = {
            each.trajectory.extra_fields.get("environment", {}).get("name") for each in rollouts if each.trajectory
        }
        code = next((_code_of(environment.entries[name]) for name in kinds if name in environment.entries), "")
        line = f"an answer that says nothing earns {min(totals):g} in {len(rows)} of {len(rows)} rows"
        yield warning(line, f"let score() of {code or 'the environment in env'} pay for what was achieved")
    for name, row, total, best in zip(tools, rows, totals, [worker.total(each) or 0.0 for each in right]):
        scored = run.options.reward_model.score_weight * _score_of(rollouts[tools.index(name)])
        if row.get("data_source") in run.reference and total > max(scored, 0.0) and total >= best:
            code = advice.code_of(worker.context.tools[name], run.talks)
            line = f"tool '{name}': {_CALLS} calls and no answer earn {total:g}, a call and the ground truth {best:g}"
            yield warning(line, f"let {code} pay for what was achieved, or lower reward_model.tool_reward_weight")


def _score_of(rollout: Rollout) -> float:
    return (rollout.trajectory.rewards.score or 0.0) if rollout.trajectory else 0.0


def _try_isolation(run: Inspection, tool: str, call: list[int] | None) -> Result:
    """Whether two conversations whose rows give the tool different state are answered together as each is alone."""
    rows: list[dict[str, Any]] = []
    for number in range(min(len(run.train), _SEARCHED)):
        given = ((row := run.train[number]).get("tools_kwargs") or {}).get(tool)
        if given and all(given != other["tools_kwargs"][tool] for other in rows):
            rows.append(row)

    def play(request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        return (call if turn == 0 else None) or run.worker.say("")

    def traces(rows: Sequence[dict[str, Any]], first: int = 0) -> list[object]:
        return [trace_of(each) for each in rollouts_of(run.worker.roll_out(rows, play, first=first))]

    if len(rows := rows[:2]) < 2:
        return
    alone = [traces([row], number)[0] for number, row in enumerate(rows)]
    for number, (one, two) in enumerate(zip(alone, traces(rows))):
        if one != two and traces([rows[number]], number)[0] == one:
            code = advice.code_of(run.worker.context.tools[tool], run.talks)
            line = f"tool '{tool}': conversations see each other's state: {difference_of(one, two)}"
            yield error(
                line, f"keep what belongs to a conversation under its instance_id in {code} (see `StatefulTool`)"
            )
            return


def _try_worked_examples(run: Inspection) -> Result:
    """Whether a tool answers the call of the first row's worked example as that row shows, where rows give it no state."""
    row, worker, where = run.train[0], run.worker, (*run.train.locations, "the first row")[0]
    for asked, shown in zip(row["raw_prompt"], row["raw_prompt"][1:]):
        text, said = asked.get("content"), shown.get("content")
        if (asked.get("role"), shown.get("role")) != ("assistant", "tool") or not isinstance(text, str):
            continue
        calls = worker.context.parser.parse(text).calls
        if (
            len(calls) != 1
            or calls[0].name not in worker.context.tools
            or calls[0].name in (row.get("tools_kwargs") or {})
        ):
            continue

        def play(request_id: str, prompt_ids: list[int], turn: int, text: str = text) -> list[int]:
            return worker.say(text if turn == 0 else "")

        records = [
            each.trajectory.tool_calls for each in rollouts_of(worker.roll_out([row, row], play)) if each.trajectory
        ]
        answers = [each[0].response for each in records if each and each[0].error is None]
        if len(answers) == 2 and answers[0] == answers[1] != said:
            call = f"{calls[0].name} to {calls[0].arguments:.100}"
            line = f"{where}: the worked example shows {said!r:.100} as the answer of {call}; it answers {answers[0]!r:.100}"
            yield warning(line, f"write what the tool answers into the prompts of {run.rows_file}")


def _try_environments(run: Inspection) -> Result:
    """Whether a seed has one start, and a session begins without what an earlier one left."""
    for entry in run.environments.entries.values() if run.environments else ():
        if entry.drives:
            continue
        code = _code_of(entry) or f"the environment {entry.name}"
        found = Findings().run_stage("conformance", Trial(entry), fix=f"mend {code}", only=("same seed", "fresh state"))
        for each in found.all:
            if each.level is Level.ERROR:
                yield error(f"environment '{entry.name}': {each.subject}: {each.message}", f"in {code}: {each.fix}")


def _code_of(entry: EnvironmentEntry) -> str:
    """The user's file with the environment's class; empty for one of the package's."""
    try:
        return user_file(inspect.getsourcefile(entry.kind) or "") or ""
    except TypeError:
        return ""


def _row_for(run: Inspection, tool: str) -> dict[str, Any] | None:
    """Returns a row that may use the tool: the first with `tools_kwargs` for it, else the first; None if no row may."""
    usable: dict[str, Any] | None = None
    for number in range(min(len(run.train), run.rows)):
        row = run.train[number]
        if tool in active_tools(row, list(run.schemas or {})):
            if tool in (row.get("tools_kwargs") or {}):
                return row
            usable = usable or row
    return usable


def _dropped(run: Inspection, tool: str, arguments: Mapping[str, Any], rollout: Rollout) -> None:
    """Adds why a rollout was dropped, unless another check has found the same."""
    where, ending = f"tool '{tool}'" if tool else "an answer", rollout.dropped.value if rollout.dropped else ""
    alone = advice.try_tool(run.talks, tool, arguments) if tool else run.try_scorer
    line = f"{where}: {(rollout.cause or ending or 'dropped').removeprefix(f'{where}: ')}"
    if tool and "no answer within" in line:
        alone = f"raise config.timeout of '{tool}' in {advice.tool_file(run.talks, tool)}, or make it faster; {alone}"
    run.findings.add_error("rollout", EtudeError(line), _ENDINGS.get(ending, alone))


def _judge(
    run: Inspection, tool: str, arguments: Mapping[str, Any], row: Mapping[str, Any], trajectory: Trajectory
) -> Result:
    """Yields what is wrong with a trajectory in which `tool` was to be called, or a single answer given."""
    where = f"tool '{tool}'" if tool else "an answer"
    calls = [call for call in trajectory.tool_calls if tool and call.name == tool]  # a malformed call has no name
    ending = trajectory.stop_reason.value
    if tool and not calls:
        other = "see whether the row's loop runs tools: agent_name, and extra_info.tool_selection"
        if (row.get("agent_name") or run.options.rollout.agent.default_agent_loop) == "single_turn_agent":
            key = "agent_name" if row.get("agent_name") else f"{_ROLLOUT}.agent.default_agent_loop"
            other = f"single_turn_agent runs no tools: set {key} to tool_agent, or leave it out"
        yield warning(f"{where}: a call of it was not run ({ending})", _ENDINGS.get(ending, other))
    for call in calls[:1]:
        shown, answer = str(dict(arguments))[:200], call.response[:200]
        code = advice.code_of(run.worker.context.tools[call.name], run.talks)
        if call.error == "exception":
            fix = f"mend {code}; for a mistake of the model's raise ToolError(text), which is told to it"
            yield warning(f"{where} raised on {shown}: {answer}", fix)
        elif call.error not in (None, "tool"):
            fix = f"give its schema in {advice.tool_file(run.talks, call.name)} examples, or defaults, that are valid"
            yield warning(f"{where} refused {shown} ({call.error}): {answer}", fix)
        length, longest = len(run.worker.say(call.response)), run.talks.max_tool_response_length
        if run.talks.tool_response_length_unit != "tokens":
            length = len(call.response)
        if call.error is None and longest < _SHORT and length >= longest - 1:
            line = f"{where}: its answer is cut to {answer!r} by multi_turn.max_tool_response_length={longest}"
            yield warning(line, f"raise {_ROLLOUT}.multi_turn.max_tool_response_length")
        if call.blocked_loop:
            line = f"{where} blocks the event loop: all other trajectories wait for it"
            yield warning(line, f"await what {code} waits for, or use asyncio.to_thread")
    if calls and (remedy := _ENDINGS.get(ending)):
        yield warning(f"{where}: the model does not see its answer ({ending})", remedy)
    exact = trajectory.prompt_ids + [token for part in trajectory.segments for token in part.token_ids]
    sampled = [int(part.provenance is Provenance.SAMPLED) for part in trajectory.segments for _ in part.token_ids]
    if trajectory.context_ids() != exact or trajectory.response_mask != sampled:
        line = f"{where}: what would be trained on is not what the model saw"
        yield error(line, "let `run` of the row's agent_name append to its trajectory only")
