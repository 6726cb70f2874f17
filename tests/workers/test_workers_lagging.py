"""The teacher `self` whose weights lag behind the policy's: their average, and what it leaves of the model."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.workers.lagging import LaggingWeights


def model_of(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)).to(dtype)
    model[1].weight = model[0].weight  # tied
    model[2].requires_grad_(False)
    return model


@settings(max_examples=25)
@given(st.floats(0.001, 1), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_it_is_the_moving_average_of_the_trained_weights_and_leaves_the_model_as_it_was(rate, updates, dtype):
    torch.manual_seed(updates)
    model = model_of(dtype)
    lagging, expected = LaggingWeights(model), model[0].weight.detach().double()
    for _ in range(updates):
        with torch.no_grad():
            model[0].weight.add_(torch.randn(3, 3).to(dtype))
        lagging.update(rate)
        expected = (1 - rate) * expected + rate * model[0].weight.detach().double()
    torch.testing.assert_close(lagging.state_dict()["0.weight"].double(), expected, atol=1e-5, rtol=1e-5)
    assert set(lagging.state_dict()) == {"0.weight", "0.bias", "1.bias"}
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with lagging.applied():
        assert torch.equal(model[1].weight, lagging.state_dict()["0.weight"].to(dtype))
        assert torch.equal(model[2].weight, before["2.weight"])
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    other = LaggingWeights(model)
    other.load_state_dict(lagging.state_dict())
    assert all(torch.equal(each, other.state_dict()[name]) for name, each in lagging.state_dict().items())
