"""`Setup`: a run's options, tokenizer and tools; everything is checked before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from etude.agents.compaction import request_of, summary_room
from etude.chat import ChatTemplate, ToolParser
from etude.chat.check import require_answers
from etude.chat.parsers.auto import unread_call
from etude.chat.template import TOOLS_IN_SYSTEM
from etude.checks.findings import Result, check, error, require, warning
from etude.checks.settings import check_names, check_records, effective_keys
from etude.data import RLDataset, custom_rows
from etude.environments import Environments
from etude.environments.loader import load_environments
from etude.environments.tasks import task_rows
from etude.errors import WARNING, ConfigError, DataError
from etude.inference import check_serving, check_takes_images
from etude.options import Options, TrainOptions
from etude.registry import import_module
from etude.rewards import BUILTIN_MANAGERS, duplicate_judge
from etude.workers.context import ToolCatalogue
from etude.workers.role import Placement, start_process
from etude.workers.tokenizer_bundle import TokenizerBundle, load_tokenizer_bundle

logger = logging.getLogger(__name__)


class Setup:
    """A run's options and what its start makes of them. Each step sets what later ones need, so an attribute is missing if
    its step failed. `bundle` is the policy's; `catalogue` says what its rollout worker loaded."""

    options: TrainOptions
    placement: Placement
    bundle: TokenizerBundle
    catalogue: ToolCatalogue

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    @property
    def tokenizer(self) -> Any:
        return self.bundle.tokenizer

    @property
    def chat(self) -> ChatTemplate:
        return self.bundle.chat

    @property
    def schemas(self) -> Mapping[str, dict[str, Any]] | None:
        """The configured tools' schemas by name; None when `multi_turn.enable=false`."""
        return self.catalogue.schemas if self.options.rollout.multi_turn.enable else None

    @property
    def _result_tag(self) -> str | None:
        """The tag around tool results of a format that the prompts teach; None if the chat template writes calls."""
        return ToolParser.get_tool_parser(self.options.rollout.multi_turn.format, self.tokenizer).result_tag

    def dataset(
        self,
        files: Sequence[str],
        max_samples: int = -1,
        problems: list[DataError] | None = None,
        *,
        split: str = "train",
    ) -> RLDataset:
        """Loads the rows of `files`, checked against the tools and the scorers; without files, those that the environments
        of `env` make for `split`. `problems`: see `RLDataset`.

        Raises:
            ConfigError: no scorer is known for a row's data source.
            DataError: a file or row is invalid.
        """
        given = None
        if self.options.data.custom_cls.path is not None:
            multi_turn = self.options.rollout.multi_turn
            tools = {
                "tool_config_path": list(multi_turn.tool_config_path or ()),
                "function_tool_path": list(multi_turn.function_tool_path or ()),
            }
            given = custom_rows(self.options.data, files, self.tokenizer, self.bundle.processor, tools, max_samples)
        elif not files and self.environments is not None:
            given, files = self._made_rows(split), [f"env ({split})"]
        reward, custom = self.options.reward_model, self.options.custom_reward_function
        own = bool(custom.path or custom.rewards or reward.model.path)
        dataset = RLDataset(
            files,
            chat=self.chat,
            tool_schemas=self.schemas,
            interactions=self.catalogue.interactions,
            agent_loops=self.catalogue.agent_loops,
            options=self.options.data,
            images=self.bundle.images,
            max_samples=max_samples,
            rows=given,
            scored=self.options.scores and reward.reward_manager in BUILTIN_MANAGERS and not own,
            shows_tools=self.catalogue.tool_messages and self._result_tag is None,
            problems=problems,
            environments=self.catalogue.environments if self.options.environments else None,
        )
        for entry in self.environments.entries.values() if self.environments else ():
            dataset.fingerprints[f"env '{entry.name}'"] = entry.fingerprint
        return dataset

    @cached_property
    def environments(self) -> Environments | None:
        """Those of `env`, as opened in this process."""
        return load_environments(self.options.environments)

    def _made_rows(self, split: str) -> Iterator[dict[str, Any]]:
        for options, entry in zip(
            self.options.environments, self.environments.entries.values() if self.environments else ()
        ):
            if (most := options.tasks if split == "train" else options.val_tasks) != 0:
                yield from task_rows(entry, split, most)

    def validation_set(self) -> RLDataset | None:
        """Loads the rows of `data.val_files`; of a run without files, makes those of `env`. None if there are none."""
        data = self.options.data
        made = not data.train_files and any(True for _ in self._made_rows("val"))
        return self.dataset(data.val_files, data.val_max_samples, split="val") if data.val_files or made else None


def check_options(options: Options) -> Setup:
    """Imports the plug-ins, loads the tokenizer and checks all that can be checked without starting workers.

    Raises:
        ConfigError: one line that names the key or file; or these are other options.
    """
    if not isinstance(options, TrainOptions):
        raise ConfigError("these are not the options of a training run", fix="give what etude.config.compose returns")
    setup = Setup(options)
    require("setup", setup)
    return setup


@check("setup", "plug-ins", needs="options", fix="correct plugins, or the key that names what they register")
def _names(run: Setup) -> Result:
    options, imported, device = run.options, True, "cpu"
    try:
        device = resolve_device(options.trainer.device)
    except ConfigError as raised:  # later checks can go on with the CPU
        yield error(raised.message, raised.fix, "machine")
    effective = effective_keys(options)
    for plugin in options.plugins:
        try:
            import_module(plugin)
        except ConfigError as raised:
            imported, raised.fix = False, raised.fix or f"mend {plugin}"
            yield raised
    if not imported:
        return
    register_names(options, options.rollout.agent.agent_loop_config_path)
    try:
        for line in check_records(options, effective):
            yield warning(line, f"leave out {line.partition('=')[0]}")
    except ConfigError as raised:
        yield raised
    check_placement(options, device)
    run.placement = Placement(device)
    yield f"{len(options.plugins)} imported; every name is registered"


_TRY_TEMPLATE = "change actor_rollout_ref.model.path; `etude chat check {}` tries its template"


@check("setup", "model", needs="placement", fix=lambda run: _TRY_TEMPLATE.format(run.options.model.path or "MODEL"))
def _model(run: Setup) -> Result:
    model, rollout = run.options.model, run.options.rollout
    bundle = load_tokenizer_bundle(model, run.options.data.apply_chat_template_kwargs, rollout.multi_turn)
    if bundle.processor is not None:
        check_takes_images(rollout.name)
    run.bundle = bundle
    yield f"{model.path}: its chat template continues conversations exactly"


def check_placement(options: TrainOptions, device: str) -> None:
    """Checks what the engine, once it is registered, and the device say to the options.

    Raises:
        ConfigError: the rollout section does not fit its engine, or a key the device; names the key.
    """
    check_serving(options.rollout)
    if options.rollout.weight_transfer == "cuda_ipc" and not device.startswith("cuda"):
        raise ConfigError("actor_rollout_ref.rollout.weight_transfer=cuda_ipc needs a GPU; use folder")
    for key, model in {"actor_rollout_ref.model": options.model, "critic.model": options.critic.model}.items():
        if model.use_liger and not device.startswith("cuda"):
            raise ConfigError(f"{key}.use_liger=true needs a GPU: Liger's kernels do not run on {device}")
    if options.rollout.enable_rollout_routing_replay and options.rollout.name != "native":
        raise ConfigError("actor_rollout_ref.rollout.enable_rollout_routing_replay needs rollout.name=native")


def check_tool_messages(setup: Setup) -> None:
    """Checks that the chat template can render the results of the configured tools, and warns if the calls that it
    writes would not be read.

    Every accepted template renders messages of users and text environments.

    Raises:
        ConfigError: it cannot.
    """
    bundle, catalogue, talks = setup.bundle, setup.catalogue, setup.options.rollout.multi_turn
    key = "actor_rollout_ref.rollout.multi_turn"
    if talks.enable and talks.compact.at_tokens is not None:
        check_compaction(setup)
    if not (catalogue.schemas or catalogue.acting_tools) or not catalogue.tool_messages:
        return
    parser = ToolParser.get_tool_parser(talks.format, bundle.tokenizer)
    try:
        require_answers(bundle.chat, "tool" if parser.result_tag is None else "user")
    except ConfigError as error:
        raise ConfigError(
            f"{key}: tools are configured, but {error.message}",
            fix="set multi_turn.tools_in_system=true, which needs no tool role, or put a chat_template.jinja that has one "
            "beside the model's tokenizer",
        ) from error
    if parser.result_tag is not None or talks.tools_in_system:
        return
    # The configured format may not be the template's, and the model's calls be missed. Only a warning, because prompts may
    # teach the format; silent for a user's own parser.
    if catalogue.acting_tools and not bundle.chat.shows_tools:
        raise ConfigError(
            f"{key}: the chat template does not show the model the environment's tools", fix=f"set {TOOLS_IN_SYSTEM}"
        )
    ours = type(parser).__module__.startswith("etude.") and not catalogue.has_environment
    unread = unread_call(parser, bundle.tokenizer, **setup.options.data.apply_chat_template_kwargs) if ours else None
    if unread is not None:
        logger.warning(
            WARNING,
            f"{key}.format={talks.format} does not read the call that the chat template writes ({unread!r}): the model's "
            "calls are missed unless its prompts teach it that format",
            "multi_turn.format=auto takes the template's",
        )


def check_compaction(setup: Setup) -> None:
    """Checks that the chat template can ask for a summary, after tools too, and that it and the request fit.

    Raises:
        ConfigError: they do not; names the key.
    """
    chat, rollout = setup.bundle.chat, setup.options.rollout
    compact, key = rollout.multi_turn.compact, "actor_rollout_ref.rollout.multi_turn.compact"
    has_tools = setup.catalogue.schemas or setup.catalogue.acting_tools
    if setup.catalogue.tool_messages and has_tools and setup._result_tag is None:
        try:
            chat.context_ids([{"role": "tool", "content": "1"}, request_of(compact)])
        except ConfigError as error:
            raise ConfigError(
                f"{key}: the chat template writes no user message after a tool's answer, and none can ask for a summary "
                f"there: {error.message}",
                key=f"{key}.at_tokens",
                fix="set multi_turn.tools_in_system=true, which needs no tool role",
            ) from error
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    needed = summary_room(compact, chat)
    assert compact.at_tokens is not None
    if compact.at_tokens + needed > longest:
        raise ConfigError(
            f"{key}.at_tokens={compact.at_tokens}: the request for a summary and the summary take up to {needed} tokens "
            f"more, and prompt and response may have {longest}",
            key=f"{key}.at_tokens",
            fix=f"set {longest - needed} or less, or lower {key}.summary_tokens",
        )


def warn_of_tools(rows: RLDataset) -> None:
    """Warns once for a run's rows if neither the chat template nor their messages tell the model what its tools take."""
    if not rows.describes_tools:
        logger.warning(
            WARNING,
            "the chat template does not show the model its tools, and rows name them without the arguments they require",
            "show a call in a worked example, as turns before each question (a small model needs one), or set "
            "actor_rollout_ref.rollout.multi_turn.tools_in_system=true to write schemas and call format",
        )


def warn_of_rewards(setup: Setup, train: RLDataset) -> None:
    """Warns if answers earn 0 unless a tool call returns a reward, and if a right answer counts twice."""
    options, catalogue = setup.options, setup.catalogue
    reward = options.reward_model
    scored = (setup.options.scores and reward.score_weight) or catalogue.interactions or catalogue.has_environment
    loop = (train[0].get("agent_name") if len(train) else None) or options.rollout.agent.default_agent_loop
    own_loop = loop not in (None, "tool_agent", "single_turn_agent")  # which may set the reward itself
    if not (scored or own_loop or options.plugins or catalogue.judging_tools):
        tools = f" ({', '.join(catalogue.schemas)})" if catalogue.schemas else ""
        logger.warning(
            WARNING,
            f"no reward manager scores (reward_model.enable, score_weight), and no tool{tools} has a calc_reward: where no "
            "call returns a reward, every answer earns 0",
            "give custom_reward_function.path, or set reward_model.enable=true",
        )
    sources = train.sources if options.scores else []
    firsts = {source: number for number, source in reversed([*enumerate(sources)])}
    asked = (train[number] for number in firsts.values())
    if any(duplicate_judge(row, row.get("tools_kwargs")) for row in asked):
        logger.warning(
            WARNING,
            "a tool or an interaction judges reward_model.ground_truth beside the reward manager, so a right answer counts "
            "twice if it is paid there, too",
            "leave ground_truth out of create_kwargs, or set reward_model.enable=false or one of the weights to 0",
        )


def register_names(options: Options, agent_loop_config_path: str | None = None) -> None:
    """Sets up this process like a worker's, because the driver computes too, and rejects unregistered names.

    Raises:
        ConfigError: a plug-in cannot be imported, or a name is unknown.
    """
    start_process(options.plugins, options.trainer, agent_loop_config_path)
    check_names(options)


def resolve_device(name: str) -> str:
    """Resolves `auto` to a GPU if there is one, else the CPU.

    Raises:
        ConfigError: `name` is a GPU, and none is visible.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.device={name}: no GPU is visible to torch",
            key="trainer.device",
            fix="set trainer.device to auto or cpu",
        )
    return name
