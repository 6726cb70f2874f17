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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.config import DEFAULT_ROOT, Composition, compose_with_sources
from etude.errors import ConfigError, EtudeError
from etude.findings import Findings, Level, split_advice
from etude.options import CustomRewardOptions, TrainOptions
from etude.preflight import advice

if TYPE_CHECKING:
    from etude.data import RLDataset
    from etude.preflight.trial import TrialRollouts
    from etude.trainer.setup import LoadedSetup
    from etude.trajectory import Rollout, ToolCallRecord, Trajectory
    from etude.workers import RoleOptions
    from etude.workers.tokenizer_bundle import TokenizerBundle

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
    run = _Inspection(rows, seconds)
    run.configuration(config_name, overrides, config_path, sft)
    if hasattr(run, "options"):
        run.parts(rolls_out)
    else:
        run.fine_tuning()
    return run.findings


class _Inspection:
    """The checks. Each stores its result as an attribute for later checks; if it failed, the attribute is missing."""

    options: TrainOptions
    _composition: Composition
    _roles: RoleOptions
    _bundle: TokenizerBundle
    _worker: TrialRollouts
    _setup: LoadedSetup
    _train: RLDataset

    def __init__(self, rows: int, seconds: float) -> None:
        self.findings = Findings()
        self._rows, self._seconds = rows, seconds

    def configuration(
        self, config_name: str | None, overrides: Sequence[str], config_path: str | Path | None, sft: bool
    ) -> None:
        """Composes the configuration; every invalid key or value is a finding."""

        def step() -> str:
            root = "sft" if sft else DEFAULT_ROOT
            found = compose_with_sources(config_name, overrides, config_path, root=root, command="check", collect=True)
            for level, lines in ((Level.ERROR, found.faults), (Level.WARNING, found.remarks)):
                for line in lines:
                    key = re.split(r"[=: ]", line, maxsplit=1)[0]
                    fix = f"leave out {key}" if "has no effect" in line else f"`etude config {key}` says what it takes"
                    self.findings.add_line(level, "configuration", line, fix)
            self._composition = found
            if isinstance(found.options, TrainOptions):
                self.options = found.options
            return "every key is known, and their values go together"

        self.findings.run("configuration", step, fix="mend the file")

    def fine_tuning(self) -> None:
        """Runs the checks of supervised training before it loads a model: template, tools, and every row."""

        def step() -> str:
            from etude.trainer.resources import slow_dtypes
            from etude.trainer.sft import SFTTrainer

            config = self._composition.config.copy()
            config.trainer.backend = "local"  # same checks, without starting a Ray cluster
            trainer = SFTTrainer(config)
            self.findings.all += slow_dtypes(trainer.roles.device, trainer.model.dtype, "model.dtype")
            with closing(trainer.groups):
                return f"{len(trainer.examples)} examples, {trainer.total_steps} steps; each fits data.max_length"

        ready = not self.findings.failed
        files = self._composition.options.data.train_files if ready else ()
        self.findings.run("data", step, fix=_mend_row(files), ready=ready)

    @property
    def _custom(self) -> CustomRewardOptions:
        return self.options.custom_reward_function

    @property
    def _rows_file(self) -> str:
        return str([*self.options.data.train_files, "ROWS"][0])

    def parts(self, rolls_out: bool) -> None:
        """Runs every check after the configuration's."""
        data, policy = self.options.data, self.options.actor_rollout_ref
        model, talks = policy.model.path or "MODEL", policy.rollout.multi_turn

        def run(subject: str, step: Callable[[], str | None], needs: str, fix: str) -> None:
            self.findings.run(subject, step, fix=fix, ready=hasattr(self, needs))

        run("plug-ins", self._names, "options", "correct plugins, or the key that names what they register")
        fix = f"change actor_rollout_ref.model.path; `etude chat check {model}` tries its template"
        run("model", self._model, "_roles", fix)
        run("tools", self._tools, "_bundle", advice.try_tools(talks))
        run("template", self._template, "_setup", f"set {_ROLLOUT}.multi_turn.format=auto")
        run("rows", self._read_rows, "_setup", _mend_row(data.train_files))
        run("batch", self._batch, "_train", f"change data.train_batch_size, or add rows to {self._rows_file}")
        run("reward", self._reward, "_train", advice.try_scorer(self._custom, self._rows_file))
        run("services", self._services, "_setup", "`etude doctor` tries the sandbox of this machine")
        run("machine", self._machine, "_setup", f"change actor_rollout_ref.model.path={model}")
        down = any(each.subject == "services" and each.level is Level.ERROR for each in self.findings.all)
        if down:
            self.findings.add(Level.SKIPPED, "rollout", "not tried: a service does not answer")
        elif rolls_out:
            run("rollout", self._roll_out, "_train", advice.try_alone(talks))
        if hasattr(self, "_worker"):
            self._worker.end()

    # -- checks --------------------------------------------------------------------------------------------------

    def _names(self) -> str:
        from etude.config.checks import check_records, effective_keys
        from etude.config.layers import to_container
        from etude.trainer.setup import register_names, resolve_device, roles_of

        options, broken = self.options, len(self.findings.all)
        try:
            resolve_device(options.trainer.device)
        except ConfigError as error:  # the other checks can go on with the CPU
            self.findings.add_line(Level.ERROR, "machine", str(error), "`etude doctor` lists this machine's devices")
            options = replace(options, trainer=replace(options.trainer, device="cpu"))
            broken += 1
        effective = effective_keys(options)
        for plugin in options.plugins:
            self.findings.run("plug-ins", partial(_import, plugin), fix=f"mend {plugin}")
        if len(self.findings.all) > broken:
            return ""
        loops = options.actor_rollout_ref.rollout.agent.agent_loop_config_path
        register_names(options, options.trainer, loops)

        def records() -> None:
            for line in check_records(options, effective):
                self.findings.add_line(Level.WARNING, "plug-ins", line, f"leave out {line.partition('=')[0]}")

        self.findings.run(
            "plug-ins", records, fix="`etude config algorithm` and `etude config actor_rollout_ref` list the keys"
        )
        self._roles = roles_of(options, to_container(self._composition.config))
        return f"{len(options.plugins)} imported; every name is registered"

    def _model(self) -> str:
        from etude.inference import check_takes_images
        from etude.workers.tokenizer_bundle import load_tokenizer_bundle

        model = self._roles.model
        bundle = load_tokenizer_bundle(model, self._roles.chat_template_kwargs, self._roles.rollout.multi_turn)
        if bundle.processor is not None:
            check_takes_images(self._roles.rollout.name)
        self._bundle = bundle
        return f"{model.path}: its chat template continues conversations exactly"

    def _tools(self) -> str:
        from etude.preflight.trial import TrialRollouts, load_setup

        worker = TrialRollouts(self._roles, self._seconds)
        worker.__dict__["bundle"] = self._bundle  # presets the cached property: loaded already
        self._setup = load_setup(self.options, self._roles, self._bundle, worker)

        def load_scorer() -> None:
            _ = worker.scorer

        self.findings.run("reward", load_scorer, fix=f"mend {advice.scorer(self._custom)}")
        self._worker = worker
        talks, schemas = self._roles.rollout.multi_turn, self._setup.catalogue.schemas
        for name, schema in schemas.items():
            if not schema["function"].get("description"):
                tool = worker.context.tools.get(name)
                file = advice.code_of(tool, talks) if tool else advice.tool_file(talks, name)
                message = f"tool '{name}' has no description, so the model is not told what it does"
                fix = f"write a docstring or tool_schema.function.description in {file}"
                self.findings.add(Level.WARNING, "tools", message, fix)
        return f"loaded: {', '.join(schemas) or 'none'}"

    def _template(self) -> str:
        from etude.trainer.setup import check_tool_messages

        check_tool_messages(self._setup, self._setup.data.apply_chat_template_kwargs)
        if not self._setup.schemas:
            return "no tools: nothing to be written between turns but a user's words"
        return "writes the tools' answers; the parser reads the calls that it writes"

    def _read_rows(self) -> str:
        from etude.errors import DataError
        from etude.trainer.setup import warn_of_rewards, warn_of_tools

        setup, said, trained = self._setup, [], set[str]()
        for key, files in (("data.train_files", setup.data.train_files), ("data.val_files", setup.data.val_files)):
            if not files or any(line.startswith(f"{key}=") for line in self._composition.faults):  # already reported
                continue
            problems: list[DataError] = []
            dataset: RLDataset = setup.dataset(files, self._rows, problems)
            self._list_problems(key, str(files[0]), problems)
            read = [(len(row["raw_prompt_ids"]), _task(row)) for row in dataset]
            lengths, tasks = [length for length, _ in read], [task for _, task in read]
            if lengths:
                span = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
                limit = setup.data.max_prompt_length
                said.append(f"{key}: {len(lengths)} read, prompts of {span} tokens (limit {limit})")
                if key == "data.train_files":
                    self._train = dataset
                    warn_of_tools(dataset)
                    warn_of_rewards(setup, dataset)
                    trained.update(tasks)
                elif 2 * (both := sum(task in trained for task in tasks)) > len(tasks):
                    line = f"{key}: {both} of {len(tasks)} rows are also in data.train_files, so they measure memory"
                    self.findings.add(Level.WARNING, "rows", line, f"set {key} to rows that are not trained on")
        return "; ".join(said)

    def _list_problems(self, key: str, file: str, problems: Sequence[Exception]) -> None:
        """Adds one finding per kind of problem, naming the first affected row."""
        kinds: dict[str, list[str]] = {}
        for error in problems:
            kinds.setdefault(str(error).partition(": ")[2], []).append(str(error))
        fix = _mend_row([file])
        for lines in list(kinds.values())[:_LISTED]:
            more = f" ({len(lines)} such rows)" if len(lines) > 1 else ""
            message, advice = split_advice(lines[0])
            self.findings.add(Level.ERROR, "rows", message + more, advice or fix)
        if len(kinds) > _LISTED:
            self.findings.add(Level.ERROR, "rows", f"{key}: {len(kinds) - _LISTED} more kinds of invalid rows", fix)

    def _batch(self) -> str:
        from etude.data import ResumableLoader

        options, data = self.options, self.options.data
        if len(self._train) < self._rows:  # the whole data set was read
            ResumableLoader(self._train, data.train_batch_size, seed=data.seed)
        n, size, mini = options.actor_rollout_ref.rollout.n, data.train_batch_size, options.actor.ppo_mini_batch_size
        if mini < size and size % mini:
            updates = -(-size // mini)
            divisor = max(each for each in range(1, mini + 1) if size % each == 0)
            self.findings.add(
                Level.WARNING,
                "batch",
                f"actor.ppo_mini_batch_size={mini} does not divide data.train_batch_size={size}: {updates} updates of "
                "unequal size a step",
                f"set actor_rollout_ref.actor.ppo_mini_batch_size={divisor}, or a batch that is a multiple of {mini}",
            )
        ranks = options.trainer.n_gpus_per_node * options.trainer.nnodes if options.trainer.backend == "ray" else 1
        if size % ranks:
            line = f"{size} prompts on {ranks} ranks: some wait for the others at each step"
            fix = f"set data.train_batch_size={-(-size // ranks) * ranks}"
            self.findings.add(Level.WARNING, "batch", line, fix)
        updates = max(1, -(-size // mini))
        return f"{size} prompts of {n} answers a step, {updates} update{'s' if updates > 1 else ''}"

    def _reward(self) -> str:
        scorer = self._worker.scorer
        if scorer is None:
            return "reward_model.enable=false: tools and environments alone reward"
        firsts: dict[str, dict[str, Any]] = {}
        for number, source in enumerate(self._train.sources):
            if source not in firsts and len(firsts) < _MAX_SOURCES:
                firsts[source] = self._train[number]
        said = []
        for source, row in firsts.items():
            empty = self._worker._run(self._scored(row, ""))
            said.append(f"{source}: {self._pay(source, row)}")
            if empty > 0:
                self.findings.add(
                    Level.WARNING,
                    "reward",
                    f"{source}: an empty answer earns {empty:g}",
                    f"let {advice.scorer(self._custom)} return 0 for an answer that is not there",
                )
        return "; ".join(said)

    def _pay(self, source: str, row: Mapping[str, Any]) -> str:
        """Says which answer made of the row's ground truth is paid; warns if the user's own scorer pays none of them."""
        truth = (row.get("reward_model") or {}).get("ground_truth")
        own = bool(self._custom.path) and not str(self._custom.path).startswith("etude.")
        if truth is None:
            if own:
                places = {"": row, "extra_info.": row.get("extra_info") or {}}
                elsewhere = [f"{place}{key}" for place, held in places.items() for key in _TRUTHS if key in held]
                line = f"{source}: rows have no reward_model.ground_truth, so the scorer gets None"
                fix = f"move {elsewhere[0]} to reward_model.ground_truth" if elsewhere else _NO_TRUTH
                self.findings.add(Level.WARNING, "reward", line, fix)
            return "without a ground truth"
        if not isinstance(truth, str | int | float) or len(str(truth)) > _MAX_TRUTH:
            return f"the ground truth alone earns {self._worker._run(self._scored(row, str(truth))):g}"
        for name, form in _FORMS.items():
            if (score := self._worker._run(self._scored(row, form.format(truth)))) > 0:
                return f"the ground truth {name} earns {score:g}"
        said = "the ground truth earns nothing, " + " or ".join(_FORMS)
        if own:
            kind = "" if isinstance(truth, str) else f" (it is of type {type(truth).__name__}, an answer is text)"
            self.findings.add(
                Level.WARNING, "reward", f"{source}: {said}{kind}", advice.try_scorer(self._custom, self._rows_file)
            )
        return said

    async def _scored(self, row: Mapping[str, Any], text: str) -> float:
        """Returns the reward manager's score of an answer consisting of `text`."""
        from etude.trajectory import Provenance, Trajectory

        trajectory = Trajectory("check", list(row["raw_prompt_ids"]), messages=[dict(m) for m in row["raw_prompt"]])
        ids = self._worker.say(text)
        trajectory.append(ids, Provenance.SAMPLED, log_probs=[0.0] * len(ids))
        trajectory.messages.append({"role": "assistant", "content": text})
        trajectory.assistant_turns = 1
        scorer = self._worker.scorer
        assert scorer is not None
        try:
            await asyncio.wait_for(scorer(trajectory, row), self._seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise EtudeError(f"no score within {self._seconds:g} s (--timeout)") from None
        return float(trajectory.rewards.score or 0.0)

    def _services(self) -> str:
        from etude.config.nodes import runs_code, sandbox_problems
        from etude.trainer.resources import service_addresses, unreachable_services

        self.findings.all += unreachable_services(self._setup)
        addresses = service_addresses(self._setup)
        roles = self._setup.roles
        here = runs_code(roles.rollout.multi_turn, roles.custom_reward.path) and not any(
            "sandbox" in place.lower() for place, _ in addresses.values()
        )
        for reason in sandbox_problems() if here else ():
            fix = "run `etude doctor`: it says what each mode lacks; or `etude sandbox serve` elsewhere, and name it"
            self.findings.add(Level.ERROR, "services", f"sandbox: {reason}", fix)
        return f"{len(addresses)} reachable{', and the sandbox of this machine' if here else ''}"

    def _machine(self) -> str:
        from etude.trainer.resources import count_weights, disk, memory, slow_dtypes

        roles = self._setup.roles
        self.findings.all += slow_dtypes(roles.device, roles.model.dtype, "actor_rollout_ref.model.dtype")
        weights = count_weights(roles.model.path)
        if not weights:
            return "the model's size is not known here: it is fetched when the run starts"
        found = memory(self._setup, weights), disk(self._setup, weights)
        self.findings.all += found
        return ""

    def _roll_out(self) -> str:
        """Rolls out one trajectory per tool (a call, then an answer), or without tools a single answer."""
        from etude.preflight.trial import example_arguments, rollouts_of, row_number

        worker, tools = self._worker, [*self._worker.context.tools]
        calls = {name: example_arguments(worker.context, name) for name in tools}
        written = {name: worker.call(name, arguments) for name, arguments in calls.items()}
        if None in written.values():
            worker.read_plain_calls()
            written = {name: worker.call(name, arguments) for name, arguments in calls.items()}
        rows = [self._row_for(name) or self._train[0] for name in tools] or [self._train[0]]

        def play(request_id: str, prompt_ids: list[int], turn: int) -> list[int]:
            row = row_number(request_id)
            ids = written[tools[row]] if turn == 0 and tools else None
            return ids or worker.say(_truth(rows[row]))

        with _ended_after(2 * self._seconds + _GRACE):
            batch = worker.roll_out(rows, play)
        for name, rollout in zip(tools or [""], rollouts_of(batch)):
            self._judge(name, calls.get(name, {}), rollout)
        scores = ", ".join(f"{worker.total(each) or 0:g}" for each in rollouts_of(batch))
        records = [call for each in rollouts_of(batch) if each.trajectory for call in each.trajectory.tool_calls]
        refused = [f"{call.name} with an error: {call.response[:100]}" for call in records if call.error == "tool"]
        how = f" ({'; '.join(refused)})" if refused else ""
        return (
            f"{f'every tool was called and answered{how}' if tools else 'an answer was rolled out'}; rewards {scores}"
        )

    def _row_for(self, tool: str) -> dict[str, Any] | None:
        """Returns a row that may use the tool: the first with `tools_kwargs` for it, else the first; None if no row may."""
        from etude.data import active_tools

        usable: dict[str, Any] | None = None
        for number in range(min(len(self._train), self._rows)):
            row = self._train[number]
            if tool in active_tools(row, list(self._setup.schemas or {})):
                if tool in (row.get("tools_kwargs") or {}):
                    return row
                usable = usable or row
        return usable

    def _judge(self, tool: str, arguments: Mapping[str, Any], rollout: Rollout) -> None:
        trajectory, where = rollout.trajectory, f"tool '{tool}'" if tool else "an answer"
        talks = self._worker.options.rollout.multi_turn
        if trajectory is None:
            ending = rollout.dropped.value if rollout.dropped else ""
            alone = (
                advice.try_tool(talks, tool, arguments) if tool else advice.try_scorer(self._custom, self._rows_file)
            )
            line = f"{where}: {(rollout.cause or ending or 'dropped').removeprefix(f'{where}: ')}"
            self.findings.add_line(Level.ERROR, "rollout", line, _ENDINGS.get(ending, alone))
            return
        calls = [call for call in trajectory.tool_calls if tool and call.name == tool]  # a malformed call has no name
        ending = trajectory.stop_reason.value
        if tool and not calls:
            line = f"{where}: a call of it was not run ({ending})"
            fix = _ENDINGS.get(
                ending, "see whether the row's loop runs tools: agent_name, and extra_info.tool_selection"
            )
            self.findings.add(Level.WARNING, "rollout", line, fix)
        for call in calls[:1]:
            self._judge_call(where, arguments, call)
        if calls and (remedy := _ENDINGS.get(ending)):
            line = f"{where}: the model does not see its answer ({ending})"
            self.findings.add(Level.WARNING, "rollout", line, remedy)
        self._judge_tokens(where, trajectory)

    def _judge_call(self, where: str, arguments: Mapping[str, Any], call: ToolCallRecord) -> None:
        shown, answer = str(dict(arguments))[:200], call.response[:200]
        talks, tool = self._worker.options.rollout.multi_turn, self._worker.context.tools[call.name]
        code = advice.code_of(tool, talks)
        if call.error == "exception":
            line = f"{where} raised on {shown}: {answer}"
            fix = f"mend {code}; for a mistake of the model's raise ToolError(text), which is told to it"
            self.findings.add(Level.WARNING, "rollout", line, fix)
        elif call.error not in (None, "tool"):
            fix = f"give its schema in {advice.tool_file(talks, call.name)} examples, or defaults, that are valid"
            self.findings.add(Level.WARNING, "rollout", f"{where} refused {shown} ({call.error}): {answer}", fix)
        if call.blocked_loop:
            line = f"{where} blocks the event loop: all other trajectories wait for it"
            fix = f"await what {code} waits for, or use asyncio.to_thread"
            self.findings.add(Level.WARNING, "rollout", line, fix)

    def _judge_tokens(self, where: str, trajectory: Trajectory) -> None:
        from etude.trajectory import Provenance

        exact = trajectory.prompt_ids + [token for part in trajectory.segments for token in part.token_ids]
        sampled = [int(part.provenance is Provenance.SAMPLED) for part in trajectory.segments for _ in part.token_ids]
        if trajectory.context_ids() != exact or trajectory.response_mask != sampled:
            line = f"{where}: what would be trained on is not what the model saw"
            fix = "let `run` of the row's agent_name append to its trajectory only"
            self.findings.add(Level.ERROR, "rollout", line, fix)


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


def _task(row: Mapping[str, Any]) -> str:
    """What makes two rows the same task."""
    return repr((row["raw_prompt"], row.get("reward_model"), row.get("tools_kwargs"), repr(row.get("images"))[:500]))


def _import(plugin: str) -> None:
    from etude.registry import import_module

    import_module(plugin)


def _truth(row: Mapping[str, Any]) -> str:
    truth = (row.get("reward_model") or {}).get("ground_truth")
    return "done" if truth is None else str(truth)[:200]
