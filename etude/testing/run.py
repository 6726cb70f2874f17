"""`inspect_run`: checks in seconds, without a GPU or the model's weights, whether a configuration would train.

Invariant: every check runs the same code as a real run, on the run's own options; all findings are collected. No weights
are loaded and nothing is written. Tools and scorers are actually called: each tool a few times, each data source's scorer
until an answer made of the ground truth is paid, and with answers that must not be.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from etude.agents import AGENT_LOOPS
from etude.chat import ToolParser
from etude.chat.parsers import find_other_format, format_of
from etude.checks.findings import Finding, Findings, Level, Result, check, error, warning
from etude.checks.nodes import runs_code, sandbox_problems
from etude.checks.resources import service_addresses, slow_dtypes, unreachable_services
from etude.checks.setup import check_tool_messages, warn_of_rewards, warn_of_tools
from etude.config import DEFAULT_ROOT, compose_with_sources
from etude.data import ResumableLoader
from etude.data.files import located_rows
from etude.data.images import NO_IMAGES
from etude.data.rows import question_of, raw_truth, truth_of
from etude.errors import ConfigError, DataError, EtudeError, user_file
from etude.options import SFTOptions, TrainOptions
from etude.options.model_path import cache_folder
from etude.registry import did_you_mean
from etude.testing import advice
from etude.testing.inspection import Inspection
from etude.testing.payment import try_scorer
from etude.testing.rollouts import roll_out
from etude.testing.trial import TrialRollouts, example_arguments, shown_calls
from etude.tools import ToolRuntime
from etude.trainer.sft import SFTTrainer
from etude.workers.context import ToolCatalogue

_ROLLOUT = "actor_rollout_ref.rollout"
_VALUE = re.compile(r"'[^']*'|\d+")  # what differs between rows with one mistake
_MANY = 8  # rows, of which most should not have one ground truth
_FIELD = re.compile(r"(?<![\\\w}$])\{\{?\s*([A-Za-z_]\w*)\s*\}\}?")  # of a template; not of LaTeX, nor of a shell
_MISSING = frozenset({"None", "nan", "NaN", "NaT", "null", "<NA>"})  # what str() and JSON make of what is not there
_FEW, _OFTEN = 50, 20  # rows, and how often each is trained on, by which it is remembered
_LISTED = 5  # kinds of invalid rows listed per split
_COLUMNS = frozenset({"prompt", "data_source", "reward_model", "images", "agent_name", "ability", "extra_info"})
_EXTRA = frozenset({"index", "tools_kwargs", "need_tools_kwargs", "tool_selection", "interaction_kwargs"})
_JUDGED = frozenset({"style", "ground_truth"})
_EXAMPLES_READ = 100  # rows, for worked examples
_GRACE = 10.0  # seconds that clean-up after a time limit may take: what takes longer blocks the event loop
_MODEL = "change actor_rollout_ref.model.path"
_NOTHING_LOADED = ToolCatalogue({}, (), tuple(AGENT_LOOPS.names()), (), False, (), False, False)
_EXAMPLE_MAKES = ("data.train_files", "actor_rollout_ref.model.path")


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
        rolls_out: whether to run trial rollouts, which call each tool several times.
    """
    run = Inspection(rows, seconds)
    if config_path and any("data.train_files" in each and str(cache_folder()) in each for each in overrides):
        run.maker = f"prepare of {Path(config_path) / 'agent.py'}"

    def configuration() -> Result:
        root = "sft" if sft else DEFAULT_ROOT
        found = compose_with_sources(config_name, overrides, config_path, root=root, command="check", collect=True)
        for fault in found.faults:
            says = f"`etude config {fault.key}` says what it takes" if fault.key else ""
            fix = "; ".join(filter(None, (fault.fix, says)))
            if fault.key in _EXAMPLE_MAKES and config_path and (Path(config_path) / "example.yaml").is_file():
                fix = f"an example's rows and model are made by `etude quickstart --example {config_path}`"
                if fault.key == _EXAMPLE_MAKES[1]:
                    fix = f"{fix}; `etude models get smollm2` downloads the model alone"
            elif fault.key == _EXAMPLE_MAKES[0] and config_path and (Path(config_path) / "agent.py").is_file():
                fix = f"{fix}; an example, whose agent.py makes its rows, also needs example.yaml in {config_path}"
            yield ConfigError(fault.message, fix=fix)
        for line in found.remarks:
            key = re.split(r"[=: ]", line, maxsplit=1)[0]
            if line.startswith("no effect here: "):
                yield warning(line, "leave them out")
            else:
                yield warning(
                    line, f"leave out {key}" if "has no effect" in line else f"`etude config {key}` says what it takes"
                )
        run.composition = found
        if isinstance(found.options, TrainOptions):
            run.options = found.options
        yield "every key is known, and their values go together"

    run.findings.run("configuration", configuration, "mend the file; `etude config` lists the keys")
    if not hasattr(run, "options"):
        if run.findings.failed:
            run.findings.skip("data", "not checked: an error above stands in the way")
        else:
            run.findings.run(
                "data", partial(_fine_tuning, run), _mend_row(run.composition.options.data.train_files, run.maker)
            )
        return run.findings
    run.findings.run_stage("setup", run)
    run.choose_tokenizer()
    run.findings.run_stage("run", run, leave_out="" if rolls_out else "rollout")
    if hasattr(run, "worker"):
        run.worker.end()
    return run.findings


def require_score(options: TrainOptions) -> None:
    """Scores an answer to a row, before anything is trained; a scorer gets a minute.

    Raises:
        EtudeError: the reward fails on it, or nothing could be scored.
    """
    run = Inspection(rows=1, seconds=60.0)
    run.options = options
    run.findings.run_stage("setup", run).run_stage("run", run, only=("tools",))
    if hasattr(run, "context"):
        run.train = run.dataset(options.data.train_files, 1)
        run.findings.run_stage("run", run, only=("reward",))
    if hasattr(run, "worker"):
        run.worker.end()
    for each in run.findings.all:
        if each.level is Level.ERROR:
            raise EtudeError(each.message, fix=each.fix)


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
    worker = run.worker = TrialRollouts(run, run.seconds)

    def load_scorer() -> Result:
        _ = worker.scorer
        yield from ()

    run.findings.run("reward", load_scorer, f"mend {advice.scorer(run.custom)}")
    run.catalogue = _NOTHING_LOADED
    run.catalogue = ToolCatalogue.of(worker.context)
    run.context, schemas = worker.context, run.catalogue.schemas
    for name, schema in schemas.items():
        if not schema["function"].get("description") and user_file(advice.tool_file(run.talks, name)) is not None:
            message = f"tool '{name}' has no description, so the model is not told what it does"
            yield warning(message, f"write a docstring or tool_schema.function.description in {run.code_of(name)}")
        limit, whole = ToolRuntime.of(worker.context.tools[name]).policy.timeout, run.options.rollout.trajectory_timeout
        if limit > whole:
            line = f"{_ROLLOUT}.trajectory_timeout={whole:g} s is less than a call of '{name}' may take ({limit:g} s)"
            yield warning(line, f"raise {_ROLLOUT}.trajectory_timeout, or lower config.timeout of '{name}'")
    yield f"loaded: {', '.join(schemas) or 'none'}"


@check("run", "template", needs="context own_tokenizer", fix=f"set {_ROLLOUT}.multi_turn.format=auto")
def _template(run: Inspection) -> Result:
    check_tool_messages(run)
    yield from _other_format(run)
    if run.schemas:
        yield "writes the tools' answers; the parser reads the calls that it writes"
    else:
        yield "no tools: nothing to be written between turns but a user's words"


def _other_format(run: Inspection) -> Result:
    """A format that reads the calls of the chat template, but takes their tags for text of the model's."""
    chosen, template = run.talks.format, run.tokenizer.chat_template
    if not run.schemas or chosen == "auto" or not isinstance(template, str):
        return
    with suppress(ConfigError):
        own, name = format_of(template), next(iter(run.schemas))
        parsers = [ToolParser.get_tool_parser(each, run.tokenizer) for each in (own, chosen)]
        text = parsers[0].write([(name, example_arguments(run.worker.context, name))], [*run.schemas.values()])
        left = [parser.parse(text, [*run.schemas.values()]).content.strip() for parser in parsers]
        if left[1] and not left[0]:
            key = f"{_ROLLOUT}.multi_turn.format"
            line = f"{key}={chosen} takes a part of the chat template's calls for text: {left[1]!r}"
            yield warning(line, f"set {key}={own}, or auto")


def _wrong_examples(run: Inspection, prompts: Sequence[Sequence[Mapping[str, Any]]]) -> Result:
    """Worked examples in the prompts that the model would copy: calls that the parser does not read, of tools that the run
    does not have, or that get no answer."""
    if not run.schemas:
        return
    parser, found = ToolParser.get_tool_parser(run.talks.format, run.tokenizer), dict[str, Finding]()
    for messages, where in zip(prompts, run.train.locations):
        for at, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            text, names = message.get("content"), [call.name for call in shown_calls(parser, message)]
            unread = text if "format" not in found and isinstance(text, str) and not names else ""
            if unread and (other := find_other_format(unread, parser, run.schemas)) is not None:
                tool = next(iter(run.schemas))
                own = parser.write([(tool, example_arguments(run.worker.context, tool))], [*run.schemas.values()])
                line = f"{where}: an assistant's turn calls a tool in the format {other}, which multi_turn.format="
                line += f"{run.talks.format} does not read: the model would copy it"
                fix = f"write calls as {own.strip()!r}, or set {_ROLLOUT}.multi_turn.format={other}"
                found["format"] = warning(line, fix)
            if unknown := [name for name in names if name not in run.schemas]:
                line = f"{where}: a worked example calls '{unknown[0]}', and the tools are {', '.join(run.schemas)}"
                fix = f"write a tool's name into the prompts of {run.rows_file}{did_you_mean(unknown[0], run.schemas)}"
                found.setdefault("name", warning(line, fix))
            elif names and not _is_answered(messages, at, parser.result_tag or "tool_response"):
                line = f"{where}: a worked example calls '{names[0]}' and shows no answer of it"
                fix = f"put what it answers, as a message of the role tool, after the call in the prompts of {run.rows_file}"
                found.setdefault("answer", warning(line, fix))
    yield from (found[kind] for kind in sorted(found, key="format".__ne__))


def _answered_prompts(run: Inspection, prompts: Sequence[Sequence[Mapping[str, Any]]]) -> Result:
    """Prompts that end in the model's own words: the template closes them, and what is sampled answers an answer."""
    places = [
        where
        for where, prompt in zip(run.train.locations, prompts)
        if prompt and prompt[-1].get("role") == "assistant" and not prompt[-1].get("tool_calls")
    ]
    if places:
        line = f"{places[0]}: the prompt ends in an assistant message, after which the model answers once more"
        more = f" ({len(places)} such rows)" if len(places) > 1 else ""
        yield warning(
            line + more, f"end the prompts of {run.rows_file} before it; `etude sft` learns from answers (docs/data.md)"
        )


def _is_answered(messages: Sequence[Mapping[str, Any]], at: int, tag: str) -> bool:
    """Whether what follows message `at` may be a tool's answer: not the model's own words, nor the question at the end."""
    if at + 1 == len(messages):
        return False
    after, ends = messages[at + 1], at + 2 == len(messages)
    return after["role"] != "assistant" and (
        after["role"] == "tool" or not ends or f"<{tag}" in str(after.get("content"))
    )


@check("run", "rows", needs="catalogue", fix=lambda run: _mend_row(run.options.data.train_files, run.maker))
def _read_rows(run: Inspection) -> Result:
    data, said, trained = run.options.data, [], dict[str, str]()
    own = run.options.rollout.agent.default_agent_loop, run.options.actor_rollout_ref.env.name
    asked: dict[str, tuple[str | None, str]] = {}
    reported = {fault.key for fault in run.composition.faults}
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        made = [each for each in run.options.environments if key == "data.train_files" or each.val_tasks]
        if not (files or made) or key in reported:
            continue
        problems: list[DataError] = []
        dataset = run.dataset(files, run.rows, problems, split="train" if key == "data.train_files" else "val")
        known = [each for each in problems if run.measures or not each.fix.startswith(NO_IMAGES)]
        yield from _kinds_of(run, key, str([*files, "env"][0]), known)
        yield from _columns(run, files)
        lengths, shared, contrary = list[int](), list[str](), list[str]()
        asks, truths = list[str](), set[str | None]()
        for number, (row, where) in enumerate(zip(dataset, dataset.locations)):
            if key == "data.train_files":
                run.kinds.setdefault((str(row.get("data_source")), type(raw_truth(row))), number)
            lengths.append(len(row["raw_prompt_ids"]))
            question, truth = question_of(row, row["raw_prompt"], *own), truth_of(row)
            asks.append(str(row["raw_prompt"][-1].get("content")))
            truths.add(truth)
            other, first = asked.setdefault(question, (truth, where))
            if other != truth:
                contrary.append(f"{where} says {truth!r:.60} and {first} says {other!r:.60}")
            elif key == "data.val_files" and question in trained:
                shared.append(f"{where} is {trained[question]}")
            elif key == "data.train_files":
                trained.setdefault(question, where)
        unfilled = _unfilled(asks, dataset.locations) if files and len(truths) > 1 else None
        if unfilled is not None:
            line = f"{key}: {unfilled}, and nearly all rows ask the same: a template's field is not filled"
            fix = f"fill it (an f-string without its f?) in the prompts of {run.maker or run.rows_file}"
            yield warning(line, f"{fix}; nothing to do if it shows the answer's form")
        elif contrary and run.catalogue is not _NOTHING_LOADED:  # without tools, rows lack what tools are given
            line = f"{key}: {len(contrary)} rows ask what another asks, with another ground truth: {_some(contrary)}"
            yield warning(line, f"one of each two is wrong: {_mend_row(files, run.maker)}")
        if missing := [where for where, each in zip(dataset.locations, dataset) if truth_of(each) in _MISSING]:
            line = f"{key}: {len(missing)} rows have as ground truth what was missing, made text: {_some(missing)}"
            yield warning(line, f"leave them out of {run.maker or run.rows_file}; nothing to do if it is the answer")
        [(same, count), *_] = Counter(truth for truth, _ in asked.values()).most_common(1) or [("", 0)]
        if key == "data.train_files" and len(lengths) >= _MANY and same and 3 * count > 2 * len(asked):
            some = "all" if count == len(asked) else f"{100 * count / len(asked):.0f} % of"
            line = f"{key}: {some} questions have the ground truth {same!r:.60}: a model can say it without looking"
            yield warning(line, f"{_mend_row(files, run.maker)}; nothing to do if your scorer judges by something else")
        times = _times_trained(run.options, len(lengths))
        if key == "data.train_files" and files and 0 < len(lengths) < _FEW and times >= _OFTEN:
            line = f"{key}: {len(lengths)} rows, each trained on {times:.0f} times: a model learns them by heart"
            yield warning(line, f"write more rows into {run.rows_file}, or lower trainer.total_training_steps")
        if lengths:
            span = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
            if not run.measures:
                said.append(f"{key}: {len(lengths)} read; lengths not checked: an error above stands in the way")
            elif files:
                said.append(f"{key}: {len(lengths)} read, prompts of {span} tokens (limit {data.max_prompt_length})")
            else:
                said.append(f"env: {len(lengths)} made, in place of {key}; each starts with what reset returns")
            if key == "data.train_files":
                run.train = dataset
                warn_of_tools(dataset)
                if hasattr(run, "context"):
                    warn_of_rewards(run, dataset)
                if run.measures:
                    prompts = [dataset[number]["raw_prompt"] for number in range(min(len(dataset), _EXAMPLES_READ))]
                    yield from _wrong_examples(run, prompts)
                    yield from _answered_prompts(run, prompts)
            elif shared:
                both = f"{len(shared)} of {len(lengths)} rows are also in data.train_files"
                line = f"{key}: {both}, so they measure memory: {_some(shared)}"
                yield warning(line, f"set {key} to rows that are not trained on")
    if said:
        yield "; ".join(said)
    elif not hasattr(run, "train"):
        run.findings.skip("rows", "not checked: an error above stands in the way")


def _unfilled(asks: Sequence[str], places: Sequence[str]) -> str | None:
    """The first row of a template's fields that nobody filled, where nearly all rows ask the same with them."""
    if not asks:
        return None
    [(same, count)] = Counter(asks).most_common(1)
    if 10 * count < 9 * len(asks) or not (fields := list(dict.fromkeys(_FIELD.findall(same)))):
        return None
    return f"{places[asks.index(same)]}: the question holds {', '.join(f'{{{each}}}' for each in fields)}"


def _some(places: Sequence[str]) -> str:
    return "; ".join([*places[:_LISTED], *(["…"] if len(places) > _LISTED else [])])


def _columns(run: Inspection, files: Sequence[str]) -> Result:
    """Yields a warning per file for columns that look misspelt or stand in the wrong place, and for rows that lack the truth
    which others have."""
    for file in files if run.options.data.custom_cls.path is None else ():
        unread, lacking, given = dict[str, tuple[str, str]](), list[str](), False
        for where, row in islice(located_rows(file), run.rows):
            info, judged = row.get("extra_info"), row.get("reward_model")
            own = (row, _COLUMNS), (info, _EXTRA), (judged, _JUDGED)
            for held, known in ((held, known) for held, known in own if isinstance(held, dict)):
                for name in held.keys() - known:
                    for meant in get_close_matches(name, known - held.keys(), n=1, cutoff=0.85):
                        line = f"{where}: '{name}' is not read; did you mean '{meant}'?"
                        unread.setdefault(name, (line, f"rename '{name}'"))
            for name in (row.keys() & _EXTRA) - {"index", *(info if isinstance(info, dict) else ())}:
                if not row[name]:
                    continue
                line = f"{where}: '{name}' is read in extra_info only, and it stands beside it"
                unread.setdefault(name, (line, f"move '{name}' into extra_info"))
            if isinstance(judged, dict) and judged.get("ground_truth") is None:
                lacking.append(where)
            given |= isinstance(judged, dict) and judged.get("ground_truth") is not None
        for line, remedy in unread.values():
            yield warning(line, f"{remedy} in {run.maker or file}; nothing to do if your code reads it")
        if lacking and given and run.own_scorer:
            more = f" ({len(lacking)} such rows)" if len(lacking) > 1 else ""
            yield warning(
                f"{lacking[0]}: reward_model.ground_truth is missing, others have one{more}",
                _mend_row([file], run.maker),
            )


def _times_trained(options: TrainOptions, rows: int) -> float:
    """How often each of `rows` is trained on."""
    steps, epochs = options.trainer.total_training_steps, options.trainer.total_epochs
    return steps * options.data.train_batch_size / max(rows, 1) if steps else float(epochs)


def _kinds_of(run: Inspection, key: str, file: str, problems: Sequence[DataError]) -> Result:
    """Yields an error per kind of problem, naming the first affected row; the values of the rows make no kinds."""
    kinds: dict[tuple[str, str], list[DataError]] = {}
    for problem in problems:
        kind = _VALUE.sub("", problem.message.partition(": ")[2]), re.sub(r"\d+", "", problem.fix)
        kinds.setdefault(kind, []).append(problem)
    for alike in list(kinds.values())[:_LISTED]:
        more = f" ({len(alike)} such rows)" if len(alike) > 1 else ""
        yield error(alike[0].message + more, alike[0].fix or _mend_row([file], run.maker))
    if len(kinds) > _LISTED:
        yield error(f"{key}: {len(kinds) - _LISTED} more kinds of invalid rows", _mend_row([file], run.maker))


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
    steps = options.trainer.total_training_steps
    if steps is None and len(run.train) < run.rows:
        steps = options.trainer.total_epochs * (len(run.train) // size)
    longest, room = max(len(row["raw_prompt_ids"]) for row in run.train), options.actor.ppo_max_token_len_per_gpu
    for key, given, what in (
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps",
            options.actor.optim.lr_warmup_steps,
            "the rate is reached in the last one, if at all",
        ),
        ("trainer.critic_warmup", options.trainer.critic_warmup, "the policy never learns"),
    ):
        if steps and given >= steps:
            yield warning(
                f"{key}={given} is no less than the run's {steps} steps: {what}", f"lower {key}, or train longer"
            )
    if run.measures and room < longest:
        key, why = (
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "it bounds nothing, each sequence is a micro-batch",
        )
        line = f"{key}={room} tokens is less than a prompt ({longest}): {why}"
        yield warning(line, f"set {key} to {options.rollout.prompt_length + options.rollout.response_length} or more")
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
    yield from try_scorer(run)


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


@check("run", "machine", needs="catalogue own_tokenizer", fix=_MODEL)
def _machine(run: Inspection) -> Result:
    run.findings.run_stage("loaded", run, fix=_MODEL, leave_out="services")
    yield from ()


# -- a rollout -------------------------------------------------------------------------------------------------------------


@check("run", "rollout", needs="context train own_tokenizer", fix=lambda run: advice.try_alone(run.talks))
def _roll_out(run: Inspection) -> Result:
    if any(each.subject == "services" and each.level is Level.ERROR for each in run.findings.all):
        run.findings.skip("rollout", "not tried: a service does not answer")
        return
    with _ended_after(2 * run.seconds + _GRACE):
        yield from roll_out(run)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Every `seconds`, but for those in which the main thread waited for a core, raises RuntimeError (nothing retries it) in
    what it runs, also where that sleeps."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise RuntimeError(f"the event loop was blocked for {seconds:g} s")

    def watch() -> None:
        begin = time.monotonic() - _starved()
        while not done.wait(0.1):
            if time.monotonic() - _starved() - begin > seconds:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
                begin = time.monotonic() - _starved()

    done, before = threading.Event(), signal.signal(signal.SIGALRM, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGALRM, before)


def _starved() -> float:
    """Seconds in which the main thread could have run, and other processes did; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _mend_row(files: Sequence[str], maker: str) -> str:
    where = f" in {maker}" if maker else ""
    return f"mend the row{where}; `etude data inspect {shlex.quote(str([*files, 'FILE'][0]))}` lists all"
