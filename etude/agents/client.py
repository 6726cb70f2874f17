"""`TrajectoryClient`: one trajectory's door to the engine, and the witness of what was drawn through it.

Invariant: a token that an output marks as sampled (mask 1) was drawn by the engine as the continuation of exactly the ids
and images that stand before it, and no draw is claimed twice; `check` refuses outputs for which that does not hold.
Training on tokens nobody sampled, or sampled after something else, is a bug, never a warning. A loop may still drop a
turn or mask one out.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etude.agents.request_ids import RequestIds
from etude.chat.encoding import common_beginning
from etude.errors import ConfigError, EngineError, EtudeError, InfrastructureError
from etude.images import ImageInput
from etude.inference import Engine, SamplingParams, TokenOutput
from etude.seeds import request_seed
from etude.trace import TraceSpan, span
from etude.trajectory import AgentLoopOutput


class TrajectoryClient:
    """What agent loops call their `server_manager`.

    Seeds: request t of a trajectory, counted as they are made, draws with a seed made from the trajectory's seed and t,
    so that no two turns, branches or sequences share random numbers, and no loop has to think of it. Several requests may be
    under way at once; the engine then knows each by a name of its own (see `RequestIds`).
    """

    def __init__(self, engine: Engine, request_id: str, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """`decode` gives the texts of a traced generation's span; without it, the span has lengths only."""
        self._engine, self.request_id, self._decode = engine, request_id, decode
        self._histories: list[_History] = []
        self._ended = False
        self._asked = self._answered = 0
        self._ids = RequestIds(engine, request_id)

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        draw: int | None = None,
        images: Sequence[ImageInput] | None = None,
        **media: Any,
    ) -> TokenOutput:
        """Samples one turn. Whatever `request_id` a loop made up, the engine knows the trajectory by its own.

        `draw` takes the place of the request's number in its seed: the same draw again gives the same random numbers.

        Raises:
            ConfigError: an unknown sampling parameter, or media that engines do not take.
            EtudeError: `prompt_ids` are no token ids.
            EngineError: the engine failed, aborted the request, or drew with a log-prob that is not finite.
            InfrastructureError: the trajectory is over (a loop that outlived its time limit asks on).
        """
        if self._ended:
            raise InfrastructureError(f"trajectory {self.request_id} is over: nothing more is sampled for it")
        params = SamplingParams.of(sampling_params)
        seed = request_seed(params.seed, self._asked if draw is None else draw)
        self._asked += 1  # before the wait: requests under way at once must not draw alike
        asked, shown = token_ids(prompt_ids, "prompt_ids"), _images(images, media) if images or media else ()
        given: dict[str, Any] = {"images": shown} if shown else {}  # an engine for text need not know the word
        with span("generation", "generate") as recorded:
            name = self._ids.enter()
            try:
                output = await self._engine.generate(name, asked, params.seeded(seed), **given)
            finally:
                self._ids.leave(name)
            if recorded is not None:
                self._describe(recorded, asked, output)
        if output.stop_reason == "aborted":
            raise EngineError(f"the engine aborted the request of trajectory {self.request_id}")
        if not all(map(math.isfinite, output.log_probs)):
            raise EngineError(
                f"the engine drew a token of trajectory {self.request_id} with a log-prob that is not finite"
            )
        if not self._histories or not self._histories[-1].grows_to(asked):
            self._histories.append(_History(asked))
        self._histories[-1].add(asked, output, digests(shown))
        self._answered += 1
        return output

    def _describe(self, recorded: TraceSpan, asked: Sequence[int], output: TokenOutput) -> None:
        recorded.set(
            turn=self._answered,
            prompt_tokens=len(asked),
            response_tokens=len(output.token_ids),
            stop_reason=output.stop_reason,
        )
        if self._decode is not None:
            recorded.set(prompt=self._decode(asked), response=self._decode(output.token_ids))

    def end(self) -> None:
        """Nothing more may be sampled."""
        self._ended = True
        self._ids.end()

    def check(self, *outputs: AgentLoopOutput) -> None:
        """Checks what a trajectory's loop returned: one output, or its several sequences.

        Raises:
            EtudeError: one marks a token as sampled that the engine did not sample there, or several claim one draw.
        """
        for output in outputs:
            self._check_drawn(output)
        if len(outputs) > 1:
            self._check_claimed_once(outputs)

    def _check_drawn(self, output: AgentLoopOutput) -> None:
        mask = _flags(output.response_mask)
        drawn = bytearray(len(mask))
        for place, log_probs, _, _ in self._drawn(output):
            drawn[place : place + len(log_probs)] = bytes([1]) * len(log_probs)
        if mask == drawn:
            return
        wrong = next((i for i, (claimed, ours) in enumerate(zip(mask, drawn)) if claimed > ours), None)
        if wrong is not None and wrong < len(output.response_ids):
            raise EtudeError(
                f"the agent loop marked response token {wrong} (id {output.response_ids[wrong]}) of {self.request_id} as "
                "sampled, but the engine did not sample it after the ids before it: keep token_ids as generate() "
                "returned them"
            )

    def _check_claimed_once(self, outputs: Sequence[AgentLoopOutput]) -> None:
        """A token may be in as many sequences as the engine drew it, after the same ids: once, unless it drew twins."""
        claimed: set[tuple[int, int]] = set()
        for number, output in enumerate(outputs):
            missing = {i for i, sampled in enumerate(output.response_mask) if sampled}
            for place, log_probs, history, context_place in self._drawn(output):
                for i in range(len(log_probs)):
                    token = (history, context_place + i)
                    if place + i in missing and token not in claimed:
                        missing.discard(place + i)
                        claimed.add(token)
            if missing:
                raise EtudeError(
                    f"sequence {number} of {self.request_id} marks response token {min(missing)} as sampled, but an earlier "
                    "sequence claims that draw: mask it out in all but one, or it would be trained on twice"
                )

    def log_probs(self, output: AgentLoopOutput) -> list[float]:
        """For each response token its log-prob as the engine drew it there; 0.0 for the others."""
        found = [0.0] * len(output.response_ids)
        for place, log_probs, _, _ in self._drawn(output):
            found[place : place + len(log_probs)] = log_probs
        return found

    def settled(self, output: AgentLoopOutput, start: int, claimed: Sequence[float]) -> list[float]:
        """The engine's log-probs of the sampled tokens from response position `start` on, of which the loop says `claimed`.

        Where the engine drew the same token after the same ids several times, it is the draw that the loop means.

        Raises:
            EtudeError: one is not the engine's, but for rounding to float32.
        """
        draws = [(place, log_probs) for place, log_probs, _, _ in self._drawn(output)]
        found = []
        for i, value in enumerate(claimed, start):
            drawn = [log_probs[i - place] for place, log_probs in draws if 0 <= i - place < len(log_probs)]
            ours = next((each for each in drawn if math.isclose(each, value, rel_tol=1e-5, abs_tol=1e-6)), None)
            if ours is None:
                raise EtudeError(
                    f"the agent loop gave response token {i} of {self.request_id} the log-prob {value:.6g}, and the engine "
                    f"drew it with {drawn[-1]:.6g}: keep log_probs as generate() returned them, or give none"
                )
            found.append(ours)
        return found

    def _drawn(self, output: AgentLoopOutput) -> Iterator[tuple[int, list[float], int, int]]:
        """(response position, log-probs, history, position in it) of every run of tokens that the engine drew there."""
        start = len(output.prompt_ids)
        context = [*output.prompt_ids, *output.response_ids]
        shown = digests(output.images)
        for number, history in enumerate(self._histories):
            shared = common_beginning(history.context, context)
            for place, log_probs, seen in history.turns:
                if seen != shown[: len(seen)]:
                    continue
                first, last = max(place, start), min(place + len(log_probs), shared)
                if first < last:
                    yield first - start, log_probs[first - place : last - place], number, first


class _History:
    """A context that grew turn by turn: its ids, and where in it the engine drew with which log-probs, having been shown
    the images of which digests."""

    def __init__(self, prompt: list[int]) -> None:
        self.context = list(prompt)
        self.turns: list[tuple[int, list[float], tuple[int, ...]]] = []

    def grows_to(self, asked: list[int]) -> bool:
        """Whether `asked` begins with this context."""
        return asked[: len(self.context)] == self.context

    def add(self, asked: list[int], output: TokenOutput, seen: tuple[int, ...]) -> None:
        self.context += asked[len(self.context) :]
        self.turns.append((len(self.context), list(output.log_probs[: len(output.token_ids)]), seen))
        self.context += output.token_ids


def token_ids(given: Any, name: str) -> list[int]:
    """`given` as a list of token ids: a sequence, an array or tensor of one row, or a tokenizer's `BatchEncoding`.

    Raises:
        EtudeError: it is something else; begins with `name`.
    """
    ids: Any = given
    if type(ids) is not list:
        ids = ids.get("input_ids") if isinstance(ids, Mapping) else ids
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if isinstance(ids, list | tuple):
        try:
            whole = array("I", ids)  # the quickest way to see that all are whole numbers and none is negative
            return list(ids) if set(map(type, ids[:1])) <= {int} else whole.tolist()
        except (TypeError, OverflowError):
            wrong = next(each for each in ids if not (hasattr(each, "__index__") and 0 <= int(each) < 1 << 32))
            found = f"{wrong!r:.40} ({type(wrong).__name__})"
    else:
        found = type(ids).__name__
    raise EtudeError(
        f"{name} must be a list of token ids, and holds {found}: of what a tokenizer returns, take input_ids "
        "(apply_chat_template with tokenize=True returns a BatchEncoding unless return_dict=False)"
    )


def _flags(mask: Sequence[int]) -> bytes:
    """A mask as zeros and ones, whatever stands for them."""
    if type(mask) is list:  # an array would give its memory
        try:
            return bytes(mask).translate(_ONES)
        except (TypeError, ValueError):
            pass
    return bytes(map(bool, mask))


_ONES = bytes([0]) + bytes([1]) * 255


def _images(images: Sequence[ImageInput] | None, media: Mapping[str, Any]) -> Sequence[ImageInput]:
    """Images as engines take them; loops written for verl say `image_data`, and hand on None, or something empty, for what
    there is not."""
    others = {name: value for name, value in media.items() if name == "image_data" or not is_empty(value)}
    shown: Sequence[ImageInput] = others.pop("image_data", images) or ()
    if others:
        raise ConfigError(f"generate() takes no '{next(iter(others))}'")
    for image in shown:
        if not isinstance(image, ImageInput):
            raise ConfigError(f"generate() takes images as `read_images` gives them, not {type(image).__name__}")
    return shown


def is_empty(value: Any) -> bool:
    """Whether `value` is nothing: None, 0, or a container of such alone, as `{"images": None}` is."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return value is None or (isinstance(value, int | float | str) and not value)


def digests(images: Sequence[ImageInput]) -> tuple[int, ...]:
    """What the images are known by."""
    return tuple([image.digest for image in images])
