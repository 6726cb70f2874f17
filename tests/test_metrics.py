"""Sums and counts: however the parts are cut and joined, the figures are those of the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.metrics import Max, Mean, add_metrics, finish_metrics

parts = st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)), min_size=1, max_size=12)


@given(parts, st.integers(0, 12))
def test_cutting_changes_nothing(values, cut):
    metrics = [{"mean": Mean(v * n, n), "max": Max(v), "count": n} for v, n in values]
    whole = add_metrics(metrics)
    assert add_metrics([add_metrics(metrics[:cut]), add_metrics(metrics[cut:])]) == whole
    figures, tokens = finish_metrics(whole), sum(n for _, n in values)
    assert figures["max"] == max(v for v, _ in values)
    assert figures["count"] == tokens
    if tokens:
        assert figures["mean"] == pytest.approx(sum(v * n for v, n in values) / tokens)
    else:
        assert "mean" not in figures


def test_names_need_not_be_in_every_part_and_mean_one_thing():
    assert finish_metrics(add_metrics([{"a": 1.0}, {"b": Mean(3, 2)}, {"a": 2.0}])) == {"a": 3.0, "b": 1.5}
    with pytest.raises(TypeError, match="metric 'a' is a float here and a Mean there"):
        add_metrics([{"a": 1.0}, {"a": Mean(1, 1)}])
