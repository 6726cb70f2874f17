"""Inference engines, from prompt ids to sampled ids: `native` (in process), `vllm` (in process or servers), `sglang` and
`openai` (servers), `scripted` (replays given ids); a router over several replicas; and the probe that compares an engine's
log-probs with the trainer's."""

from etude.inference.engine_setup import (
    EngineSetup,
    check_returns_kept_ids,
    check_serving,
    check_takes_images,
    check_trainable,
    evaluates_only,
)
from etude.inference.native import NativeEngine, NativeEngineOptions
from etude.inference.openai import OpenAIEngine
from etude.inference.probe import TOLERANCES, ProbeDraws, ProbeResult, StaleCheck, WeightMismatch, WeightProbe
from etude.inference.router import Router, RouterOptions
from etude.inference.scripted import ScriptedEngine
from etude.inference.served import AdapterFolder
from etude.inference.sglang import SGLangEngine
from etude.inference.types import ENGINES, Engine, Grammar, SamplingParams, TokenOutput
from etude.inference.vllm import VLLMEngine, VLLMServerEngine

__all__ = [
    "ENGINES",
    "TOLERANCES",
    "AdapterFolder",
    "Engine",
    "EngineSetup",
    "Grammar",
    "NativeEngine",
    "NativeEngineOptions",
    "OpenAIEngine",
    "ProbeDraws",
    "ProbeResult",
    "Router",
    "RouterOptions",
    "SGLangEngine",
    "SamplingParams",
    "ScriptedEngine",
    "StaleCheck",
    "TokenOutput",
    "VLLMEngine",
    "VLLMServerEngine",
    "WeightMismatch",
    "WeightProbe",
    "check_returns_kept_ids",
    "check_serving",
    "check_takes_images",
    "check_trainable",
    "evaluates_only",
]
