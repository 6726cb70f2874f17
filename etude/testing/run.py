"""`inspect_run`: checks in seconds, without a GPU or the model's weights, whether a configuration would train.

Invariant: every check runs the same code as a real run, on the run's own options; all findings are collected. No weights
are loaded and nothing is written. Tools and scorers are actually called: each tool once, each data source's scorer until
an answer made of the ground truth is paid.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from etude.checks.findings import Findings, Level, Result, check, error, warning
from etude.checks.nodes import runs_code, sandbox_problems
from etude.checks.resources import service_addresses, slow_dtypes, unreachable_services
from etude.checks.setup import Setup, check_tool_messages, warn_of_rewards, warn_of_tools
from etude.config import DEFAULT_ROOT, Composition, compose_with_sources
from etude.data import ResumableLoader, RLDataset, active_tools
from etude.data.rows import question_of, truth_of
from etude.errors import ConfigError, DataError, EtudeError
from etude.options import CustomRewardOptions, MultiTurnOptions, SFTOptions, TrainOptions
from etude.testing import advice
from etude.testing.trial import TrialRollouts, example_arguments, rollouts_of, row_number
from etude.trainer.sft import SFTTrainer
from etude.trajectory import Provenance, Rollout, Trajectory
from etude.workers.context import ToolCatalogue

_ROLLOUT = "actor_rollout_ref.rollout"
_MAX_SOURCES = 8
_LISTED = 5  # kinds of invalid rows listed per split
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
_FORMS = {
    "alone": "{}",
    "after '####'": "#### {}",
    "in \\boxed{}": "\\boxed{{{}}}",
    "in <answer>": "<answer>{}</answer>",
    "after 'Answer:'": "Answer: {}",
}
"""Answers made of the ground truth that scorers commonly look for, tried in this order."""
_MAX_TRUTH = 200  # characters: longer truths are tests or texts, no answers
_GRACE = 10.0  # seconds that clean-up after a time limit may take: what takes longer blocks the event loop
_TRUTHS = ("ground_truth", "answer", "answers", "solution", "target", "label")
_MODEL = "change actor_rollout_ref.model.path"
_NO_TRUTH = "put the truth into reward_model.ground_truth; nothing to do if the scorer needs none"


def inspect_run(
    config_name: str | None,
    overrides: Sequence[str],
    config_path: str | Path | None,
    *,
    rows: int = 1000,
    seconds: float = 8.0,
    rolls_out: bool = True,
    sft: bool = False,
) -> Findings:
    """Inspects the run that `etude train` or, for an SFT configuration, `etude sft` would start with these arguments.

    Args:
        sft: treat a YAML that names no root configuration as one of `etude sft`.
        rows: number of rows to read of each split.
        seconds: time limit of a trial rollout, and of a scorer call.
        rolls_out: whether to run trial rollouts, which call each tool once.
    """
    run = Inspection(rows, seconds)

    def configuration() -> Result:
        root = "sft" if sft else DEFAULT_ROOT
        found = compose_with_sources(config_name, overrides, config_path, root=root, command="check", collect=True)
        for fault in found.faults:
            says = f"`etude config {fault.key}` says what it takes" if fault.key else ""
            yield ConfigError(fault.message, fix="; ".join(filter(None, (fault.fix, says))))
        for line in found.remarks:
            key = re.split(r"[=: ]", line, maxsplit=1)[0]
            fix = f"leave out {key}" if "has no effect" in line else f"`etude config {key}` says what it takes"
            yield warning(line, fix)
        run.composition = found
        if isinstance(found.options, TrainOptions):
            run.options = found.options
        yield "every key is known, and their values go together"

    run.findings.run("configuration", configuration, "mend the file; `etude config` lists the keys")
    if not hasattr(run, "options"):
        if run.findings.failed:
            run.findings.skip("data", "not checked: an error above stands in the way")
        else:
            run.findings.run("data", partial(_fine_tuning, run), _mend_row(run.composition.options.data.train_files))
        return run.findings
    run.findings.run_stage("setup", run)
    run.findings.run_stage("run", run, leave_out="" if rolls_out else "rollout")
    if hasattr(run, "worker"):
        run.worker.end()
    return run.findings


class Inspection(Setup):
    """Adds what only a trial finds out."""

    composition: Composition
    worker: TrialRollouts
    train: RLDataset

    def __init__(self, rows: int, seconds: float) -> None:
        self.findings = Findings()
        self.rows, self.seconds = rows, seconds

    @property
    def custom(self) -> CustomRewardOptions:
        return self.options.custom_reward_function

    @property
    def talks(self) -> MultiTurnOptions:
        return self.options.actor_rollout_ref.rollout.multi_turn

    @property
    def rows_file(self) -> str:
        return str([*self.options.data.train_files, "ROWS"][0])

    @property
    def try_scorer(self) -> str:
        return advice.try_scorer(self.custom, self.rows_file)


def _fine_tuning(run: Inspection) -> Result:
    """Runs the checks of supervised training before it loads a model: template, tools, and every row."""
    options = run.composition.options
    assert isinstance(options, SFTOptions)
    trainer = SFTTrainer(replace(options, trainer=replace(options.trainer, backend="local")))  # the same, without Ray
    with closing(trainer.groups):
        yield from slow_dtypes(trainer.device, options.model.dtype_on(trainer.device), "model.dtype")
        yield f"{len(trainer.examples)} examples, {trainer.total_steps} steps; each fits data.max_length"


@check("run", "tools", needs="bundle", fix=lambda run: advice.try_tools(run.talks))
def _tools(run: Inspection) -> Result:
    worker = TrialRollouts(run, run.seconds)
    run.catalogue = ToolCatalogue.of(worker.context)

    def load_scorer() -> Result:
        _ = worker.scorer
        yield from ()

    run.findings.run("reward", load_scorer, f"mend {advice.scorer(run.custom)}")
    run.worker = worker
    schemas = run.catalogue.schemas
    for name, schema in schemas.items():
        if not schema["function"].get("description"):
            tool = worker.context.tools.get(name)
            file = advice.code_of(tool, run.talks) if tool else advice.tool_file(run.talks, name)
            message = f"tool '{name}' has no description, so the model is not told what it does"
            yield warning(message, f"write a docstring or tool_schema.function.description in {file}")
    yield f"loaded: {', '.join(schemas) or 'none'}"


@check("run", "template", needs="catalogue", fix=f"set {_ROLLOUT}.multi_turn.format=auto")
def _template(run: Inspection) -> Result:
    check_tool_messages(run)
    if run.schemas:
        yield "writes the tools' answers; the parser reads the calls that it writes"
    else:
        yield "no tools: nothing to be written between turns but a user's words"


@check("run", "rows", needs="catalogue", fix=lambda run: _mend_row(run.options.data.train_files))
def _read_rows(run: Inspection) -> Result:
    data, said, trained = run.options.data, [], dict[str, str]()
    asked: dict[str, tuple[str | None, str]] = {}
    reported = {fault.key for fault in run.composition.faults}
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        made = [each for each in run.options.environments if key == "data.train_files" or each.val_tasks]
        if not (files or made) or key in reported:
            continue
        problems: list[DataError] = []
        dataset = run.dataset(files, run.rows, problems, split="train" if key == "data.train_files" else "val")
        yield from _kinds_of(key, str([*files, "env"][0]), problems)
        lengths, shared, contrary = list[int](), list[str](), list[str]()
        for row, where in zip(dataset, dataset.locations):
            lengths.append(len(row["raw_prompt_ids"]))
            question, truth = question_of(row, row["raw_prompt"]), truth_of(row)
            other, first = asked.setdefault(question, (truth, where))
            if other != truth:
                contrary.append(f"{where} says {truth!r:.60} and {first} says {other!r:.60}")
            elif key == "data.val_files" and question in trained:
                shared.append(f"{where} is {trained[question]}")
            elif key == "data.train_files":
                trained.setdefault(question, where)
        if contrary:
            line = f"{key}: {len(contrary)} rows ask what another asks, with another ground truth: {_some(contrary)}"
            yield warning(line, f"one of each two is wrong: {_mend_row(files)}")
        if lengths:
            span = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
            if files:
                said.append(f"{key}: {len(lengths)} read, prompts of {span} tokens (limit {data.max_prompt_length})")
            else:
                said.append(f"env: {len(lengths)} made, in place of {key}; each starts with what reset returns")
            if key == "data.train_files":
                run.train = dataset
                warn_of_tools(dataset)
                warn_of_rewards(run, dataset)
            elif shared:
                both = f"{len(shared)} of {len(lengths)} rows are also in data.train_files"
                line = f"{key}: {both}, so they measure memory: {_some(shared)}"
                yield warning(line, f"set {key} to rows that are not trained on")
    yield "; ".join(said)


def _some(places: Sequence[str]) -> str:
    return "; ".join([*places[:_LISTED], *(["…"] if len(places) > _LISTED else [])])


def _kinds_of(key: str, file: str, problems: Sequence[DataError]) -> Result:
    """Yields an error per kind of problem, naming the first affected row."""
    kinds: dict[str, list[DataError]] = {}
    for problem in problems:
        kinds.setdefault(problem.message.partition(": ")[2], []).append(problem)
    for alike in list(kinds.values())[:_LISTED]:
        more = f" ({len(alike)} such rows)" if len(alike) > 1 else ""
        yield error(alike[0].message + more, alike[0].fix or _mend_row([file]))
    if len(kinds) > _LISTED:
        yield error(f"{key}: {len(kinds) - _LISTED} more kinds of invalid rows", _mend_row([file]))


@check(
    "run",
    "batch",
    needs="train",
    fix=lambda run: f"change data.train_batch_size, or add rows to {run.rows_file}",
)
def _batch(run: Inspection) -> Result:
    options, data = run.options, run.options.data
    if len(run.train) < run.rows:  # the whole data set was read
        ResumableLoader(run.train, data.train_batch_size, seed=data.seed)
    n, size, mini = options.actor_rollout_ref.rollout.n, data.train_batch_size, options.actor.ppo_mini_batch_size
    updates = max(1, -(-size // mini))
    if mini < size and size % mini:
        divisor = max(each for each in range(1, mini + 1) if size % each == 0)
        yield warning(
            f"actor.ppo_mini_batch_size={mini} does not divide data.train_batch_size={size}: {updates} updates of unequal "
            "size a step",
            f"set actor_rollout_ref.actor.ppo_mini_batch_size={divisor}, or a batch that is a multiple of {mini}",
        )
    ranks = options.trainer.n_gpus_per_node * options.trainer.nnodes if options.trainer.backend == "ray" else 1
    if size % ranks:
        line = f"{size} prompts on {ranks} ranks: some wait for the others at each step"
        yield warning(line, f"set data.train_batch_size={-(-size // ranks) * ranks}")
    yield f"{size} prompts of {n} answers a step, {updates} update{'s' if updates > 1 else ''}"


# -- the reward ------------------------------------------------------------------------------------------------------------


@check("run", "reward", needs="train", fix=lambda run: run.try_scorer)
def _reward(run: Inspection) -> Result:
    if run.worker.scorer is None:
        yield "reward_model.enable=false: tools and environments alone reward"
        return
    firsts: dict[str, dict[str, Any]] = {}
    for number, source in enumerate(run.train.sources):
        if source not in firsts and len(firsts) < _MAX_SOURCES:
            firsts[source] = run.train[number]
    said = []
    for source, row in firsts.items():
        empty = run.worker._run(_score(run, row, ""))
        paid, lacking = _paid_form(run, row)
        said.append(f"{source}: {paid}")
        if lacking:
            yield warning(f"{source}: {lacking[0]}", lacking[1])
        if empty > 0:
            fix = f"let {advice.scorer(run.custom)} return 0 for an answer that is not there"
            yield warning(f"{source}: an empty answer earns {empty:g}", fix)
    yield "; ".join(said)


def _paid_form(run: Inspection, row: Mapping[str, Any]) -> tuple[str, tuple[str, str] | None]:
    """Returns which answer made of the row's ground truth is paid, and a warning (message, fix) if the user's own scorer
    pays none of them."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    own = bool(run.custom.path) and not str(run.custom.path).startswith("etude.")
    if truth is None:
        places = {"": row, "extra_info.": row.get("extra_info") or {}}
        elsewhere = [f"{place}{key}" for place, held in places.items() for key in _TRUTHS if key in held]
        fix = f"move {elsewhere[0]} to reward_model.ground_truth" if elsewhere else _NO_TRUTH
        lacking = ("rows have no reward_model.ground_truth, so the scorer gets None", fix)
        return "without a ground truth", lacking if own else None
    if not isinstance(truth, str | int | float) or len(str(truth)) > _MAX_TRUTH:
        return f"the ground truth alone earns {run.worker._run(_score(run, row, str(truth))):g}", None
    for name, form in _FORMS.items():
        if (score := run.worker._run(_score(run, row, form.format(truth)))) > 0:
            return f"the ground truth {name} earns {score:g}", None
    said = "the ground truth earns nothing, " + " or ".join(_FORMS)
    kind = "" if isinstance(truth, str) else f" (it is of type {type(truth).__name__}, an answer is text)"
    return said, (said + kind, run.try_scorer) if own else None


async def _score(run: Inspection, row: Mapping[str, Any], text: str) -> float:
    """Returns the reward manager's score of an answer consisting of `text`."""
    trajectory = Trajectory("check", list(row["raw_prompt_ids"]), messages=[dict(m) for m in row["raw_prompt"]])
    ids = run.worker.say(text)
    trajectory.append(ids, Provenance.SAMPLED, log_probs=[0.0] * len(ids))
    trajectory.messages.append({"role": "assistant", "content": text})
    trajectory.assistant_turns = 1
    scorer = run.worker.scorer
    assert scorer is not None
    try:
        await asyncio.wait_for(scorer(trajectory, row), run.seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise EtudeError(f"no score within {run.seconds:g} s (--timeout)") from None
    return float(trajectory.rewards.score or 0.0)


# -- the machine -----------------------------------------------------------------------------------------------------------


@check("run", "services", needs="catalogue", fix="`etude doctor` tries the sandbox of this machine")
def _services(run: Inspection) -> Result:
    places = [place.lower() for place, _ in service_addresses(run).values()]
    if runs_code(run.talks, run.custom.path) and not any("sandbox" in place for place in places):
        fix = "run `etude doctor`: it says what each mode lacks; or `etude sandbox serve` elsewhere, and name it"
        for each in sandbox_problems():
            yield error(f"sandbox: {each.message}", fix)
        yield "the sandbox of this machine isolates"
    yield from unreachable_services(run)


@check("run", "machine", needs="catalogue", fix=_MODEL)
def _machine(run: Inspection) -> Result:
    run.findings.run_stage("loaded", run, fix=_MODEL, leave_out="services")
    yield from ()


# -- a rollout -------------------------------------------------------------------------------------------------------------


@check("run", "rollout", needs="train", fix=lambda run: advice.try_alone(run.talks))
def _roll_out(run: Inspection) -> Result:
    """Rolls out one trajectory per tool (a call, then an answer), or without tools a single answer."""
    worker, tools = run.worker, [*run.worker.context.tools]
    if any(each.subject == "services" and each.level is Level.ERROR for each in run.findings.all):
        run.findings.skip("rollout", "not tried: a service does not answer")
        return
    calls = {name: example_arguments(worker.context, name) for name in tools}
    written = {name: worker.call(name, arguments) for name, arguments in calls.items()}
    if None in written.values():
        worker.read_plain_calls()
        written = {name: worker.call(name, arguments) for name, arguments in calls.items()}
    rows = [_row_for(run, name) or run.train[0] for name in tools] or [run.train[0]]

    def play(request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
        row = row_number(request_id)
        ids = written[tools[row]] if turn == 0 and tools else None
        return ids or worker.say(_truth(rows[row]))

    with _ended_after(2 * run.seconds + _GRACE):
        rollouts = rollouts_of(worker.roll_out(rows, play))
    for name, rollout in zip(tools or [""], rollouts):
        if rollout.trajectory is None:
            _dropped(run, name, calls.get(name, {}), rollout)
        else:
            yield from _judge(run, name, calls.get(name, {}), rollout.trajectory)
    scores = ", ".join(f"{worker.total(each) or 0:g}" for each in rollouts)
    records = [call for each in rollouts if each.trajectory for call in each.trajectory.tool_calls]
    refused = [f"{call.name} with an error: {call.response[:100]}" for call in records if call.error == "tool"]
    how = f" ({'; '.join(refused)})" if refused else ""
    yield f"{f'every tool was called and answered{how}' if tools else 'an answer was rolled out'}; rewards {scores}"


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
    run.findings.add_error("rollout", EtudeError(line), _ENDINGS.get(ending, alone))


def _judge(run: Inspection, tool: str, arguments: Mapping[str, Any], trajectory: Trajectory) -> Result:
    """Yields what is wrong with a trajectory in which `tool` was to be called, or a single answer given."""
    where = f"tool '{tool}'" if tool else "an answer"
    calls = [call for call in trajectory.tool_calls if tool and call.name == tool]  # a malformed call has no name
    ending = trajectory.stop_reason.value
    if tool and not calls:
        other = "see whether the row's loop runs tools: agent_name, and extra_info.tool_selection"
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


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Every `seconds`, raises RuntimeError (nothing retries it) in what the main thread runs, also where that sleeps."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise RuntimeError(f"the event loop was blocked for {seconds:g} s")

    def watch() -> None:
        while not done.wait(seconds):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    done, before = threading.Event(), signal.signal(signal.SIGALRM, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGALRM, before)


def _mend_row(files: Sequence[str]) -> str:
    return f"mend the row; `etude data inspect {shlex.quote(str([*files, 'FILE'][0]))}` lists all"


def _truth(row: Mapping[str, Any]) -> str:
    truth = (row.get("reward_model") or {}).get("ground_truth")
    return "done" if truth is None else str(truth)[:200]
