"""A run's options with other values in their sections, without naming the sections that hold these."""

from dataclasses import replace


def changed(options, **values):
    """`options` with `values`: sections and keys of the policy (`model`, `actor`, `rollout`, `hybrid_engine` …), sections of
    the root, and keys of `trainer`; `correction` is the algorithm's."""
    if (correction := values.pop("correction", None)) is not None:
        values["algorithm"] = replace(options.algorithm, rollout_correction=correction)
    for section in ("actor_rollout_ref", "trainer"):
        held = getattr(options, section)
        own = {name: values.pop(name) for name in [*values] if hasattr(held, name)}
        if own:
            values[section] = replace(held, **own)
    return replace(options, **values)
