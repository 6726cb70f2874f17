"""Builds the parts of a run from a resolved configuration; everything is checked before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig

from etude.algorithms import ADVANTAGE_ESTIMATORS, Estimator
from etude.chat import ChatTemplate, ToolParser
from etude.chat.check import require_answers
from etude.chat.parsers.auto import unread_call
from etude.config.checks import check_names, check_records, effective_keys
from etude.config.layers import to_container
from etude.data import RLDataset, custom_rows
from etude.errors import ConfigError, DataError
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
from etude.rewards import BUILTIN_MANAGERS, duplicate_judge
from etude.trainer.groups import Groups, open_groups
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
        self, files: Sequence[str], max_samples: int = -1, problems: list[DataError] | None = None
    ) -> RLDataset:
        """Loads the rows of `files`, checked against the tools and the scorers; `problems`: see `RLDataset`.

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
        reward, custom = self.roles.reward, self.roles.custom_reward
        own = bool(custom.path or custom.rewards or reward.model.path)
        return RLDataset(
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
        )

    def validation_set(self) -> RLDataset | None:
        """Loads the rows of `data.val_files`; None if there are no such files."""
        files = self.data.val_files
        return self.dataset(files, self.data.val_max_samples) if files else None


@dataclass(frozen=True)
class RunSetup(LoadedSetup):
    """Adds the run's configuration and worker groups."""

    config: DictConfig
    groups: Groups

    @property
    def plain(self) -> PlainSetup:
        """The options alone."""
        return PlainSetup(self.data, self.algorithm, self.needs, self.trainer, self.roles)


def prepare(config: DictConfig, *, trains: bool = True, restarts: bool = False) -> RunSetup:
    """Checks the whole configuration and opens the worker groups, which load plugins, tools and tokenizer, but no model.

    `trains`: whether there is an actor; False if the model is only rolled out. `restarts`: see `open_groups`.

    Raises:
        ConfigError, DataError: one line that names the key or file.
    """
    options, roles, bundle = check(config)
    if not trains:
        roles = replace(roles, needs_ref=False, streams=False, value_head=False)
    critic = trains and "values" in options.needs and not roles.value_head
    groups = open_groups(roles, options, trains=trains, critic=critic, keeps_batches=trains, restarts=restarts)
    with groups.closed_on_error():
        catalogue, *_ = groups.rollout.load_tools()
        setup = RunSetup(
            options.data,
            options.algorithm,
            options.needs,
            options.trainer,
            roles,
            bundle,
            catalogue,
            config,
            groups,
        )
        check_tool_messages(setup, options.data.apply_chat_template_kwargs)
    return setup


def check(config: DictConfig) -> tuple[TrainOptions, RoleOptions, TokenizerBundle]:
    """Checks the configuration without starting workers. Returns the options of the run and of its roles, and the tokenizer
    bundle.

    Raises:
        ConfigError: one line that names the key or file.
    """
    plain = to_container(config)
    options = to_options(TrainOptions, plain)
    policy, data = options.actor_rollout_ref, options.data
    effective = effective_keys(options)
    register_names(options, options.trainer, policy.rollout.agent.agent_loop_config_path)
    for line in check_records(options, effective):
        logger.warning("%s", line)
    roles = roles_of(options, plain)
    bundle = load_tokenizer_bundle(roles.model, data.apply_chat_template_kwargs, policy.rollout.multi_turn)
    if bundle.processor is not None:
        check_takes_images(policy.rollout.name)
    return options, roles, bundle


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
        critic=options.critic,
        reward=_reward_options(options.reward_model),
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
    """Checks that the chat template can render the results of the configured tools, and warns if the calls that it writes
    would not be read.

    Every accepted template renders messages of users and text environments.

    Raises:
        ConfigError: it cannot.
    """
    bundle, catalogue, talks = setup.bundle, setup.catalogue, setup.roles.rollout.multi_turn
    name = talks.format
    if not catalogue.schemas or not catalogue.tool_messages:
        return
    parser = ToolParser.get_tool_parser(name, bundle.tokenizer)
    try:
        require_answers(bundle.chat, "tool" if parser.result_tag is None else "user")
    except ConfigError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.multi_turn: tools are configured, but {error}; set multi_turn.tools_in_system=true, "
            "which needs no tool role, or put a chat_template.jinja that has one beside the model's tokenizer"
        ) from error
    if parser.result_tag is not None or talks.tools_in_system:
        return
    if not catalogue.has_environment:
        _warn_of_unread_calls(name, parser, bundle, template_kwargs)


def _warn_of_unread_calls(
    name: str, parser: ToolParser, bundle: TokenizerBundle, template_kwargs: Mapping[str, Any]
) -> None:
    """Warns if the configured format is not the template's: the model's tool calls would be missed. Only a warning, because
    prompts may teach the format. Silent for a user's own parser."""
    ours = type(parser).__module__.startswith("etude.")
    unread = unread_call(parser, bundle.tokenizer, **template_kwargs) if ours else None
    if unread is not None:
        logger.warning(
            "actor_rollout_ref.rollout.multi_turn.format=%s does not read the call that the chat template writes (%r): the "
            "model's calls are missed unless its prompts teach it that format; multi_turn.format=auto takes the template's",
            name,
            unread,
        )


def warn_of_tools(rows: RLDataset) -> None:
    """Warns once for a run's rows if neither the chat template nor their messages tell the model what its tools take."""
    if not rows.describes_tools:
        logger.warning(
            "the chat template does not show the model its tools, and rows name them without the arguments that they "
            "require; set actor_rollout_ref.rollout.multi_turn.tools_in_system=true to write schemas and call format"
        )


def warn_of_rewards(setup: LoadedSetup, train: RLDataset) -> None:
    """Warns if answers earn 0 unless a tool call returns a reward, and if a right answer counts twice."""
    reward, catalogue = setup.roles.reward, setup.catalogue
    scored = (reward.enable and reward.score_weight) or catalogue.interactions or catalogue.has_environment
    loop = (train[0].get("agent_name") if len(train) else None) or setup.roles.rollout.agent.default_agent_loop
    own_loop = loop not in (None, "tool_agent", "single_turn_agent")  # which may set the reward itself
    if not (scored or own_loop or setup.roles.plugins or catalogue.judging_tools):
        logger.warning(
            "no reward manager scores (reward_model.enable, score_weight), and no tool%s has a calc_reward: where no call "
            "returns a reward, every answer earns 0; give custom_reward_function.path, or set reward_model.enable=true",
            f" ({', '.join(catalogue.schemas)})" if catalogue.schemas else "",
        )
    if reward.enable and len(train):
        row = train[0]
        if duplicate_judge(row, row.get("tools_kwargs")):
            logger.warning(
                "a tool and the reward manager both judge reward_model.ground_truth, so a right answer counts twice; "
                "set reward_model.enable=false or one of the weights to 0"
            )


def _reward_options(options: RewardOptions) -> RewardOptions:
    """Maps RL-Factory's reward manager `parallel`, which means the environment's own score, to no reward manager."""
    is_environments = options.reward_manager == "parallel"
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
        raise ConfigError(f"trainer.device={name}: no GPU is visible to torch; use auto or cpu")
    return name
