"""`Placeholders`: expands the image placeholders in token ids.

A chat template renders an image part of a message as one placeholder token, usually between two other special tokens; a
model needs as many placeholders as the image has tokens. Content with images is a list of parts, `{"type": "image"}` and
`{"type": "text", "text": …}`; the images themselves are passed separately, in the order of their parts.

Invariant: a placeholder in the ids always comes from an image part. Image tokens spelled out in a text are encoded as
ordinary characters, in prompts too, since they would have no image. `etude.models.reader` decides how many tokens an image
has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etude.chat.control import ControlTokens, TokenTexts
from etude.chat.rendering import Message, Renderer
from etude.chat.turns import PROBE
from etude.errors import ConfigError, DataError
from etude.trajectory import Provenance, Run

IMAGE_PROBE = [{"type": "image"}, {"type": "text", "text": PROBE}]


def is_image(part: object) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def image_count(message: Message) -> int:
    """Number of images in a message's content."""
    content = message.get("content")
    return 0 if content is None or isinstance(content, str) else sum(map(is_image, content))


def content_of(text: str, images: int) -> str | list[dict[str, Any]]:
    """Builds a message's content of `images` images followed by `text`; a plain string if there are no images."""
    if not images:
        return text
    return [{"type": "image"}] * images + ([{"type": "text", "text": text}] if text else [])


SUMMARY = "Summary of the conversation so far:"
"""The line above what the model itself wrote into a user message."""


def append_to_last_user(messages: list[dict[str, Any]], text: str, images: int = 0) -> int:
    """Appends a text, with images in front of it, to the last user message, or as a new message if there is none.

    Returns the number of images in the conversation before the new ones.
    """
    last = next((n for n in reversed(range(len(messages))) if messages[n]["role"] == "user"), None)
    if last is None:
        messages.append({"role": "user", "content": content_of(text, images)})
        return sum(map(image_count, messages[:-1]))
    message = messages[last]
    before, content = sum(map(image_count, messages[: last + 1])), message["content"]
    if isinstance(content, str) and not images:
        message["content"] = f"{content}\n{text}" if content else text
    else:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        message["content"] = [*parts, *[{"type": "image"}] * images, {"type": "text", "text": f"\n{text}"}]
    return before


def text_of(content: Any) -> str:
    """Returns a message's content as text, with `[image]` for each image."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return str(content or "")
    return "".join("[image]" if is_image(part) else str(part.get("text") or "") for part in content)


class Placeholders:
    """One model's image placeholder, with `id`, and the `texts` of all tokens that the template writes for an image."""

    def __init__(self, number: int, texts: Iterable[str]) -> None:
        self.id = number
        self.texts = TokenTexts(texts)

    @classmethod
    def of(cls, processor: Any, renderer: Renderer, control: ControlTokens) -> Placeholders:
        """Finds the placeholder of a Hugging Face processor, and the tokens that the template writes around it.

        Raises:
            ConfigError: the tokenizer does not have the processor's image token as a special token.
        """
        image_token = str(processor.image_token)
        number = renderer.tokenizer.convert_tokens_to_ids(image_token)
        if number not in control.ids:
            raise ConfigError(
                f"the tokenizer has no special token '{image_token}', which the processor puts for images"
            )
        tokens = {image_token, str(getattr(processor, "video_token", None) or image_token)}
        try:
            without, within = (
                Counter(control.spelled(renderer.stub_text([{"role": "user", "content": parts}], generate=False)))
                for parts in (IMAGE_PROBE[1:], IMAGE_PROBE)
            )
        except ConfigError:  # the template takes no image parts, but texts may still spell out the tokens
            return cls(number, tokens)
        return cls(number, tokens | set(within - without))

    def expand(self, runs: Sequence[Run], owners: Sequence[Provenance], image_tokens: Sequence[int]) -> list[Run]:
        """Repeats the n-th placeholder in `runs` `image_tokens[n]` times, as a separate run with provenance `owners[n]`.

        Raises:
            DataError: there are more or fewer placeholders than images.
        """
        if (places := sum(ids.count(self.id) for ids, _ in runs)) != len(image_tokens):
            raise DataError(f"the messages have places for {places} images, and {len(image_tokens)} are given")
        images = iter(zip(image_tokens, owners, strict=True))
        whole: list[Run] = []
        for ids, provenance in runs:
            rest = ids
            while self.id in rest:
                place = rest.index(self.id)
                tokens, owner = next(images)
                whole += [(rest[:place], provenance), ([self.id] * tokens, owner)]
                rest = rest[place + 1 :]
            whole.append((rest, provenance))
        return [(ids, provenance) for ids, provenance in whole if ids]
