"""Engines that turn prompt ids into sampled ids: `native` (in process), `scripted` (plays given ids)."""

from etude.inference.native import NativeEngine, NativeEngineOptions
from etude.inference.scripted import ScriptedEngine
from etude.inference.types import ENGINES, Engine, SamplingParams, TokenOutput

__all__ = [
    "ENGINES",
    "Engine",
    "NativeEngine",
    "NativeEngineOptions",
    "SamplingParams",
    "ScriptedEngine",
    "TokenOutput",
]
