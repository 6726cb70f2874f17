"""The `vllm` engine: vLLM in this process (`VLLMEngine`) or as servers (`VLLMServerEngine`)."""

from etude.inference.vllm.local import VLLMEngine
from etude.inference.vllm.server import VLLMServerEngine

__all__ = ["VLLMEngine", "VLLMServerEngine"]
