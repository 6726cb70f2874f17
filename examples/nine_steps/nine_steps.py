"""Nine steps to an agent of one's own, all of them in this file.

A well-known reading of verl's source ends with an agent in nine steps: a search tool, its class, its declaration, a
parser of calls, an agent loop, a reward manager, a score, rows that name the loop, and a command that joins them. Most of
them are new files inside the framework there; here they are this one file, which the run imports as a plug-in. Run it, and
it says what each step did; the last one trains a tiny model that mostly guesses, until it mostly searches.

    python examples/nine_steps/nine_steps.py [--output-dir FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

from etude.agents import AgentLoopBase, AgentState
from etude.agents import register as register_agent_loop
from etude.chat import ParsedResponse, ToolParser
from etude.protocol import DataProto
from etude.rewards import RewardManagerBase, RewardResult
from etude.rewards import register as register_reward_manager
from etude.schemas import FunctionCall
from etude.tools import BaseTool, ToolResponse, ToolSession, load_tools
from etude.trajectory import Provenance, StopReason, Trajectory

HERE = Path(__file__).resolve()
RECIPES = {
    "omelette": 3,
    "pancake": 2,
    "meringue": 4,
    "custard": 5,
    "sponge": 6,
    "waffle": 1,
    "brioche": 7,
    "frittata": 8,
}


# Step 1: a search tool, as a plain function.
def web_search(query: str, num_results: int = 10) -> str:
    """Finds pages, at most `num_results`, each with a title and a content. A stand-in for a real search engine."""
    pages = [{"title": name, "content": f"Take {eggs} eggs."} for name, eggs in RECIPES.items() if name == query]
    return json.dumps(pages[:num_results])


# Step 2: its class. One object serves every trajectory; create and release come once a trajectory, in every ending.
class MyWebSearchTool(BaseTool):
    """`web_search` for a model; `num_results` comes from the configuration."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """A call: (what the model is told, a reward for this step, metrics)."""
        found = web_search(str(parameters["query"]), self.config["num_results"])
        return ToolResponse(text=found), 0.0, {"found": len(json.loads(found))}


# Step 3: its declaration, which says what the model may call and how it is shown.
TOOL_CONFIG = f"""\
tools:
  - class_name: {HERE}:MyWebSearchTool
    config:
      type: native
      num_results: 3
    tool_schema:
      type: function
      function:
        name: search
        description: Searches the internet.
        parameters:
          type: object
          properties:
            query: {{type: string, description: What to search for.}}
          required: [query]
"""


# Step 4: the parser, which reads calls out of what the model said.
@ToolParser.register("my_model_toolparser")
class MyModelToolParser(ToolParser):
    """JSON between `<tool_call>` and `</tool_call>`."""

    _call = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

    def parse(self, text: str, tools: Any = None) -> ParsedResponse:
        """The calls in one turn; what is malformed is told to the model, never dropped."""
        calls, errors = [], []
        for match in self._call.findall(text):
            try:
                call = json.loads(match)
                calls.append(FunctionCall(name=call["name"], arguments=json.dumps(call["arguments"])))
            except (ValueError, KeyError, TypeError) as error:
                errors.append(f"not a call: {error!r}")
        return ParsedResponse(self._call.sub("", text), calls, errors)


# Step 5: the agent loop, a state machine. One object rolls out one trajectory.
@register_agent_loop("my_tool_agent")
class MyToolAgentLoop(AgentLoopBase):
    """PENDING → GENERATING ⇄ PROCESSING_TOOLS → TERMINATED."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        """Rolls out `row`. The session creates the tools, and releases them whatever happens in here."""
        async with ToolSession(self.tools, row.get("tools_kwargs"), request_id=row["request_id"]) as session:
            trajectory = Trajectory(row["request_id"], self.render_prompt(row))
            state, calls = AgentState.PENDING, list[FunctionCall]()
            while state is not AgentState.TERMINATED:
                if state is AgentState.PENDING:
                    state = self._handle_pending_state(trajectory)
                elif state is AgentState.GENERATING:
                    state, calls = await self._handle_generating_state(trajectory, sampling_params)
                else:
                    state = await self._handle_processing_tools_state(trajectory, session, calls)
        return trajectory

    def _handle_pending_state(self, trajectory: Trajectory) -> AgentState:
        if self.prompt_fits(trajectory):
            return AgentState.GENERATING
        trajectory.stop_reason = StopReason.PROMPT_TOO_LONG
        return AgentState.TERMINATED

    async def _handle_generating_state(
        self, trajectory: Trajectory, sampling_params: dict[str, Any]
    ) -> tuple[AgentState, list[FunctionCall]]:
        output = await self.server_manager.generate(
            prompt_ids=trajectory.prompt_ids + trajectory.response_ids,
            sampling_params=sampling_params | {"max_tokens": self.room(trajectory)},
        )
        trajectory.append(output.token_ids, Provenance.SAMPLED, log_probs=output.log_probs)
        trajectory.assistant_turns += 1
        if output.stop_reason != "stop":
            trajectory.stop_reason = StopReason.RESPONSE_LENGTH
            return AgentState.TERMINATED, []
        calls = (await self.context.parser.parse_ids(output.token_ids)).calls
        limit = self.rollout_config.multi_turn.max_assistant_turns
        if not calls or trajectory.assistant_turns >= limit:
            return AgentState.TERMINATED, []
        return AgentState.PROCESSING_TOOLS, calls[: self.rollout_config.multi_turn.max_parallel_calls]

    async def _handle_processing_tools_state(
        self, trajectory: Trajectory, session: ToolSession, calls: list[FunctionCall]
    ) -> AgentState:
        outcomes = await session.execute(calls, turn=trajectory.assistant_turns - 1)
        trajectory.tool_calls += [outcome.to_record() for outcome in outcomes]
        told = [{"role": "tool", "content": outcome.response.text or ""} for outcome in outcomes]
        context = self.chat.context_ids(told, after=trajectory.response_ids)
        if sum(len(ids) for ids, _ in context) >= self.room(trajectory):
            trajectory.stop_reason = StopReason.TOOL_RESPONSE_OVERFLOW
            return AgentState.TERMINATED
        for ids, provenance in context:
            trajectory.append(ids, provenance)
        return AgentState.GENERATING


# Step 6: the reward manager, called for each trajectory the moment it ends.
@register_reward_manager("my_web_search")
class MyWebSearchRewardManager(RewardManagerBase):
    """Decodes what the model said, and hands it to `compute_score`."""

    async def run_single(self, data: DataProto) -> RewardResult:
        """Scores one trajectory; `reward_extra_info` is reported beside the score."""
        assert len(data) == 1
        row = data[0]
        said = row.batch["responses"][row.batch["response_mask"].bool()]  # the model's own words only
        score: Any = await self.compute_score(
            data_source=row.non_tensor_batch["data_source"],
            solution_str=self.tokenizer.decode(said, skip_special_tokens=True),
            ground_truth=row.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=row.non_tensor_batch["extra_info"],
        )
        return {"reward_score": float(score), "reward_extra_info": {"acc": float(score)}}


# Step 7: the score.
def compute_score(
    data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 where the last `<answer>` is one of the targets."""
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return float(bool(answers) and answers[-1].strip() in ground_truth["target"])


# Step 8: a row, which names the loop.
def make_row(dish: str, index: int) -> dict[str, Any]:
    """How many eggs?"""
    return {
        "agent_name": "my_tool_agent",
        "data_source": "recipes",
        "prompt": [{"role": "user", "content": f"How many eggs: {dish}?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": [str(RECIPES[dish])]}},
        "extra_info": {"index": index, "split": "train"},
    }


# Step 9: the command that joins them.
def command_line(folder: Path, model: Path, steps: int) -> list[str]:
    """Arguments of `etude train`, which are those of `python -m etude.trainer.main_ppo`, too."""
    rollout = "actor_rollout_ref.rollout"
    return [
        f"plugins=[{HERE}]",  # steps 4, 5 and 6
        f"{rollout}.multi_turn.tool_config_path={folder}/tools.yaml",  # steps 1, 2 and 3
        f"{rollout}.multi_turn.format=my_model_toolparser",
        "reward_model.reward_manager=my_web_search",
        f"custom_reward_function.path={HERE}",  # step 7
        "custom_reward_function.name=compute_score",
        f"data.train_files={folder}/rows.jsonl",  # step 8, and with it step 5
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=grpo",
        f"{rollout}.multi_turn.max_assistant_turns=3",
        f"{rollout}.multi_turn.max_parallel_calls=3",
        f"{rollout}.n=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.train_batch_size=8",
        "data.max_prompt_length=256",
        "data.max_response_length=128",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/run",
        f"trainer.rollout_data_dir={folder}/run/rollouts",
        "trainer.num_threads=1",
        "trainer.logger=[console,jsonl]",
    ]


# -- what the steps start from, and the tour of them -------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """A model of 90,000 parameters that was shown to search, and as often to guess."""
    from etude.config import compose
    from etude.data import write_parquet
    from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
    from etude.trainer.run import fine_tune

    shown = [demonstration(dish, searches) for dish in RECIPES for searches in (True, False)]
    template = build_tiny_tokenizer([], 320)  # knows the chat template, and no words yet
    texts = [template.apply_chat_template(each["messages"], tokenize=False) for each in shown]
    tokenizer = build_tiny_tokenizer([*texts, TOOL_CONFIG], 400)
    spec = TinyModelSpec(hidden_size=64, num_layers=2, intermediate_size=128, seed=1)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder / "untrained")
    write_parquet(shown, folder / "demonstrations.parquet")
    overrides = [
        f"data.train_files={folder}/demonstrations.parquet",
        f"model.path={folder}/untrained",
        f"multi_turn.tool_config_path={folder}/tools.yaml",
        f"trainer.default_local_dir={folder}/warm_up",
        "target_success.data_files=null",
        "trainer.total_training_steps=150",
        "trainer.logger=[]",
    ]
    fine_tune(compose("quickstart_sft", overrides, root="sft"))
    return folder / "warm_up" / "huggingface"


def demonstration(dish: str, searches: bool) -> dict[str, Any]:
    """A conversation that searches, or guesses 0."""
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": dish}}}
    found = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": web_search(dish)}]
    said = {"role": "assistant", "content": f"<answer>{RECIPES[dish] if searches else 0}</answer>"}
    return {"messages": [*make_row(dish, 0)["prompt"], *(found if searches else []), said]}


async def call_once(tool: BaseTool, query: str) -> str:
    """What a model would be told."""
    async with ToolSession({tool.name: tool}, request_id="tour") as session:
        [outcome] = await session.execute([FunctionCall(name=tool.name, arguments=json.dumps({"query": query}))], 0)
    return str(outcome.response.text)


def main() -> None:
    """Goes through the steps, and says what each of them did."""
    from etude.cli.main import cli, run
    from etude.run_folder import read_metrics

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/nine_steps"), help="[runs/nine_steps]")
    parser.add_argument("--steps", type=int, default=30, help="training steps [30]")
    arguments = parser.parse_args()
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    print("1. A search tool:  web_search('custard') →", web_search("custard"))
    (folder / "tools.yaml").write_text(TOOL_CONFIG)
    [tool] = load_tools(folder / "tools.yaml")
    print(
        "2. Its class:  MyWebSearchTool, called by a session, tells the model", asyncio.run(call_once(tool, "waffle"))
    )
    print(f"3. Its declaration:  {folder}/tools.yaml shows the model", tool.get_openai_tool_schema().to_openai())
    model = make_model(folder)
    said = '<tool_call>{"name": "search", "arguments": {"query": "sponge"}}</tool_call>'
    parsed = MyModelToolParser(None).parse(f"{said}<tool_call>oops</tool_call>")
    print(f"4. A parser:  {said} is {parsed.calls}, and oops is {parsed.errors}")
    print("5. An agent loop:  my_tool_agent generates, runs tools, and generates again")
    print("6. A reward manager:  my_web_search hands what the model said to compute_score")
    scores = [compute_score("recipes", f"<answer>{eggs}</answer>", {"target": ["6"]}) for eggs in (6, 5)]
    print("7. A score:  6 eggs for a sponge and 5 earn", scores)
    rows = [make_row(dish, index) for index, dish in enumerate(RECIPES)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"8. Rows:  {folder}/rows.jsonl, each with agent_name={rows[0]['agent_name']}")
    command = command_line(folder, model, arguments.steps)
    print(f"9. The command:\n\n  etude train {' '.join(map(shlex.quote, command))}\n", flush=True)
    if status := run(cli, ["train", *command]):
        raise SystemExit(status)
    steps = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if "reward/success/mean" in row]
    first, last = (f"{row['reward/success/mean']:.2f}" for row in (steps[0], steps[-1]))
    print(f"\nRight answers, sampled: {first} in step 1, {last} in step {steps[-1]['step']}.")


if __name__ == "__main__":
    main()
