"""The stage of agents with images: a tiny processor, pictures, and a scripted engine that notes which it was shown."""

from vision_stage import build_vision_stage, picture

from etude.chat import ChatTemplate
from etude.inference import ScriptedEngine
from etude.models import ImageReader

MODEL, PROCESSOR = build_vision_stage("qwen3_vl")
TOKENIZER = PROCESSOR.tokenizer
CHAT = ChatTemplate(TOKENIZER, processor=PROCESSOR)
READER = ImageReader(PROCESSOR)
NUMBER = PROCESSOR.image_token_id
A, B, C = (picture(*size, seed=seed) for seed, size in enumerate([(16, 16), (24, 16), (16, 40)]))


def says(text):
    return [*TOKENIZER.encode(text, add_special_tokens=False), CHAT.end_of_turn_id]


def digests(*pictures):
    return [READER.read(each).digest for each in pictures]


class Recorder(ScriptedEngine):
    """A scripted engine that remembers each request: prompt ids, and images by their digests."""

    def __init__(self, script):
        super().__init__(lambda request_id, prompt, turn: script[turn])
        self.asked = []

    async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
        self.asked.append((list(prompt_ids), None if images is None else [image.digest for image in images]))
        return await super().generate(request_id, prompt_ids, sampling_params, images=images)
