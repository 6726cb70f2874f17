"""`inspect:FILE.py:FUNCTION` (or `package.function`): a task of Inspect, which that function makes, with its samples, solver
and scorers.

Arguments: `val_samples` (how many of its last samples are for validation; 0), and those of the function. The solver runs as
it is; whenever it asks for the model, that is the policy's turn. Tools that it gives are the policy's, and run here.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from etude.environments.base import Environment, InvalidAction, Step
from etude.errors import ConfigError, EtudeError, describe_error, one_line
from etude.registry import import_object
from etude.tools.base import function_schema


class Session(Environment):
    """One sample. The solver is a task of its own, which waits while the policy writes."""

    def __init__(self, task: Any, val_samples: int) -> None:
        self._task, self._val = task, val_samples
        self._asked: asyncio.Queue[bool] = asyncio.Queue()  # True: the solver wants a turn; False: it is done
        self._turn: asyncio.Future[None] | None = None
        self._solving: asyncio.Task[None] | None = None
        self._shown = 0  # messages of the state that the policy has seen

    def tasks(self, split: str) -> Iterable[Mapping[str, Any]]:
        numbers = range(len(self._task.dataset))
        cut = len(numbers) - self._val
        return [{"sample": number} for number in (numbers[:cut] if split == "train" else numbers[cut:])]

    async def reset(self, task: Mapping[str, Any], seed: int) -> Step:
        """Runs the solver until it asks for the model."""
        from inspect_ai.model import ChatMessageUser, ModelName
        from inspect_ai.scorer import Target
        from inspect_ai.solver import TaskState

        sample = copy.deepcopy(self._task.dataset[task["sample"]])  # solvers rewrite its messages and metadata
        asked = [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else [*sample.input]
        self._state = TaskState(
            ModelName("etude/policy"),
            sample.id if sample.id is not None else task["sample"],
            1,
            sample.input,
            asked,
            Target(sample.target),
            sample.choices,
            metadata=sample.metadata or {},
        )
        self._store = self._state.store  # a solver may return another state: Inspect's tools and scorers keep this one
        self._solving = asyncio.ensure_future(self._solve())
        if not await self._next():
            raise EtudeError("its solver never asks for the model by generate")
        return Step(self._new(), tools=[self._schema(each) for each in self._state.tools])

    async def step(self, text: str) -> Step:
        """Gives the turn to the solver, which may ask for another."""
        from inspect_ai.model import ChatMessageAssistant, ModelOutput

        text = text.rpartition("</think>")[2].strip()
        self._state.output = ModelOutput.from_content("etude/policy", text)
        self._state.messages.append(ChatMessageAssistant(content=text))
        self._shown = len(self._state.messages)
        assert self._turn is not None
        self._turn.set_result(None)
        return Step(self._new()) if await self._next() else Step(done=True)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Runs a tool of the solver's; raises InvalidAction if it reports an error to the model."""
        from inspect_ai.model import ChatMessageAssistant, execute_tools
        from inspect_ai.tool import ToolCall

        self._enter()
        call = ToolCall(id=f"call_{len(self._state.messages)}", function=name, arguments=dict(arguments))
        self._state.messages.append(ChatMessageAssistant(content="", tool_calls=[call]))
        [answer], _ = await execute_tools(self._state.messages, self._state.tools)
        self._state.messages.append(answer)
        if answer.error is not None:
            raise InvalidAction(answer.error.message)
        return str(answer.text)

    async def score(self) -> dict[str, Any]:
        """Returns the score of the first scorer, and those of the others, as numbers.

        Raises:
            EtudeError: one is no number, nor a word that Inspect takes for one.
        """
        self._enter()
        numbers = [_number(await scorer(self._state, self._state.target)) for scorer in self._task.scorer]
        return {"score": numbers[0], **{f"score_{n}": number for n, number in enumerate(numbers[1:], 2)}}

    async def close(self) -> None:
        if self._solving is not None:
            self._solving.cancel()
            await asyncio.gather(self._solving, return_exceptions=True)

    def _enter(self) -> None:
        """Makes `store()` and the current state this sample's for the running task, as each call comes in one of its own:
        elsewhere Inspect has one store for the whole process."""
        from inspect_ai.solver._task_state import set_sample_state
        from inspect_ai.util._store import init_subtask_store

        init_subtask_store(self._store)
        set_sample_state(self._state)

    async def _solve(self) -> None:
        from inspect_ai.solver import chain

        self._enter()
        try:
            self._state = await chain(self._task.setup or [], self._task.solver)(self._state, self._generate)
        finally:
            self._asked.put_nowait(False)

    async def _generate(self, state: Any, *_: Any, **__: Any) -> Any:
        self._state, self._turn = state, asyncio.get_running_loop().create_future()
        self._asked.put_nowait(True)
        await self._turn
        return state

    async def _next(self) -> bool:
        """Whether the solver wants a turn; raises EtudeError if it failed."""
        assert self._solving is not None
        if wants := await self._asked.get():
            return wants
        await asyncio.wait({self._solving})
        if (error := self._solving.exception()) is not None:
            raise EtudeError(f"its solver failed: {describe_error(error)}") from error
        return wants

    def _new(self) -> list[dict[str, str]]:
        new, self._shown = self._state.messages[self._shown :], len(self._state.messages)
        return [{"role": each.role, "content": each.text} for each in new]

    def _schema(self, tool: Any) -> dict[str, Any]:
        from inspect_ai.tool import ToolDef

        described = ToolDef(tool)
        made = function_schema(described.name, described.description)
        made["function"]["parameters"] = described.parameters.model_dump(exclude_none=True)
        return made


def _number(score: Any) -> float:
    """A score as Inspect's metrics count it; they count what they cannot convert as 0."""
    from inspect_ai.scorer import value_to_float

    value = None if score is None else score.value
    number = value_to_float()(value)
    zeros = ("i", "n", "no", "false")
    if number == 0.0 and not (isinstance(value, int | float) or str(value).lower() in zeros or _is_zero(value)):
        raise EtudeError(f"its scorer gave {value!r:.80}, which is no number", fix="let it return a number, or C or I")
    return number


def _is_zero(value: Any) -> bool:
    try:
        return isinstance(value, str) and float(value) == 0.0
    except ValueError:
        return False


def open_environment(name: str, *, val_samples: int = 0, **args: Any) -> partial[Session]:
    """Raises ConfigError if the function is not found, fails, or its task needs a container or has no scorer."""
    made = import_object(name)
    try:
        task = made(**args)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"inspect:{name}: args: {type(error).__name__}: {one_line(error)}") from error
    scorers: Sequence[Any] = task.scorer or ()
    if not scorers:
        raise ConfigError(f"inspect:{name}: it has no scorer")
    if task.sandbox is not None or any(sample.sandbox is not None for sample in task.dataset):
        raise ConfigError(
            f"inspect:{name}: its samples need a container", fix="train it with an agent of yours and the gateway"
        )
    return partial(Session, task, val_samples)
