"""The probe: it passes engines that sample from the weights they were given, and refuses every way of not doing so."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_stage import score_by

from etude.errors import EngineError, EtudeError
from etude.inference import NativeEngine, ScriptedEngine, TokenOutput, WeightMismatch, WeightProbe

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]


def check(engine, model, version=0, **options):
    probe = WeightProbe(PROMPTS, score_by(model), **{"tolerance": 1e-3, **options})
    return asyncio.run(probe.check(engine, version))


def reference(model):
    """A copy with plain attention, which the engine does not touch."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_an_engine_with_the_right_weights_passes(model, temperature):
    twin = reference(model)
    result = check(NativeEngine(model), twin, temperature=temperature, tokens=6)
    assert result.tokens == 18
    assert result.largest < 1e-4
    assert result.mean <= result.largest


def test_a_rollout_that_is_greedy_is_probed_at_temperature_one(model):
    assert check(NativeEngine(model), reference(model), temperature=0.0).largest > 0.0


def test_an_engine_that_silently_keeps_old_weights_is_caught(model):
    class Keeps(NativeEngine):
        """Computes with a copy, and does not copy again."""

        def __init__(self, model):
            super().__init__(copy.deepcopy(model))

    engine = Keeps(model)
    trained = reference(model)
    assert check(engine, trained).largest < 1e-4
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    asyncio.run(engine.update_weights(None, 1))
    with pytest.raises(
        WeightMismatch, match=r"the engine does not serve version 1 .* by up to .* nats .* tolerance is 0\.001"
    ):
        check(engine, trained, 1)


def test_answers_kept_from_old_weights_are_caught(model):
    """The probe's prompts are the same every time, so that what was computed for them earlier must have been forgotten."""

    class Remembers(NativeEngine):
        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            kept = self.__dict__.setdefault("kept", {})
            key = tuple(prompt_ids)
            if key not in kept:
                kept[key] = await super().generate(request_id, prompt_ids, sampling_params)
            return replace(kept[key], weight_versions=[self._version] * len(kept[key].token_ids))

    engine, trained = Remembers(model), reference(model)
    assert check(engine, trained).largest < 1e-4
    with torch.no_grad():
        for parameter in (*model.parameters(), *trained.parameters()):
            parameter.mul_(1.2)
    asyncio.run(engine.update_weights(None, 1))
    with pytest.raises(WeightMismatch, match="does not serve version 1"):
        check(engine, trained, 1)


def test_log_probs_from_before_the_temperature_are_caught(model):
    class Raw(NativeEngine):
        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            output = await super().generate(request_id, prompt_ids, sampling_params)
            raw = score_by(self.twin)([(list(prompt_ids), output.token_ids)], 1.0)[0]
            return replace(output, log_probs=raw)

    engine = Raw(model)
    engine.twin = reference(model)
    assert check(engine, engine.twin, temperature=1.0).largest < 1e-4
    with pytest.raises(WeightMismatch, match="another distribution"):
        check(engine, engine.twin, temperature=0.5)


def test_another_version_than_the_one_sent_is_caught(model):
    engine = NativeEngine(model)
    with pytest.raises(WeightMismatch, match="given the weights of version 3 and samples from version 0"):
        check(engine, reference(model), 3)


def test_broken_weights_of_the_trainer_are_named_as_such(model):
    engine = NativeEngine(copy.deepcopy(model))
    broken = reference(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(WeightMismatch, match="the trainer's own log-probs at version 0 are not finite"):
        check(engine, broken)


def test_an_engine_that_says_nothing_is_no_pass(model):
    with pytest.raises(WeightMismatch, match="sampled no token"):
        check(ScriptedEngine(lambda request_id, prompt, turn: []), model)


def test_a_failure_is_passed_on_and_leaves_no_trajectory_open(model):
    engine = ScriptedEngine(lambda request_id, prompt, turn: RuntimeError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        check(engine, model)
    assert set(engine.opened) == set(engine.closed)
    assert issubclass(WeightMismatch, EtudeError)  # one line for the user, and no retry


@given(shift=st.floats(-5, 5), tolerance=st.floats(1e-6, 1.0))
def test_any_difference_beyond_the_tolerance_is_refused(shift, tolerance):
    class Shifted(ScriptedEngine):
        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            return TokenOutput([1, 2], [-1.0, -2.0 + shift], "length", [5, 5])

    engine = Shifted(lambda *_: [])
    probe = WeightProbe([[1]], lambda rows, temperature: [[-1.0, -2.0]], tolerance=tolerance)
    if abs((-2.0 + shift) + 2.0) <= tolerance:
        assert asyncio.run(probe.check(engine, 5)).largest <= tolerance
    else:
        with pytest.raises(WeightMismatch):
            asyncio.run(probe.check(engine, 5))


def test_an_engine_that_keeps_its_weights_is_caught_below_the_tolerance(model):
    """In bfloat16's tolerance of 0.5 nats, over several small steps; an engine that takes them passes."""
    for keeps in (False, True):
        engine, trained = NativeEngine(copy.deepcopy(model)), reference(model)
        probe = WeightProbe(PROMPTS, score_by(trained), tolerance=0.5)
        asyncio.run(probe.check(engine, 0))
        caught = ""
        torch.manual_seed(0)
        for version in range(1, 7):
            with torch.no_grad():
                for own, sampled in zip(trained.parameters(), engine._model.parameters()):
                    change = 1e-3 * torch.randn_like(own)
                    own.add_(change)
                    sampled.add_(0 if keeps else change)
            asyncio.run(engine.update_weights(None, version))
            try:
                asyncio.run(probe.check(engine, version))
            except WeightMismatch as error:
                caught = str(error)
                break
        assert ("still draws as at version 0" in caught) is keeps
