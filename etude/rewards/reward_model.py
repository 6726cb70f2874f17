"""`RewardModel`: a discriminative reward model, a Hugging Face sequence classifier with one label, as a scorer.

Invariant: a score is the classifier's output for the conversation alone, in the model's own chat template and tokens,
whatever else is in its batch. Control tokens spelled out in a message are encoded as text, so that an answer can neither
end its turn nor write the next; a summary that the policy wrote into a user's message is left out. Of a conversation longer
than `max_length` the end is kept, after the token ([CLS], BOS) that begins it, and it is reported as `truncated`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from etude.chat.control import ControlTokens
from etude.chat.placeholders import text_of
from etude.errors import WARNING, ConfigError, EtudeError, InfrastructureError, describe_error, one_line
from etude.models import load_sequence_classifier, load_tokenizer, model_config
from etude.timeouts import BlockingCalls, set_outcome

if TYPE_CHECKING:
    from etude.rewards.view import TrajectoryView

logger = logging.getLogger(__name__)

LABEL = "reward_model"
"""Its name among the score components."""


class RewardModel:
    """Callable as a scorer; conversations that wait at the same time share forward passes of up to `rows`."""

    def __init__(
        self,
        path: str,
        *,
        rows: int = 16,
        max_length: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        """Reads the tokenizer; `load` loads the weights.

        Raises:
            ConfigError: the folder, its tokenizer or its chat template is missing or broken.
        """
        self.path, self._rows = path, rows
        self._given: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        self.tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        positions = model_config(path).get("max_position_embeddings")
        limits = [limit for limit in (max_length, positions) if isinstance(limit, int)]
        self._max_length = min(limits, default=None)
        self._control = ControlTokens(self.tokenizer)
        self._warn_of_plain_turns()
        self._thread = BlockingCalls("etude-reward-model", limit=1)
        self._lock, self._waiting = threading.Lock(), list[tuple[list[int], Future[float]]]()
        self._model: Any = None

    def __reduce__(self) -> Any:
        raise TypeError("a reward model stays in its process")

    def load(self) -> None:
        """Loads the weights, once.

        Raises:
            ConfigError: they are missing or broken, or the classifier does not have exactly one label.
        """
        with self._lock:
            if self._model is None:
                self._model = load_sequence_classifier(self.path, **self._given).requires_grad_(False)
                self._model.config.use_cache = False
                self._pad = self._model.config.get_text_config().pad_token_id

    async def __call__(self, trajectory: TrajectoryView | None = None, **_: Any) -> dict[str, Any]:
        """Returns `score`, and whether the conversation was `truncated`.

        Raises:
            ConfigError: the chat template refuses the conversation, or the weights cannot be loaded.
            InfrastructureError: the forward pass failed.
        """
        if trajectory is None:
            raise ConfigError(f"the reward model {self.path} reads whole conversations, and is given none")
        ids = self.encode(trajectory.as_asked)
        kept = self._cut(ids)
        future: Future[float] = Future()
        with self._lock:
            self._waiting.append((kept, future))
        # The pass started here takes the longest waiting conversations; another call's pass may take this one.
        scored = asyncio.wrap_future(future)
        await asyncio.gather(self._thread.run(self._score_waiting), scored)
        return {"score": scored.result(), "truncated": len(kept) < len(ids)}

    def _cut(self, ids: list[int]) -> list[int]:
        """Returns the end of a conversation that is too long. An encoder's score is read at its [CLS], and a model that was
        trained with a BOS reads every text with one: that token stays."""
        if self._max_length is None or len(ids) <= self._max_length:
            return ids
        first = [token for token in ids[:1] if token in (self.tokenizer.cls_token_id, self.tokenizer.bos_token_id)]
        return [*first, *ids[len(ids) - self._max_length + len(first) :]]

    def _warn_of_plain_turns(self) -> None:
        """Warns where no control token ends the model's turn before the next begins: any answer can then write it."""
        marks, roles = ("\ue000", "\ue001"), ("user", "assistant", "user")
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": role, "content": mark} for role, mark in zip(roles, ("?", *marks))], tokenize=False
            )
        except Exception:  # said of the first conversation, if it refuses that too
            return
        between = text.partition(marks[0])[2].partition(marks[1])[0]
        if between and not self._control.spelled(between):
            problem = (
                f"the reward model {self.path}: its template ends the model's turns in plain text ({between!r:.60})"
            )
            fix = (
                "an answer can write it, and praise from the user: take a model whose template has control tokens there"
            )
            logger.warning(WARNING, problem, fix)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Encodes the conversation with the reward model's chat template.

        Raises:
            ConfigError: the template refuses it.
        """
        disarmed = [
            {**self._control.disarm(dict(message)), "content": self._control.disarm(text_of(message.get("content")))}
            for message in messages
        ]
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(disarmed, tokenize=True, return_dict=False)
        except Exception as error:  # templates may raise anything
            raise ConfigError(
                f"{self.path}: the reward model's chat template refuses a conversation: {one_line(error)}"
            ) from error
        return ids

    def _score_waiting(self) -> None:
        """Runs one forward pass over the longest waiting conversations, which are of similar length."""
        with self._lock:
            waiting = sorted((each for each in self._waiting if not each[1].cancelled()), key=lambda each: len(each[0]))
            self._waiting, chosen = waiting[: -self._rows], waiting[-self._rows :]
        chosen = [each for each in chosen if each[1].set_running_or_notify_cancel()]
        try:
            scores: Sequence[float | Exception] = self.forward([ids for ids, _ in chosen]) if chosen else []
        except EtudeError as error:
            scores = [error] * len(chosen)
        except Exception as error:
            scores = [InfrastructureError(f"the reward model {self.path}: {describe_error(error)}")] * len(chosen)
        for (_, future), score in zip(chosen, scores):
            set_outcome(future, score)

    def forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score of each row of token ids, from one batch padded on the right."""
        import torch

        self.load()
        model, pad = self._model, self._pad
        if pad is None:  # the model reads a row's last non-padding token, so padding must not equal any of those
            pad = next(number for number in itertools.count() if number not in {row[-1] for row in rows})
            model.config.get_text_config().pad_token_id = pad
        ids = torch.full((len(rows), max(map(len, rows))), pad)
        attention = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            attention[row, : len(tokens)] = 1
        with torch.inference_mode():
            logits = model(input_ids=ids.to(model.device), attention_mask=attention.to(model.device)).logits
        scores: list[float] = logits[:, 0].double().tolist()
        return scores
