"""`ObservationEncoder`: new tool and user messages to the ids that a policy reads between two of its turns.

Invariant: the ids and labels are those of `IncrementalRenderer.runs`, cached for repeated messages, such as an answer whose
tokens are counted before it is added.
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.chat.cache import LRUCache, rendering_key
from etude.chat.capabilities import TemplateCapabilities
from etude.chat.contents import Message
from etude.chat.incremental import IncrementalRenderer, owner_of
from etude.chat.placeholders import Placeholders, image_count
from etude.chat.provenance import Run
from etude.chat.turns import Stub, TurnEnd, Turns
from etude.errors import ConfigError, DataError
from etude.trajectory import Provenance

_CONTEXTS_KEPT = 1024
_LONGEST_KEPT = 4096  # characters of messages whose ids are kept


class ObservationEncoder:
    """Those of one template, which can do what `capabilities` says; `images` is None for a text model."""

    def __init__(
        self,
        turns: Turns,
        incremental: IncrementalRenderer,
        capabilities: TemplateCapabilities,
        images: Placeholders | None,
    ) -> None:
        self._turns, self._incremental, self._capabilities, self._images = turns, incremental, capabilities, images
        self._kept = LRUCache[list[Run]](_CONTEXTS_KEPT)

    def runs(self, messages: Sequence[Message], after: Sequence[int] | None, image_tokens: Sequence[int]) -> list[Run]:
        """As `ChatTemplate.context_ids`."""
        messages = self._join_unless_taken(messages)
        roles = [str(message.get("role")) for message in messages]
        if not roles or "assistant" in roles:
            raise ValueError("context_ids takes one or more tool or user messages and no assistant message")
        stub = self._stub(roles)
        end = self._turns.end(stub, roles[0])
        key = rendering_key(messages)
        if key is not None and len(key) > _LONGEST_KEPT:
            key = None
        found = self._kept.get(key)
        if found is None:
            found = self._incremental.runs(stub, messages)
            self._kept.put(key, found)
        if self._images is not None:
            owners = [owner_of(message) for message in messages for _ in range(image_count(message))]
            found = self._images.expand_runs(found, owners, image_tokens)
        elif image_tokens:
            raise DataError("a text model takes no images")
        runs = [(list(ids), label) for ids, label in found]
        opening = self._turns.opening(end, after)
        return [(list(opening), Provenance.TEMPLATE), *runs] if opening else runs

    def whole(self, messages: Sequence[Message]) -> list[int]:
        """As `ChatTemplate.continued_whole`."""
        return self._incremental.whole(self.stub_for(messages), self._join_unless_taken(messages))

    def end_before(self, messages: Sequence[Message]) -> TurnEnd:
        """The end of a turn that `messages` follow.

        Raises:
            ConfigError: no turn can be followed by them.
        """
        return self._turns.end(self.stub_for(messages), str(messages[0].get("role")))

    def stub_for(self, messages: Sequence[Message]) -> Stub:
        """The stub turn that `messages` follow.

        Raises:
            ConfigError: there is none that tools may answer.
        """
        return self._stub([str(message.get("role")) for message in messages])

    def _stub(self, roles: Sequence[str]) -> Stub:
        if "tool" not in roles:
            return Stub.ANSWER
        if self._capabilities.tool_stub is None:
            raise ConfigError(f"the chat template does not support the tool role: {self._capabilities.tool_problem}")
        return self._capabilities.tool_stub

    def _join_unless_taken(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self._capabilities.repeats_users or len(messages) < 2 else _join_users(messages)


def _join_users(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.get("role") == message.get("role") == "user" and all(
            type(m.get("content")) is str for m in (last, message)
        ):
            joined[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
        else:
            joined.append(message)
    return joined
