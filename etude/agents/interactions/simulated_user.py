"""`simulated_user`: a language model at an OpenAI-compatible endpoint plays the user.

    - name: customer
      class_name: etude.agents.interactions.simulated_user.SimulatedUser
      config:
        base_url: http://127.0.0.1:8000/v1     # of the endpoint; /chat/completions is added
        model: some-model
        api_key: ${OPENAI_API_KEY}             # left out where none is needed
        system_prompt: You are a customer who wants a refund for order {order}. …

Invariant: the user model sees what a user would see: the assistant's text, without its reasoning and tool calls; and the
assistant what a user would say, without the reasoning that an endpoint leaves in the text. Requests to the endpoint are
bounded in time and size, and any failure of it is an infrastructure failure.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from etude.agents.interactions.base import BaseInteraction
from etude.chat.placeholders import text_of
from etude.errors import ConfigError, InfrastructureError
from etude.serving.json_service import JsonService

STOP = "###STOP###"
INSTRUCTIONS = (
    "You play a user who talks to an assistant. Answer with the user's next message only. "
    f"When your request has been met, or cannot be met, answer {STOP} and nothing else."
)
_KEYS = ("base_url", "model", "api_key", "system_prompt", "stop", "temperature", "max_tokens", "connections")


class SimulatedUser(BaseInteraction):
    """Its turns have reward 0.0; the reward manager scores the conversation.

    `config`: `base_url`, `model`; `api_key`, `system_prompt` (with `{name}` as placeholder for one of the row's
    `interaction_kwargs`), `stop` (the text that ends the conversation, default `###STOP###`), `temperature` (1.0),
    `max_tokens` (512), `connections` (concurrent, 100), and the session's `timeout` and `max_response_chars`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Reads the config.

        Raises:
            ConfigError: a key is missing, unknown or malformed.
        """
        super().__init__(config)
        self.check_keys(config, _KEYS)
        url = str(config.get("base_url", ""))
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError("config.base_url must be an http address, such as http://127.0.0.1:8000/v1")
        if not config.get("model"):
            raise ConfigError("config.model is missing: the name of the endpoint's model")
        self._prompt = str(config.get("system_prompt") or INSTRUCTIONS)
        self._stop = str(config.get("stop", STOP))
        self._seconds = float(config.get("timeout") or 60.0)
        self._options = {
            "model": config["model"],
            "temperature": float(config.get("temperature", 1.0)),
            "max_tokens": int(config.get("max_tokens", 512)),
        }
        headers = {"Authorization": f"Bearer {config['api_key']}"} if config.get("api_key") else {}
        self._service = JsonService(
            url.rstrip("/") + "/chat/completions", connections=int(config.get("connections", 100)), headers=headers
        )

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Returns the user model's next message; the conversation is over when it contains the stop text."""
        prompt = re.sub(r"\{(\w+)\}", lambda place: str(kwargs.get(place[1], place[0])), self._prompt)
        asked = [{"role": "system", "content": prompt}, *_seen_by_the_user(messages)]
        answer = await self._service.request("POST", seconds=self._seconds, body={**self._options, "messages": asked})
        text = _text_of(answer)
        return self._stop in text, text.replace(self._stop, "").strip(), 0.0, {}


def _seen_by_the_user(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Swaps the roles: for the user model, the assistant is the user."""
    seen = []
    for message in messages:
        text = text_of(message.get("content"))
        if message.get("role") == "assistant" and (said := str(message.get("spoken", text)).strip()):
            seen.append({"role": "user", "content": said})
        elif message.get("role") == "user":
            seen.append({"role": "assistant", "content": text})
    return seen


def _text_of(answer: Any) -> str:
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise InfrastructureError("the endpoint's answer holds no choices[0].message.content")
    said = text.rpartition("</think>")[2]
    if said.lstrip().startswith("<think>"):
        raise InfrastructureError("the endpoint's answer ends in its reasoning: raise config.max_tokens")
    return said
