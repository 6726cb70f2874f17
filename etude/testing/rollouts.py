"""Trial rollouts of a run's own rows, with a script in place of the model: each tool is called, and the ground truth
answered; calls without an answer must not be paid as well; conversations must not see each other.

Invariant: nothing but the engine differs from a run; tools get the arguments that their schemas give as examples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from etude.agents.tool_messages import NOT_EXECUTED
from etude.checks.findings import Finding, Findings, Level, Result, error, warning
from etude.data import active_tools
from etude.data.rows import truth_of
from etude.errors import EtudeError
from etude.schemas import FunctionCall
from etude.testing import advice
from etude.testing.environment_check import Trial
from etude.testing.inspection import Inspection
from etude.testing.payment import reference_answer, try_after_call
from etude.testing.scripted_agents import difference_of, trace_of
from etude.testing.trial import TrialRollouts, example_arguments, tool_calls_of
from etude.trainer.columns import reward_components
from etude.trajectory import Provenance, Rollout, ToolCallRecord, Trajectory
from etude.viewer.rows import NUMBER

_ROLLOUT = "actor_rollout_ref.rollout"
_CALLS = 3  # of each tool in a conversation without an answer
_ROWS = 3
_SEARCHED = 100  # rows, for two that give a tool different state, or that ask as a worked example does
_AGAIN = 32  # conversations alike: a tool that draws by chance is not to be taken for one that shares its state
_CHANGES = re.compile(
    r"random|\b(?:rolls?|draws?|dic?e|flips?|coin|samples?|shuffles?|now|today|current|time|date|latest|live)\b",
    re.IGNORECASE,
)
"""Words of a description that say that an answer may differ from the one before."""
_FOLLOWED = 16  # rows in which a worked example is followed
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
    if plain := None in written.values():
        worker.read_plain_calls()
        written = {name: worker.call(name, arguments) for name, arguments in calls.items()}
    rows = [_row_for(run, name) or run.train[0] for name in tools] or [run.train[0]]

    said = [worker.say(reference_answer(run, row)) for row in rows]
    turns = [[*filter(None, [ids]), answer] for ids, answer in zip([written[name] for name in tools] or [None], said)]
    rollouts = worker.say_turns(rows, turns)
    wrong = [*_try_stops(run, written)]
    for name, row, rollout in zip(tools or [""], rows, rollouts):
        if rollout.trajectory is None:
            _dropped(run, name, calls.get(name, {}), rollout)
        else:
            wrong += _judge(run, name, calls.get(name, {}), row, rollout.trajectory)
    if not wrong and all(each.trajectory for each in rollouts):
        wrong += _components(run, rollouts)
        wrong += _try_unanswered(run, tools, written, rows, rollouts)
        if not wrong and len(run.train) > 1:
            wrong += _try_isolation(run, written, plain)
        wrong += _try_worked_examples(run, bool(wrong))
        wrong += _try_environments(run)
        wrong += _try_paid(run, written, rows, rollouts)
    yield from wrong
    scores = ", ".join(f"{worker.total(each) or 0:g}" for each in rollouts)
    calls_made = tool_calls_of(rollouts)
    refused = [
        f"{call.name} with an error: {call.response[:100]}"
        for call in calls_made
        if call.error == "tool" or (call.error is None and re.match(r"\s*error\s*[:!]", call.response, re.IGNORECASE))
    ]
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


def _try_paid(
    run: Inspection,
    written: Mapping[str, list[int] | None],
    rows: Sequence[dict[str, Any]],
    rollouts: Sequence[Rollout],
) -> Result:
    """Whether a scorer of the user's pays the right answer after a call; the first tool where it does not speaks for all."""
    for (name, ids), row, rollout in zip(written.items(), rows, rollouts):
        if not (run.own_scorer and ids and rollout.trajectory and row.get("data_source") in run.reference):
            continue
        call, score = run.tokenizer.decode(ids[:-1]), float(rollout.trajectory.rewards.score or 0.0)
        if found := [*try_after_call(run, row, name, call, score)]:
            yield from found
            return


def _components(run: Inspection, rollouts: Sequence[Rollout]) -> Result:
    keys = run.options.algorithm.gdpo_reward_keys
    if (estimator := run.options.algorithm.estimator) is None or "reward_components" not in estimator.needs:
        return
    known = reward_components([*rollouts])
    for key in keys:
        if key not in known or bool(known[key].isnan().any()):
            line = f"algorithm.gdpo_reward_keys: a rollout was scored without '{key}'; it had {', '.join(known)}"
            yield error(line, f"let {advice.scorer(run.custom)} return a dict with '{key}', or name what it returns")
    for source in ("step", "final"):
        if keys and source not in keys and bool(known[source].any()):
            line = f"algorithm.gdpo_reward_keys: what tools pay ({source}) counts as reward, and trains nothing"
            yield warning(line, f"name {source}, too, with its weight in algorithm.gdpo_reward_weights")


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
    silence = worker.say("")
    turns = [[*[written[name] or silence] * _CALLS, silence] for name in tools] or [[silence]] * len(rows)
    rollouts = worker.say_turns(rows, turns)
    totals = [worker.total(each) or 0.0 for each in rollouts]
    for name, first, rollout in zip(tools, right, rollouts):
        if rollout.trajectory is None:
            _dropped(run, name, example_arguments(worker.context, name), rollout)
        yield from _try_again(run, name, first, rollout)
    if not tools and environment is not None and min(totals) >= 1.0:
        kinds = {
            each.trajectory.extra_fields.get("environment", {}).get("name") for each in rollouts if each.trajectory
        }
        entries = [environment.entries[name] for name in kinds if name in environment.entries]
        code = next((advice.file_of(entry.kind) for entry in entries), "")
        line = f"an answer that says nothing earns {min(totals):g} in {len(rows)} of {len(rows)} rows"
        yield warning(line, f"let score() of {code or 'the environment in env'} pay for what was achieved")
    for name, row, total, rollout, first in zip(tools, rows, totals, rollouts, right):
        score, best = rollout.trajectory and rollout.trajectory.rewards.score, worker.total(first) or 0.0
        scored = run.options.reward_model.score_weight * (score or 0.0)
        if row.get("data_source") in run.reference and total > max(scored, 0.0) and total >= best:
            code = run.code_of(name)
            line = f"tool '{name}': {_CALLS} calls and no answer earn {total:g}, a call and the ground truth {best:g}"
            yield warning(line, f"let {code} pay for what was achieved, or lower reward_model.tool_reward_weight")


def _try_again(run: Inspection, tool: str, first: Rollout, second: Rollout) -> Result:
    """Whether a tool that answers a call refuses it in the next conversation; what it raises there is logged."""
    calls = [
        [call for call in each.trajectory.tool_calls if call.name == tool][:1]
        for each in (first, second)
        if each.trajectory
    ]
    if [[call.error for call in each] for each in calls] == [[None], ["tool"]]:
        code = run.code_of(tool)
        [answered], [refused] = calls
        line = f"tool '{tool}' answers {answered.response!r:.100}, and in the next conversation refuses the same call"
        fix = f"mend {code}: what does one conversation leave to the next?"
        yield warning(f"{line}: {refused.response:.200}", fix)


def _try_isolation(run: Inspection, calls: Mapping[str, list[int] | None], plain: bool) -> Result:
    """Whether conversations see each other's state, also what an earlier one left: tools that are loaded anew have none.
    `plain`: the run's worker reads plain calls."""
    fresh = TrialRollouts(run, run.seconds)
    if plain:
        fresh.read_plain_calls()
    try:
        for tool, call in calls.items():
            yield from _try_together(run, fresh, tool, call or [])
    finally:
        fresh.end()


def _try_together(run: Inspection, fresh: TrialRollouts, tool: str, call: list[int]) -> Result:
    """Whether two conversations whose rows give the tool different state, or that call it differently, are answered together
    as each is alone, and in `fresh`."""
    rows, calls = _rows_by_state(run, tool)[:2], [call, call]
    if len(rows) < 2:
        rows = [run.train[0], run.train[1]]
        calls[1] = run.worker.call(tool, example_arguments(run.worker.context, tool, 1)) or call
    silence, played = run.worker.say(""), count()
    turns = [[call or silence, silence] for call in calls]

    def traces(rows: Sequence[dict[str, Any]], first: int = 0, worker: TrialRollouts = run.worker) -> list[object]:
        rollouts = worker.say_turns(rows, turns[first:], first=first, label=f"trial-{next(played)}")
        return [trace_of(each) for each in rollouts]

    alone = [traces([row], number)[0] for number, row in enumerate(rows)]
    others = traces(rows)
    if others == alone:  # as they are if both see what an earlier one left
        others = [alone[0], *traces(rows[1:], 1, fresh)]
    for number, (one, two) in enumerate(zip(alone, others)):
        if one != two:
            again = (traces([rows[number]], number)[0] for _ in range(_AGAIN))
            if (other := next((each for each in again if each != one), None)) is None:
                yield _shared(run, tool, difference_of(one, two))
            else:  # their calls
                yield from _unsteady(
                    run, tool, *(each[0] if isinstance(each, tuple) else None for each in (one, other))
                )
            return


def _unsteady(run: Inspection, tool: str, said: object, told: object) -> Result:
    """A tool of the user's that answers one call in fresh conversations of one row in two ways, though its description does
    not say that it would."""
    schema = run.worker.context.tools[tool].get_openai_tool_schema().to_openai()
    described, code = schema["function"].get("description") or "", advice.own_code(run.worker.context.tools[tool])
    if not code or said == told or not isinstance(said, list) or _CHANGES.search(described):
        return
    line = f"tool '{tool}' answers one call in fresh conversations of one row differently: {difference_of(said, told)}"
    fix = f"in {code}, draw from a seed in the row's create_kwargs, and keep no state of earlier conversations; "
    yield warning(line, f"{fix}or say in the tool's description that its answer is random, or of the current time")


def _shared(run: Inspection, tool: str, difference: str) -> Finding:
    code = run.code_of(tool)
    fix = f"keep what belongs to a conversation under its instance_id in {code} (see `StatefulTool`)"
    return error(f"tool '{tool}': conversations see each other's state: {difference}", fix)


def _try_worked_examples(run: Inspection, known: bool) -> Result:
    """Whether a tool answers the call of the first row's worked example as that row shows, and whether other rows that ask
    in the same words are paid for doing as it does. `known`: what is wrong with the tools' calls was said."""
    row, worker, where = run.train[0], run.worker, (*run.train.locations, "the first row")[0]
    prompt = row["raw_prompt"]
    for at in range(1, len(prompt) - 1):
        asked, shown = prompt[at : at + 2]
        text, said = asked.get("content"), shown.get("content")
        if (asked.get("role"), shown.get("role")) != ("assistant", "tool") or not isinstance(text, str):
            continue
        calls = worker.context.parser.parse(text).calls
        turns = [message.get("content") for message in (prompt[at - 1], asked, shown, *prompt[at + 2 : at + 3])]
        whole = len(turns) == 4 and all(isinstance(turn, str) for turn in turns)
        tool_said, said_then = (str(turns[2]), str(turns[3])) if whole else (str(said), "")
        if (numbers := set(NUMBER.findall(tool_said))) and numbers.isdisjoint(NUMBER.findall(said_then) or numbers):
            line = f"{where}: the worked example's tool says {tool_said!r:.60}, and its answer is {said_then!r:.60}"
            yield warning(line, f"answer with what the tool said in the prompts of {run.rows_file}")
        if len(calls) != 1 or (name := calls[0].name) not in worker.context.tools:
            continue
        has_state = name in (row.get("tools_kwargs") or {})
        others = _rows_by_state(run, name)[1 : 1 + _ROWS] if has_state else []
        answers = _say(run, [row, row, *others], [[text]] * (2 + len(others)))
        records = tool_calls_of(answers)
        told = [call.response for call in records]
        if len(told) != len(answers):
            continue
        if told[0] != told[1]:
            yield from () if known else _unsteady(run, name, [told[0]], [told[1]])
            return
        # Whatever state a row gives the tool, it is to answer so: the example's may be of another state.
        numeric = {bool(NUMBER.search(text)) for text in (tool_said, told[0])}
        alike = len({*told}) == 1 and tool_said in said_then and len(numeric) == 1
        if told[0] != said and (alike or not has_state):
            call = f"{name} to {calls[0].arguments:.100}"
            does, code = "answers", run.code_of(name)
            fix = f"mend {code}; or, if it is right,"
            if records[0].error:
                does = "refuses it:"
            elif _ignores_arguments(run, calls[0], row, told[0]):
                fix = f"mend {code} first, which answers other arguments alike; if they shall not matter,"
            line = f"{where}: the worked example shows {said!r:.100} as the answer of {call}; it {does}"
            line += f" {told[0]!r:.100}"
            yield warning(line, f"{fix} write what the tool answers into the prompts of {run.rows_file}")
        if whole:
            yield from _follow(run, calls[0], *map(str, turns))


def _rows_by_state(run: Inspection, tool: str) -> list[dict[str, Any]]:
    """The rows that give the tool state which none before them gives."""
    rows: list[dict[str, Any]] = []
    for number in range(min(len(run.train), _SEARCHED)):
        given = ((row := run.train[number]).get("tools_kwargs") or {}).get(tool)
        if given and all(given != other["tools_kwargs"][tool] for other in rows):
            rows.append(row)
    return rows


def _ignores_arguments(run: Inspection, shown: FunctionCall, row: dict[str, Any], said: str) -> bool:
    """Whether calls with other arguments than those of `shown` are answered as it is, by what was `said`."""
    worker, given = run.worker, json.loads(shown.arguments)
    changed = {name: value[::-1] if isinstance(value, str) else value for name, value in given.items()}
    others = [changed, *(example_arguments(worker.context, shown.name, number) for number in range(2))]
    calls = [ids for each in others if each != given and (ids := worker.call(shown.name, each))]
    turns = [[ids, worker.say("")] for ids in calls]
    rollouts = worker.say_turns([row] * len(calls), turns) if calls else []
    return {call.response for call in tool_calls_of(rollouts) if call.error is None} == {said}


def _follow(run: Inspection, shown: FunctionCall, question: str, call: str, said: str, answer: str) -> Result:
    """Does in other rows what a worked example does: its call with the words of their question in the place of its own, its
    answer with what the tool says then. The tool's own truth must be the rows'."""
    words = [str(value) for value in json.loads(shown.arguments).values() if not isinstance(value, dict | list)]
    pattern = re.escape(question)
    for word in words:
        pattern = pattern.replace(re.escape(word), "(.+?)", 1)
    if not words or pattern.count("(.+?)") != len(words) or said not in answer:
        return
    order, shown_words = sorted(words, key=question.index), "|".join(map(re.escape, words))
    rows, said_calls = list[dict[str, Any]](), list[str]()
    for row in (run.train[number] for number in range(min(len(run.train), run.rows, _SEARCHED))):
        if len(rows) == _FOLLOWED:
            break
        if found := re.fullmatch(pattern, str(row["raw_prompt"][-1].get("content"))):
            own = dict(zip(order, found.groups()))
            rows.append(row)
            said_calls.append("".join(own.get(part, part) for part in re.split(f"({shown_words})", call)))
    called = _say(run, rows, [[each] for each in said_calls]) if rows else []
    refused = [call for each in called if each.trajectory for call in each.trajectory.tool_calls[:1] if call.error]
    if 2 * len(refused) > len(called):
        line = f"{len(refused)} of {len(called)} rows that ask as the worked example does get no answer from '{shown.name}'"
        code = run.code_of(shown.name)
        yield warning(
            f"{line}: {refused[0].arguments:.100}: {refused[0].response:.100}", f"mend {code}, or {run.rows_file}"
        )
    told = [_answered(rollout)[:1] for rollout in called]
    for n, records in [*enumerate(told)][:2]:
        alone = [_answered(_say(run, [rows[n]], [[said_calls[n]]])[0])[:1] for _ in range(2)]
        texts = [[record.response for record in each] for each in (*alone, records)]
        if texts[0] == texts[1] != texts[2] and all(texts):
            yield _shared(run, shown.name, f"{texts[0][0]!r:.100} alone, {texts[2][0]!r:.100} beside others")
            return
    tried = [number for number, records in enumerate(told) if records]
    answers = [answer.replace(said, told[number][0].response) for number in tried]
    turns = [[said_calls[n], text] for n, text in zip(tried, answers)]
    ends = _say(run, [rows[n] for n in tried], turns) if tried else []
    unpaid = [n for n, each in enumerate(ends) if each.trajectory and (run.worker.total(each) or 0.0) <= 0]
    if unpaid:
        n = unpaid[0]
        asked, response, truth = said_calls[tried[n]], told[tried[n]][0].response, truth_of(rows[tried[n]])
        line = f"{len(unpaid)} of {len(tried)} rows do not pay for what the worked example does: {asked:.100} is"
        line += f" answered {response!r:.60}, {answers[n]!r:.100} earns nothing, and the ground truth is {truth!r:.60}"
        fix = f"see whether ground truths are wrong ({run.rows_file}), the tool, or the reward"
        if len({told[n][0].response for n in tried}) == 1 and len({said_calls[n] for n in tried}) > _ROWS:
            fix = f"mend {run.code_of(shown.name)}: it answers all of them alike"
        yield warning(line, fix)


def _say(run: Inspection, rows: Sequence[dict[str, Any]], texts: Sequence[Sequence[str]]) -> list[Rollout]:
    """Rolls out each row with its texts as the model's turns, then silence."""
    return run.worker.say_turns(rows, [[*map(run.worker.say, said), run.worker.say("")] for said in texts])


def _answered(rollout: Rollout) -> list[ToolCallRecord]:
    """The calls that a tool answered."""
    return [call for call in rollout.trajectory.tool_calls if call.error is None] if rollout.trajectory else []


def _try_environments(run: Inspection) -> Result:
    """Whether a seed has one start, and a session begins without what an earlier one left."""
    for entry in run.environments.entries.values() if run.environments else ():
        if entry.drives:
            continue
        code = advice.file_of(entry.kind) or f"the environment {entry.name}"
        found = Findings().run_stage("conformance", Trial(entry), fix=f"mend {code}", only=("same seed", "fresh state"))
        for each in found.all:
            if each.level is Level.ERROR:
                yield error(f"environment '{entry.name}': {each.subject}: {each.message}", f"in {code}: {each.fix}")


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
    named = [call for call in trajectory.tool_calls if tool and call.name == tool]  # a malformed call has no name
    calls = [call for call in named if call.error != NOT_EXECUTED]
    ending = trajectory.stop_reason.value
    if tool and not calls:
        other = "see whether the row's loop runs tools: agent_name, and extra_info.tool_selection"
        if (row.get("agent_name") or run.options.rollout.agent.default_agent_loop) == "single_turn_agent":
            key = "agent_name" if row.get("agent_name") else f"{_ROLLOUT}.agent.default_agent_loop"
            other = f"single_turn_agent runs no tools: set {key} to tool_agent, or leave it out"
        yield warning(f"{where}: a call of it was not run ({ending})", _ENDINGS.get(ending, other))
    for call in calls[:1]:
        shown, answer = str(dict(arguments))[:200], call.response[:200]
        code = run.code_of(call.name)
        if call.error not in (None, "tool", "exception"):  # the last is logged where it is raised
            fix = f"give its schema in {advice.tool_file(run.talks, call.name)} examples, or defaults, that are valid"
            yield warning(f"{where} refused {shown} ({call.error}): {answer}", fix)
        length, longest = len(run.worker.say(call.response)), run.talks.max_tool_response_length
        if run.talks.tool_response_length_unit != "tokens":
            length = len(call.response)
        if call.error is None and longest < _SHORT and length >= longest - 1:
            line = f"{where}: its answer is cut to {answer!r} by multi_turn.max_tool_response_length={longest}"
            yield warning(line, f"raise {_ROLLOUT}.multi_turn.max_tool_response_length")
        empty = call.response.strip() in ("", "None")
        if call.error is None and empty and not trajectory.images and advice.own_code(run.worker.context.tools[tool]):
            line = f"{where}: its answer to {shown} is {call.response.strip()!r}: the model learns nothing from it"
            yield warning(line, f"let {code} return what the model is to read; nothing to do if it has nothing to say")
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
