"""The image reader: the processor's own pixels, a length that is known before, and one object for equal pictures."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vision_stage import build_vision_stage, picture

from etude.errors import ConfigError, DataError
from etude.models import ImageReader

PROCESSOR = build_vision_stage("qwen2_5_vl")[1]


@given(width=st.integers(1, 200), height=st.integers(1, 200))
def test_the_length_is_known_from_the_size(width, height):
    reader = ImageReader(PROCESSOR)
    image = reader.read(picture(width, height))
    assert image.tokens == reader.tokens((width, height))
    plain = PROCESSOR.image_processor(images=[picture(width, height)], return_tensors="pt")
    assert torch.equal(image.pixel_values, plain["pixel_values"])
    assert image.grid == tuple(plain["image_grid_thw"][0].tolist())


def test_equal_pictures_are_one_object_and_others_are_not():
    reader = ImageReader(PROCESSOR)
    first = reader.read(picture(16, 24, seed=1))
    assert reader.read(picture(16, 24, seed=1)) is first
    assert reader.read(picture(16, 24, seed=2)).digest != first.digest
    turned = picture(24, 16, seed=1)  # the same bytes in another shape
    assert reader.read(turned).digest != first.digest


def test_what_is_in_rgb_is_not_copied(monkeypatch):
    rgb, grey = picture(16, 24, seed=1), picture(16, 24, seed=1).convert("L")
    as_rgb = grey.convert("RGB")
    converted, original = [], Image.Image.convert
    monkeypatch.setattr(
        Image.Image, "convert", lambda self, mode, **more: converted.append(self.size) or original(self, mode, **more)
    )
    reader = ImageReader(PROCESSOR)
    assert reader.read(rgb) is reader.read_file(b"a", lambda: rgb)
    assert rgb.size not in converted
    assert reader.read(grey) is reader.read(as_rgb)
    assert converted == [grey.size]


def test_what_is_remembered_is_bounded():
    one = ImageReader(PROCESSOR).read(picture(16, 16)).pixel_values.nbytes
    reader = ImageReader(PROCESSOR, remembered_bytes=2 * one)
    images = [reader.read(picture(16, 16, seed=n)) for n in range(3)]
    assert reader.read(picture(16, 16, seed=2)) is images[2]
    assert reader.read(picture(16, 16, seed=0)) is not images[0]
    small = ImageReader(PROCESSOR, remembered_bytes=1)
    assert small.read(picture(16, 16)) is small.read(picture(16, 16))  # the last one stays, whatever its size


def test_threads_get_the_same_object():
    reader, found = ImageReader(PROCESSOR), []
    threads = [threading.Thread(target=lambda: found.append(reader.read(picture(60, 60)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(image) for image in found}) == 1


def test_a_shape_that_the_processor_refuses():
    reader = ImageReader(PROCESSOR)
    for ask in (lambda: reader.tokens((2000, 4)), lambda: reader.read(picture(2000, 4))):
        with pytest.raises(DataError, match="2000 by 4 pixels: absolute aspect ratio"):
            ask()


def test_a_processor_that_miscounts_is_refused(monkeypatch):
    reader = ImageReader(PROCESSOR)
    monkeypatch.setattr(ImageReader, "tokens", lambda self, size: 7)
    with pytest.raises(ConfigError, match="says 7 tokens of a picture and makes 4"):
        reader.read(picture(16, 16))


def test_a_file_is_opened_once_while_it_is_remembered():
    reader, opened = ImageReader(PROCESSOR), []

    def opening(seed):
        def open_it():
            opened.append(seed)
            return picture(16, 16, seed=seed)

        return open_it

    found = []
    threads = [threading.Thread(target=lambda: found.append(reader.read_file(b"a", opening(1)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [1]
    assert len({id(image) for image in found}) == 1
    assert reader.read_file(b"b", opening(2)) is reader.read(picture(16, 16, seed=2))
    assert reader.read_file(b"c", opening(1)) is found[0]  # another file with the same picture
    assert opened == [1, 2, 1]
    small = ImageReader(PROCESSOR, remembered_bytes=1)
    for name, seed in ((b"a", 3), (b"b", 4), (b"a", 3)):  # a forgotten picture is opened again
        assert small.read_file(name, opening(seed)).digest == reader.read(picture(16, 16, seed=seed)).digest
    assert opened == [1, 2, 1, 3, 4, 3]
