"""Options of rollouts: `rollout` with `multi_turn`, `agent`, `trace` and `val_kwargs`, and `env`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from etude.options.declare import Names, When, key, options
from etude.options.training import Precision
from etude.options.types import (
    Count,
    CountOrOff,
    Flag,
    FreeForms,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    RawTexts,
    Share,
    Text,
    Texts,
)

_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class EngineKind:
    """What is known of an engine: whether it needs addresses of servers ("optional" where it can also run in this process),
    takes `engine_kwargs`, and gives text without ids and log-probs."""

    servers: Literal["none", "optional", "required"] = "none"
    takes_kwargs: bool = False
    text_only: bool = False


BUILTIN = {
    "native": EngineKind(),
    "openai": EngineKind("required", True, text_only=True),
    "scripted": EngineKind(),
    "sglang": EngineKind("required", True),
    "vllm": EngineKind("optional", True),
}
"""The engines that come with Étude; a test compares them with their classes."""

MULTI_TURN = When("with multi_turn.enable=true", lambda own, run: own.enable)
TOOLS = When("where tools, an environment or plugins are configured", lambda own, run: has_tools(own, run))
STANDALONE = When(
    "with trainer.backend=ray and actor_rollout_ref.hybrid_engine=false", lambda own, run: run.has_rollout_group
)
NATIVE = When("with the native engine (name=native)", lambda own, run: own.name == "native")
SERVED = When("with servers (server_urls or server_command)", lambda own, run: own.has_servers)
COPIES = When(
    "with engines that have a copy of the weights (name=vllm or sglang)",
    lambda own, run: own.name in ("vllm", "sglang"),
)
SAMPLED = When("with do_sample=true", lambda own, run: own.do_sample)
TRACED = When("where a backend is set", lambda own, run: own.backend is not None)
ENVIRONMENT = When("where env.name or env.tool_manager is set", lambda own, run: own.chosen)


def has_tools(own: MultiTurnOptions, run: Any) -> bool:
    """Whether a model may call something: a configured tool, an environment, or what an agent of the user's brings."""
    environment = hasattr(run, "actor_rollout_ref") and run.actor_rollout_ref.env.chosen
    return own.enable and bool(own.tool_config_path or own.function_tool_path or environment or run.plugins)


_ROLE = re.compile(r"[A-Za-z0-9._-]{1,32}")
COMMAND = When("with openai_agent.command", lambda own, run: bool(own.command))
WALLED = When("with openai_agent.sandbox.enable=true", lambda own, run: own.enable)
COMPACTS = When("with compact.at_tokens", lambda own, run: own.at_tokens is not None)


@options
class CompactOptions:
    """Compaction: a conversation that has grown long goes on from a summary that the model writes, and learns to write."""

    at_tokens: Count | None = key(
        "Context (prompt and response) above which the model is asked for a summary, after its tools or its user have "
        "answered; the conversation goes on from the first prompt and that summary. Null: off.",
        default=None,
        unit="tokens",
    )
    keep_last: Natural = key(
        "Messages that stay after the summary as they were, at least, with the model's turn that they answer. Fewer if they "
        "would exceed at_tokens.",
        default=0,
        when=COMPACTS,
    )
    summary_tokens: Count = key(
        "Max tokens of a summary; one that is cut there is used as it is.", default=256, unit="tokens", when=COMPACTS
    )
    prompt: Text = key(
        "The user message that asks for the summary.",
        default="Stop here and summarise this conversation: what you have found out, what you have done, and what is left "
        "to do. Only your summary will be kept.",
        when=COMPACTS,
    )


@options
class MultiTurnOptions:
    """Conversations with tools."""

    enable: Flag = key(
        "False: no tools and a single turn, whatever the rows say.",
        default=True,
        verl_default="false",
        verl_meaning="agent loops do not read it",
    )
    format: Text = key(
        "Tool-call format of the model: a registered tool parser (docs/parsers.md), or auto: whatever the chat template "
        "uses.",
        default="hermes",
        names=Names("etude.chat.parsers:TOOL_PARSERS"),
    )
    tools_in_system: Flag = key(
        "True: schemas and the call format of multi_turn.format go into the system message, for a chat template that shows "
        "the model no tools (SmolLM2's, plain ChatML); calls in demonstrations are written in that format, too, and without "
        "a tool role the results become user messages.",
        default=False,
        when=MULTI_TURN,
    )
    tool_config_path: Texts | None = key(
        "Tool configuration (YAML, JSON, .pydata or .py file), or a list of them. Null: none.",
        default=None,
        path="file",
        when=MULTI_TURN,
    )
    function_tool_path: Texts | None = key(
        "Python file, or list of files, with @function_tool functions. Null: none.",
        default=None,
        path="code",
        when=MULTI_TURN,
    )
    interaction_config_path: Text | None = key(
        "Interaction YAML file: simulated users that reply between the model's turns. Null: none.",
        default=None,
        path="file",
        when=MULTI_TURN,
    )
    max_assistant_turns: Count | None = key(
        "Max model turns per trajectory. Null: limited by the response length only.", default=None, when=MULTI_TURN
    )
    max_user_turns: Count | None = key(
        "Max tool or user turns per trajectory. Null: limited by the response length only.",
        default=None,
        when=MULTI_TURN,
    )
    max_turn_tokens: Count | None = key(
        "Max tokens of one model turn; a turn that is cut there ends the trajectory. Null: limited by what the response "
        "(data.max_response_length) and the model's window (rollout.max_model_len) leave.",
        default=None,
        unit="tokens",
        when=MULTI_TURN,
    )
    max_trajectory_tokens: Count | None = key(
        "Max tokens that the model samples per trajectory, over all turns and sequences; tools' and users' do not count. "
        "Null: limited by data.max_response_length per sequence, which counts them.",
        default=None,
        unit="tokens",
        when=MULTI_TURN,
    )
    max_seconds: Positive | None = key(
        "Time limit per trajectory: past it, the trajectory ends at its next tool or user message and is still trained on. "
        "Null: no limit (exceeding rollout.trajectory_timeout is an infrastructure failure).",
        default=None,
        unit="seconds",
        when=MULTI_TURN,
    )
    malformed_calls: Literal["tell", "penalise", "end"] = key(
        "On a call that cannot be parsed: tell the model what is wrong, also give it a negative step reward, or end the "
        "trajectory.",
        default="tell",
        when=TOOLS,
    )
    malformed_call_penalty: NonNegative = key(
        "Subtracted from the reward for each malformed call.",
        default=0.1,
        when=When("with malformed_calls=penalise", lambda own, run: own.malformed_calls == "penalise"),
    )
    max_consecutive_malformed_calls: Count | None = key(
        "Ends a trajectory after that many malformed calls in a row, without one that could be run between them. Null: no "
        "limit.",
        default=None,
        when=When(
            "with tools and malformed_calls other than end",
            lambda own, run: has_tools(own, run) and own.malformed_calls != "end",
        ),
    )
    max_parallel_calls: Count = key(
        "Max calls executed per turn; each further one is answered with a line that says so (rollout/calls_not_executed).",
        default=8,
        when=TOOLS,
        verl_default="1",
    )
    max_tool_response_length: Count = key(
        "Max length of a tool response, in tool_response_length_unit; longer ones are truncated.",
        default=2048,
        when=TOOLS,
        verl_default="256",
        verl_meaning="counts characters",
    )
    tool_response_length_unit: Literal["tokens", "characters"] = key(
        "Unit of max_tool_response_length: tokens as the chat template encodes them, or characters as in verl.",
        default="tokens",
        when=TOOLS,
    )
    min_answer_tokens: Count = key(
        "Room that must remain for the next answer after a tool or user message. Tool responses are truncated further to "
        "make room; if almost nothing of one would be left, the trajectory ends.",
        default=1,
        unit="tokens",
        when=MULTI_TURN,
    )
    tool_response_truncate_side: Literal["left", "right", "middle"] = key(
        "Which part of an overlong tool response is removed. middle keeps both ends.",
        default="middle",
        when=TOOLS,
        verl_meaning="the same; up to 0.7.1 it named the side that is kept, so its left is right here",
    )
    compact: CompactOptions = key("", default_factory=CompactOptions, when=MULTI_TURN)


@options
class AgentSandboxOptions:
    """Walls around a command agent: the sandbox of docs/sandbox.md."""

    enable: Flag = key(
        "True: the command runs inside the sandbox. It sees its workspace, the system's programs and the folders below, and "
        "connects to the gateway alone; the verifier runs outside.",
        default=False,
    )
    folders: RawTexts = key(
        "Folders that the command can read besides, at their own paths, such as that of its installation.",
        default=(),
        when=WALLED,
    )
    wall_seconds: Positive = key(
        "Max time of the command; what it had written into its workspace is still verified.",
        default=300.0,
        unit="seconds",
        when=WALLED,
    )
    memory_mb: Count = key("Max memory of the command and all that it starts.", default=2048, unit="MiB", when=WALLED)
    disk_mb: Count = key("Max size of all its files together.", default=512, unit="MiB", when=WALLED)


@options
class OpenAIAgentOptions:
    """The agent that the loop openai_agent runs (docs/gateway.md), written for the OpenAI API."""

    function: Text | None = key("Your function, path/to/file.py:name. Null: none.", default=None, path="code")
    command: RawTexts = key(
        "Your command as a list of words; it gets OPENAI_BASE_URL and OPENAI_API_KEY in its environment. Empty: none.",
        default=(),
    )
    workspace: Text | None = key(
        "Folder of which each rollout's command, and the verifier, get a copy of their own as working folder. Null: they "
        "run where the worker does.",
        default=None,
        when=COMMAND,
    )
    verifier: RawTexts = key(
        "Command, a list of words, that runs in the working folder once the agent has ended, without its keys, and writes "
        "the reward into ETUDE_REWARD_FILE; the agent then gets no such file. Empty: none.",
        default=(),
        when=COMMAND,
    )
    verifier_seconds: Positive = key(
        "Max time of the verifier. One that takes longer, or fails, is tried in the untouched workspace: if it fails there, "
        "too, that is a failure of infrastructure, else what the agent left is, with a reward of at most 0.",
        default=120.0,
        unit="seconds",
        when=COMMAND,
    )
    train: Literal["all", "tools", "main"] = key(
        "Sequences of an agent that are trained on: all; tools, those whose requests have tools (sub-agents, not titles or "
        "summaries), all where none has; main, the last of those alone.",
        default="all",
    )
    sandbox: AgentSandboxOptions = key("", default_factory=AgentSandboxOptions)

    def __post_init__(self) -> None:
        if self.function is not None and self.command:
            raise ValueError("set function or command, not both")
        if self.sandbox.enable and not self.command:
            raise ValueError("sandbox.enable needs a command: a function runs in this process")


@options
class AgentOptions:
    """Which agent loop rolls out a row."""

    default_agent_loop: Text | None = key(
        "Loop for rows without agent_name. Null: tool_agent for rows with tools or an interaction, else "
        "single_turn_agent.",
        default=None,
        names=Names(
            "etude.agents.base:AGENT_LOOPS",
            ("driving_agent", "env_agent", "openai_agent", "single_turn_agent", "tool_agent"),
        ),
        verl_default="single_turn_agent",
    )
    agent_loop_config_path: Text | None = key(
        "YAML list of your own loops, {name, _target_, keyword arguments of the class}. Null: none.",
        default=None,
        path="file",
    )
    openai_agent: OpenAIAgentOptions = key("", default_factory=OpenAIAgentOptions)
    roles: Texts = key(
        "Names of the agents of a rollout that have rewards of their own, such as players: requests name theirs in the "
        "header X-Agent-Role, loops in Trajectory.role. Empty: none.",
        default=(),
    )

    def __post_init__(self) -> None:
        for number, role in enumerate(self.roles):
            if not _ROLE.fullmatch(role) or role in self.roles[:number]:
                raise ValueError(f"roles: '{role:.40}' must be up to 32 letters, digits and . _ -, and there once")
        agent = self.openai_agent
        if self.default_agent_loop == "openai_agent" and agent.function is None and not agent.command:
            raise ValueError("default_agent_loop=openai_agent needs openai_agent.function or openai_agent.command")


@options
class TraceOptions:
    """Nested spans of generations, tool calls and functions decorated with @rollout_trace_op."""

    backend: Text | None = key(
        "jsonl (a file), otel, mlflow or weave (each needs its extra). Null: no tracing.",
        default=None,
        names=Names("etude.trace:TRACE_BACKENDS"),
    )
    path: Text = key(
        "File for jsonl, one line per span.",
        default="traces.jsonl",
        written="${trainer.default_local_dir}/traces.jsonl",
        when=When("with backend=jsonl", lambda own, run: own.backend == "jsonl"),
    )
    token2text: Flag = key(
        "True: spans of generations hold prompt and response as text, which may expose private data.",
        default=False,
        when=TRACED,
    )
    sample_rate: Share = key("Fraction of trajectories to trace; the same ones in every run.", default=1.0, when=TRACED)
    max_samples_per_step_per_worker: Count | None = key(
        "Max prompts traced per step and rollout worker. Null: no limit.",
        default=None,
        when=TRACED,
    )


@options
class ValSamplingOptions:
    """Sampling for validation."""

    n: Count = key("Answers per validation prompt.", default=1)
    temperature: NonNegative = key("Sampling temperature. 0: greedy.", default=1.0, when=SAMPLED, verl_default="0")
    top_p: PositiveShare = key("Nucleus sampling. 1.0: off.", default=1.0, when=SAMPLED)
    top_k: CountOrOff = key("Sample from the k most likely tokens only. -1: off.", default=-1, when=SAMPLED)
    do_sample: Flag = key("False: greedy decoding, so that validation metrics carry no sampling noise.", default=False)


@options
class RolloutOptions:
    """How answers are sampled."""

    name: Text = key(
        "Inference engine: native (in this process, on the CPU or one GPU), vllm (in this process, or servers), sglang "
        "(servers), openai (servers, for `etude eval` only), or one of yours.",
        default="native",
        names=Names("etude.inference:ENGINES", tuple(BUILTIN)),
        verl_default="???",
        verl_meaning="must be set, and has other names",
    )
    mode: Literal["async", "sync"] = key(
        "async: each trajectory is scored the moment it ends; sync: the whole batch is rolled out, then scored.",
        default="async",
    )
    n: Count = key("Answers per training prompt.", default=8, verl_default="1")
    temperature: Positive = key(
        "Sampling temperature. 1.0 samples from the model's own distribution.", default=1.0, when=SAMPLED
    )
    top_p: PositiveShare = key(
        "Nucleus sampling: from the smallest set of tokens with this total probability. 1.0: off.",
        default=1.0,
        when=SAMPLED,
    )
    top_k: CountOrOff = key("Sample from the k most likely tokens only. -1: off.", default=-1, when=SAMPLED)
    do_sample: Flag = key("False: greedy decoding.", default=True)
    stop: RawTexts | None = key(
        'Texts that end a turn, at the token that completes one of them, e.g. ["</search>"]. Null: those of '
        "multi_turn.format (search_r1: </search>, </answer>, </tool_call>; rl_factory: </answer>; others none), in loops "
        "that call tools.",
        default=None,
    )
    prompt_length: Count = key(
        "Another name of data.max_prompt_length; setting both to different values is an error.",
        default=1024,
        written="${data.max_prompt_length}",
        alias_of="data.max_prompt_length",
        unit="tokens",
        verl_default="512",
    )
    response_length: Count = key(
        "Another name of data.max_response_length.",
        default=2048,
        written="${data.max_response_length}",
        alias_of="data.max_response_length",
        unit="tokens",
        verl_default="512",
    )
    max_model_len: Count | None = key(
        "Max length of prompt and response together. Null: prompt_length + response_length.",
        default=None,
        unit="tokens",
    )
    max_num_seqs: Count = key("Max sequences decoded at once; the others wait.", default=256)
    max_num_batched_tokens: Count = key(
        "Max prefill tokens (prompts and tool responses) per forward pass, besides those being decoded; bounds memory. "
        "Longer inputs are prefilled in chunks.",
        default=8192,
        unit="tokens",
    )
    kv_cache_memory_mb: Count | None = key(
        "KV cache memory of the native engine; when it is full, trajectories wait or are recomputed. Null: no limit.",
        default=None,
        unit="MiB",
        when=NATIVE,
    )
    enable_prefix_caching: Flag = key(
        "Keep the KV cache of finished prompts until its memory is needed or the weights change (which helps repeated "
        "validations). Prompts in use are always shared.",
        default=True,
        when=NATIVE,
    )
    enable_rollout_routing_replay: Flag = key(
        "Of a mixture of experts: record which experts the engine's tokens go to, and repeat that in the actor's log-probs "
        "and updates, gate weights computed anew.",
        default=False,
        when=NATIVE,
    )
    dtype: Precision | None = key(
        "Precision of sampling. Null: model.dtype. Any other value costs a copy of the weights.",
        default=None,
        verl_default="bfloat16",
    )
    nnodes: Natural = key(
        "Nodes that the rollout workers are on, where they are a group of their own.", default=0, when=STANDALONE
    )
    min_nnodes: Count | None = key(
        "Roll out on fewer nodes, at least these, where the cluster does not have nnodes (any more). Null: nnodes.",
        default=None,
        when=STANDALONE,
    )
    n_gpus_per_node: Count | None = key(
        "Rollout workers on each of those. Null: as many as trainer.n_gpus_per_node.",
        default=None,
        when=STANDALONE,
        verl_default="${oc.select:trainer.n_gpus_per_node,8}",
    )
    seed: Natural = key("Base of the per-request seeds.", default=1, written="${trainer.seed}", verl_default="42")
    infrastructure_retries: Natural = key(
        "Retries, from fresh state, of a trajectory whose infrastructure failed, before it is dropped and counted.",
        default=1,
    )
    trajectory_timeout: Positive = key(
        "Max time per trajectory; past it, the trajectory counts as an infrastructure failure.",
        default=600.0,
        unit="seconds",
    )
    partial_rollout: Flag = key(
        "New weights reach trajectories in flight, which go on with them, tool calls and all. False: no trajectory starts "
        "until those in flight have ended, and the step waits for them.",
        default=True,
        when=When("with trainer.max_staleness above 0", lambda own, run: run.trainer.max_staleness > 0),
    )
    max_concurrent_trajectories: Count = key(
        "Max trajectories in flight in each process that rolls out; the others wait.", default=1024
    )
    server_urls: Texts = key(
        "Addresses of vllm, sglang or openai servers, e.g. [http://127.0.0.1:8000]; several are replicas behind a router. "
        "Empty with vllm: vLLM runs in this process.",
        default=(),
    )
    server_command: RawTexts = key(
        "Command, a list of words, by which every rollout worker starts a vllm or sglang server of its own, and starts it "
        "again when it dies; {port} and {model} in it are filled in. Empty: none.",
        default=(),
        when=COPIES,
    )
    server_model: Text | None = key(
        "Model name on the openai server. Null: the only model that it serves.",
        default=None,
        when=When("with name=openai", lambda own, run: own.name == "openai"),
    )
    server_api_key_env: Text | None = key(
        "Environment variable that holds the servers' API key. Null: no key.",
        default=None,
        path="environment",
        when=SERVED,
    )
    server_timeout: Positive = key(
        "Timeout of one request to a server, connecting and queueing included.",
        default=300.0,
        unit="seconds",
        when=SERVED,
    )
    weight_transfer: Literal["folder", "adapter", "cuda_ipc"] = key(
        "How weights reach an engine that holds its own copy: folder (a checkpoint is written and read), adapter (LoRA's "
        "alone, to servers that apply them to model.path; they keep max_staleness + 1), cuda_ipc (vllm in this process maps "
        "the trainer's GPU tensors; never run, since no GPU was at hand).",
        default="folder",
        when=COPIES,
    )
    weight_sync_dir: Text | None = key(
        "Folder for those checkpoints, one copy of the model; this process and the servers must see it under the same path. "
        "Null: a temporary folder, in memory (/dev/shm) if there is room.",
        default=None,
        path="output",
        when=COPIES,
    )
    weight_sync_timeout: Positive = key(
        "Timeout of a weight sync; servers read gigabytes from disk.",
        default=600.0,
        unit="seconds",
        when=COPIES,
    )
    weight_probe: Flag = key(
        "After each weight sync, compare the engine's log-probs of a few tokens with the trainer's, and stop if they "
        "differ.",
        default=True,
    )
    weight_probe_tolerance: Positive | None = key(
        "Largest difference that the probe accepts. Null: by the coarser of model.dtype and dtype, 1e-3 for float32, 0.1 "
        "for float16, 0.5 for bfloat16. Set it if a server computes in another dtype.",
        default=None,
        unit="nats",
        when=When("with weight_probe=true", lambda own, run: own.weight_probe),
    )
    free_cache_engine: Flag = key(
        "True: the engine frees device memory between rollouts (vllm: needs engine_kwargs.vllm.enable_sleep_mode or the "
        "server's flag; sglang: the KV cache alone, with the server's --enable-memory-saver).",
        default=False,
        when=COPIES,
        verl_default="true",
    )
    engine_kwargs: FreeForms = key(
        "Arguments of vLLM in this process, named as in AsyncEngineArgs, e.g. {vllm: {gpu_memory_utilization: 0.5}}. "
        "Servers take theirs on their own command line.",
        default_factory=dict,
    )
    tool_config: Texts | None = key(
        "Another name of multi_turn.tool_config_path; setting both to different values is an error.",
        default=None,
        alias_of=f"{_ROLLOUT}.multi_turn.tool_config_path",
    )
    max_turns: Count | None = key(
        "Another name of multi_turn.max_assistant_turns.",
        default=None,
        alias_of=f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    )
    multi_turn: MultiTurnOptions = key("", default_factory=MultiTurnOptions)
    agent: AgentOptions = key("", default_factory=AgentOptions)
    trace: TraceOptions = key("", default_factory=TraceOptions)
    val_kwargs: ValSamplingOptions = key("", default_factory=ValSamplingOptions)

    @property
    def has_servers(self) -> bool:
        """Whether the engine is one of servers."""
        return bool(self.server_urls or self.server_command)


@options
class EnvOptions:
    """Environments that reply between the model's turns, with RL-Factory's or Gymnasium's interface."""

    name: Text | None = key(
        "A registered environment: base (runs the called tools, ends with an <answer>) or one of yours. Null: none.",
        default=None,
        names=Names("etude.agents.environments.env:ENVIRONMENTS", ("base",)),
    )
    config_path: Texts | None = key(
        "Another name of rollout.multi_turn.tool_config_path.",
        default=None,
        alias_of=f"{_ROLLOUT}.multi_turn.tool_config_path",
    )
    tool_manager: Text | None = key(
        "The registered tool manager that parses and runs an Env's tool calls. Null: adaptive, which fits every model.",
        default=None,
        names=Names("etude.agents.environments.tool_manager:TOOL_MANAGERS", ("adaptive", "llama3", "qwen2_5", "qwen3")),
    )
    use_process_reward: Flag = key(
        "Add Env.get_step_reward at the token where each turn ends.", default=False, when=ENVIRONMENT
    )
    timeout: Positive = key(
        "Timeout of each call of an environment's methods.", default=60.0, unit="seconds", when=ENVIRONMENT
    )

    @property
    def chosen(self) -> bool:
        """Whether there is an environment."""
        return self.name is not None or self.tool_manager is not None
