"""`ImageInput`: what it counts, and that its digest tells images apart by what a model sees of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DataError
from etude.schemas import ImageInput


def made(pixels, grid=(1, 2, 4), merge_size=2):
    return ImageInput.of(pixels, grid, merge_size)


def test_tokens_are_merged_patches_and_pixels_float32():
    image = made(torch.ones(8, 5, dtype=torch.float64))
    assert image.tokens == 2
    assert image.grid == (1, 2, 4)
    assert image.pixel_values.dtype == torch.float32


@given(st.integers(0, 39), st.floats(-4, 4, width=32))
def test_one_changed_value_is_another_image(place, value):
    pixels = torch.zeros(8, 5)
    changed = pixels.clone()
    changed.view(-1)[place] = value
    same = torch.equal(changed.view(torch.int32), pixels.view(torch.int32))
    assert (made(changed).digest == made(pixels).digest) is same
    assert 0 <= made(changed).digest < 2**63


def test_the_grid_and_the_width_of_a_patch_belong_to_the_image():
    pixels = torch.zeros(8, 5)
    digests = {made(pixels).digest, made(pixels, (1, 4, 2)).digest, made(pixels, (2, 2, 2)).digest}
    digests |= {ImageInput.of(torch.zeros(20, 2), (1, 2, 10), 2).digest}
    assert len(digests) == 4


def test_the_same_values_from_elsewhere_are_the_same_image():
    pixels = torch.arange(80.0).view(8, 10)
    assert made(pixels[:, ::2]).digest == made(pixels[:, ::2].clone()).digest


@pytest.mark.parametrize(
    ("shape", "grid"), [((7, 5), (1, 2, 4)), ((8, 5), (1, 1, 8)), ((8,), (1, 2, 4)), ((0, 5), (0, 2, 4))]
)
def test_a_grid_that_does_not_fit_is_refused(shape, grid):
    with pytest.raises(DataError, match="does not fit a grid of"):
        made(torch.zeros(shape), grid)
