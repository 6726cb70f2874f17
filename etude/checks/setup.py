"""A run's options, tokenizer and tools from a resolved configuration; everything is checked before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from etude.algorithms import ADVANTAGE_ESTIMATORS, Estimator
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
from etude.inference import check_takes_images
from etude.model_folder import local_folder, longest_context, read_config
from etude.options import (
    AlgorithmOptions,
    DataOptions,
    RewardOptions,
    RunOptions,
    TrainerOptions,
    TrainOptions,
)
from etude.options.validate import to_options
from etude.registry import import_module
from etude.rewards import BUILTIN_MANAGERS, duplicate_judge
from etude.workers.context import ToolCatalogue
from etude.workers.options import RoleOptions
from etude.workers.role import start_process
from etude.workers.tokenizer_bundle import TokenizerBundle, load_tokenizer_bundle

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlainSetup:
    """The validated options of a run; can be sent to any process. `needs`: the columns that estimator, loss and KL terms
    read beyond those of a rollout."""

    data: DataOptions
    algorithm: AlgorithmOptions
    needs: frozenset[str]
    trainer: TrainerOptions
    roles: RoleOptions

    @property
    def estimator(self) -> Estimator:
        return ADVANTAGE_ESTIMATORS.get(self.algorithm.adv_estimator)

    @property
    def min_group(self) -> int:
        """Minimum number of surviving rollouts per prompt; prompts with fewer are not trained on."""
        return 1 if self.roles.distillation.alone else self.algorithm.min_group

    @property
    def longest_sequence(self) -> int | None:
        """Maximum tokens of prompt plus response; None if only their separate limits apply."""
        folder = local_folder(str(self.roles.model.path))
        return self.roles.rollout.max_model_len or (longest_context(read_config(folder)) if folder else None)


@dataclass(frozen=True)
class LoadedSetup(PlainSetup):
    """Adds the run's tokenizer and chat template, and the tools that its rollout worker loaded."""

    bundle: TokenizerBundle
    catalogue: ToolCatalogue

    @property
    def tokenizer(self) -> Any:
        return self.bundle.tokenizer

    @property
    def chat(self) -> ChatTemplate:
        return self.bundle.chat

    @property
    def schemas(self) -> Mapping[str, dict[str, Any]] | None:
        """The configured tools' schemas by name; None when `multi_turn.enable=false`."""
        return self.catalogue.schemas if self.roles.rollout.multi_turn.enable else None

    @property
    def _result_tag(self) -> str | None:
        """The tag around tool results of a format that the prompts teach; None if the chat template writes calls."""
        return ToolParser.get_tool_parser(self.roles.rollout.multi_turn.format, self.tokenizer).result_tag

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
        if self.data.custom_cls.path is not None:
            multi_turn = self.roles.rollout.multi_turn
            tools = {
                "tool_config_path": list(multi_turn.tool_config_path or ()),
                "function_tool_path": list(multi_turn.function_tool_path or ()),
            }
            given = custom_rows(self.data, files, self.tokenizer, self.bundle.processor, tools, max_samples)
        elif not files and (environments := self.environments) is not None:
            limits = {
                each.label: each.tasks if split == "train" else each.val_tasks for each in self.roles.environments
            }
            entries = [each for each in environments.entries.values() if limits[each.name] != 0]
            given = (row for each in entries for row in task_rows(each, split, limits[each.name]))
            files = [f"env ({split})"]
        reward, custom = self.roles.reward, self.roles.custom_reward
        own = bool(custom.path or custom.rewards or reward.model.path)
        dataset = RLDataset(
            files,
            chat=self.chat,
            tool_schemas=self.schemas,
            interactions=self.catalogue.interactions,
            agent_loops=self.catalogue.agent_loops,
            options=self.data,
            images=self.bundle.images,
            max_samples=max_samples,
            rows=given,
            scored=reward.enable and reward.reward_manager in BUILTIN_MANAGERS and not own,
            shows_tools=self.catalogue.tool_messages and self._result_tag is None,
            problems=problems,
            environments=self.catalogue.environments if self.roles.environments else None,
        )
        for entry in self.environments.entries.values() if self.environments else ():
            dataset.fingerprints[f"env '{entry.name}'"] = entry.fingerprint
        return dataset

    @cached_property
    def environments(self) -> Environments | None:
        """Those of `env`, as opened in this process."""
        return load_environments(self.roles.environments)

    def validation_set(self) -> RLDataset | None:
        """Loads the rows of `data.val_files`, or makes those of `env`; None if there are none."""
        files, made = self.data.val_files, any(each.val_tasks for each in self.roles.environments)
        return self.dataset(files, self.data.val_max_samples, split="val") if files or made else None


class Run:
    """A run that is checked: each check sets what later ones need, so an attribute is missing if its check failed."""

    options: TrainOptions
    plain: dict[str, Any]
    roles: RoleOptions
    bundle: TokenizerBundle


def check_config(config: DictConfig) -> tuple[TrainOptions, RoleOptions, TokenizerBundle]:
    """Checks the configuration without starting workers. Returns the options of the run and of its roles, and the tokenizer
    bundle.

    Raises:
        ConfigError: one line that names the key or file.
    """
    run = Run()
    run.plain = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    run.options = _with_mixture(to_options(TrainOptions, run.plain))
    require("setup", run)
    return run.options, run.roles, run.bundle


def _with_mixture(options: TrainOptions) -> TrainOptions:
    """Draws from several environments by their weights, where nothing else says what a batch has."""
    data, entries = options.data, options.environments
    if len(entries) < 2 or data.train_files or data.sampler.class_name is not None:
        return options
    weights = {each.label: each.weight for each in entries}
    sampler = replace(data.sampler, class_name="mixture", weights=weights)
    return replace(options, data=replace(data, sampler=sampler))


@check("setup", "plug-ins", needs="options", fix="correct plugins, or the key that names what they register")
def _names(run: Run) -> Result:
    options, imported = run.options, True
    try:
        resolve_device(options.trainer.device)
    except ConfigError as raised:  # later checks can go on with the CPU
        yield error(raised.message, raised.fix, "machine")
        options = replace(options, trainer=replace(options.trainer, device="cpu"))
    effective = effective_keys(options)
    for plugin in options.plugins:
        try:
            import_module(plugin)
        except ConfigError as raised:
            imported, raised.fix = False, raised.fix or f"mend {plugin}"
            yield raised
    if not imported:
        return
    register_names(options, options.trainer, options.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    try:
        for line in check_records(options, effective):
            yield warning(line, f"leave out {line.partition('=')[0]}")
    except ConfigError as raised:
        yield raised
    run.roles = roles_of(options, run.plain)
    yield f"{len(options.plugins)} imported; every name is registered"


def _try_template(run: Run) -> str:
    model = run.options.actor_rollout_ref.model.path or "MODEL"
    return f"change actor_rollout_ref.model.path; `etude chat check {model}` tries its template"


@check("setup", "model", needs="roles", fix=_try_template)
def _model(run: Run) -> Result:
    model, rollout = run.roles.model, run.roles.rollout
    bundle = load_tokenizer_bundle(model, run.roles.chat_template_kwargs, rollout.multi_turn)
    if bundle.processor is not None:
        check_takes_images(rollout.name)
    run.bundle = bundle
    yield f"{model.path}: its chat template continues conversations exactly"


def roles_of(options: TrainOptions, plain: Mapping[str, Any]) -> RoleOptions:
    """Returns the options of a run's roles; `plain` is its whole configuration.

    Raises:
        ConfigError: the rollout section does not fit its engine or the device.
    """
    policy, data, run = options.actor_rollout_ref, options.data, options.trainer
    return role_options(
        options.plugins,
        run,
        plain,
        model=policy.model,
        actor=options.actor,
        correction=options.algorithm.rollout_correction,
        ref=policy.ref,
        rollout=policy.rollout,
        env=policy.env,
        environments=options.environments,
        critic=options.critic,
        reward=_reward_options(options),
        custom_reward=options.custom_reward_function,
        distillation=options.distillation,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        actor_first_step=run.critic_warmup if "values" in options.needs else 0,
        value_head="values" in options.needs and options.critic.share_trunk,
        needs_ref="ref_log_prob" in options.needs,
        standalone=options.has_rollout_group,
        streams=run.max_staleness > 0,
        adapter_versions=run.max_staleness + 1,
        stall_timeout=run.stall_timeout,
    )


def check_tool_messages(setup: LoadedSetup, template_kwargs: Mapping[str, Any]) -> None:
    """Checks that the chat template can render the results of the configured tools, and warns if the calls that it
    writes would not be read.

    Every accepted template renders messages of users and text environments.

    Raises:
        ConfigError: it cannot.
    """
    bundle, catalogue, talks = setup.bundle, setup.catalogue, setup.roles.rollout.multi_turn
    key = "actor_rollout_ref.rollout.multi_turn"
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
    unread = unread_call(parser, bundle.tokenizer, **template_kwargs) if ours else None
    if unread is not None:
        logger.warning(
            WARNING,
            f"{key}.format={talks.format} does not read the call that the chat template writes ({unread!r}): the model's "
            "calls are missed unless its prompts teach it that format",
            "multi_turn.format=auto takes the template's",
        )


def warn_of_tools(rows: RLDataset) -> None:
    """Warns once for a run's rows if neither the chat template nor their messages tell the model what its tools take."""
    if not rows.describes_tools:
        logger.warning(
            WARNING,
            "the chat template does not show the model its tools, and rows name them without the arguments they require",
            "set actor_rollout_ref.rollout.multi_turn.tools_in_system=true to write schemas and call format",
        )


def warn_of_rewards(setup: LoadedSetup, train: RLDataset) -> None:
    """Warns if answers earn 0 unless a tool call returns a reward, and if a right answer counts twice."""
    reward, catalogue = setup.roles.reward, setup.catalogue
    scored = (reward.enable and reward.score_weight) or catalogue.interactions or catalogue.has_environment
    loop = (train[0].get("agent_name") if len(train) else None) or setup.roles.rollout.agent.default_agent_loop
    own_loop = loop not in (None, "tool_agent", "single_turn_agent")  # which may set the reward itself
    if not (scored or own_loop or setup.roles.plugins or catalogue.judging_tools):
        tools = f" ({', '.join(catalogue.schemas)})" if catalogue.schemas else ""
        logger.warning(
            WARNING,
            f"no reward manager scores (reward_model.enable, score_weight), and no tool{tools} has a calc_reward: where no "
            "call returns a reward, every answer earns 0",
            "give custom_reward_function.path, or set reward_model.enable=true",
        )
    if reward.enable and len(train) and duplicate_judge(train[0], train[0].get("tools_kwargs")):
        logger.warning(
            WARNING,
            "a tool and the reward manager both judge reward_model.ground_truth, so a right answer counts twice",
            "set reward_model.enable=false or one of the weights to 0",
        )


def _reward_options(run: TrainOptions) -> RewardOptions:
    """Turns the reward manager off where the environment scores: RL-Factory's `parallel` says so, and `env` without code of
    the user's that scores."""
    options, custom = run.reward_model, run.custom_reward_function
    scores = run.env and not (custom.path or custom.rewards or options.model.path)
    is_environments = options.reward_manager == "parallel" or scores
    return replace(options, enable=False, reward_manager="naive") if is_environments else options


def register_names(options: Any, run: RunOptions, agent_loop_config_path: str | None = None) -> None:
    """Sets up this process like a worker's, because the driver computes too, and rejects unregistered names.

    Raises:
        ConfigError: a plug-in cannot be imported, or a name is unknown.
    """
    start_process(
        options.plugins,
        agent_loop_config_path,
        num_threads=run.num_threads,
        seed=run.seed,
        deterministic=run.deterministic,
    )
    check_names(options)


def role_options(plugins: Sequence[str], run: RunOptions, config: Mapping[str, Any], **sections: Any) -> RoleOptions:
    """Builds the roles' options: those common to all kinds of run, and this run's `sections`."""
    return RoleOptions(
        **sections,
        plugins=tuple(plugins),
        num_threads=run.num_threads,
        seed=run.seed,
        deterministic=run.deterministic,
        device=resolve_device(run.device),
        config=config,
    )


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
