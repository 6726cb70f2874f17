"""`image_zoom_in_tool` on real pictures: the very pixels, boxes that grow or are refused, and hostile files."""

import base64
import io
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from etude.errors import ConfigError, DataError
from etude.schemas import FunctionCall
from etude.tools import ToolSession, builtin_config, load_tools
from etude.tools.builtin.image_zoom import ImageZoomInTool, crop_box, resized
from etude.tools.builtin.images import load_image

WIDTH, HEIGHT = 200, 100


def picture(size=(WIDTH, HEIGHT)):
    """Every pixel tells where it stands."""
    image = Image.new("RGB", size)
    image.putdata([(x % 256, y % 256, 7) for y in range(size[1]) for x in range(size[0])])
    return image


def png(image):
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


async def zoomed(parameters, config=None, image=None):
    tool = ImageZoomInTool(config or {})
    instance_id, _ = await tool.create("i", image=image or png(picture()))
    response, reward, metrics = await tool.execute(instance_id, parameters)
    await tool.release(instance_id)
    assert tool._instance_dict == {}
    return response, reward, metrics


async def test_the_region_itself():
    response, reward, metrics = await zoomed({"bbox_2d": [50, 20, 110, 80], "label": "a\n cat"})
    assert response.text == "Zoomed in on the image to the region [50, 20, 110, 80] with label a cat."
    [crop] = response.image
    assert crop.size == (60, 60)
    assert (crop.getpixel((0, 0)), crop.getpixel((59, 59))) == ((50, 20, 7), (109, 79, 7))
    assert (reward, metrics) == (0.0, {"success": True})


async def test_thousandths():
    response, _, _ = await zoomed({"bbox_2d": [250, 200, 550, 800]}, {"coordinates": "thousandths"})
    assert response.image[0].size == (60, 60)
    assert response.image[0].getpixel((0, 0)) == (50, 20, 7)


async def test_pixels_of_the_image_that_the_processor_resized():
    config = {"coordinates": "resized", "max_pixels": 6272}  # the model sees 112 x 56
    response, _, _ = await zoomed({"bbox_2d": [28, 14, 84, 42]}, config)
    assert response.image[0].size == (100, 50)
    assert response.image[0].getpixel((0, 0)) == (50, 25, 7)


@given(st.tuples(st.integers(28, 3000), st.integers(28, 3000)), st.sampled_from([3136, 100_000]))
def test_sizes_are_those_of_the_processor(size, min_pixels):
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    theirs = processing.smart_resize(size[1], size[0], factor=28, min_pixels=min_pixels, max_pixels=1_003_520)
    assert resized(size, 28, min_pixels, 1_003_520) == theirs[::-1]


@pytest.mark.parametrize(
    "box",
    [
        None,
        [],
        "[1, 2, 3, 4]",
        [1, 2, 3],
        [1, 2, 3, 4, 5],
        [1, 2, "3", 4],
        [1, 2, True, 4],
        [1, 2, float("nan"), 4],
        [1, 2, 10**400, 4],
        [50, 20, 50, 80],
        [110, 20, 50, 80],
        [300, 20, 400, 80],
        [-50, -50, -1, -1],
        [0, 0, 200, 1],
    ],
)
async def test_a_box_that_cannot_be_cut_is_told_and_costs(box):
    response, reward, metrics = await zoomed({"bbox_2d": box, "label": "x"})
    assert response.text.startswith("Error: ")
    assert "\n" not in response.text
    assert not response.image
    assert (reward, metrics) == (-0.05, {"success": False})


@pytest.mark.parametrize(
    ("wanted", "size", "box"),
    [
        ([10, 20, 60, 70], (200, 100), (10, 20, 60, 70)),
        ([-10, -20, 500, 500], (200, 100), (0, 0, 200, 100)),  # clipped
        ([90, 40, 104, 54], (200, 100), (83, 33, 111, 61)),  # grown around its centre
        ([0, 0, 14, 14], (200, 100), (0, 0, 28, 28)),  # moved inward
        ([190, 90, 200, 100], (200, 100), (172, 72, 200, 100)),
        ([10.6, 20.2, 60.4, 70.9], (200, 100), (10, 20, 61, 71)),  # whole pixels around the box
        ([0, 40, 100, 50], (200, 100), None),  # growing to 28 high would need 280 in width
        ([0, 0, 20, 20], (20, 20), None),  # the image is too small
    ],
)
def test_boxes(wanted, size, box):
    assert crop_box(wanted, size, 28) == box


@given(
    st.lists(st.floats(-50, 400) | st.integers(-50, 400), min_size=4, max_size=4),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.integers(1, 40),
)
def test_a_crop_lies_inside_and_is_large_enough(wanted, size, least):
    box = crop_box(wanted, size, least)
    if box is None:
        return
    left, top, right, bottom = box
    assert 0 <= left < right <= size[0]
    assert 0 <= top < bottom <= size[1]
    assert min(right - left, bottom - top) >= least
    clipped = [max(0, wanted[0]), max(0, wanted[1]), min(size[0], wanted[2]), min(size[1], wanted[3])]
    assert left <= clipped[0] + 1e-6  # what was asked for is in it
    assert top <= clipped[1] + 1e-6
    assert right >= clipped[2] - 1e-6
    assert bottom >= clipped[3] - 1e-6


@pytest.mark.parametrize("kind", ["path", "file", "data", "bytes", "dict", "dict path", "pil", "grey"])
def test_every_way_to_name_an_image(tmp_path, kind):
    image = picture((30, 20))
    path = tmp_path / "a picture.png"
    path.write_bytes(png(image))
    encoded = base64.b64encode(png(image)).decode()
    sources = {
        "path": str(path),
        "file": path.as_uri(),
        "data": f"data:image/png;base64,{encoded}",
        "bytes": png(image),
        "dict": {"bytes": png(image), "path": None},
        "dict path": {"bytes": None, "path": str(path)},
        "pil": image,
        "grey": png(image.convert("L")),
    }
    loaded = load_image(sources[kind], 1000)
    assert (loaded.mode, loaded.size) == ("RGB", (30, 20))
    if kind != "grey":
        assert list(loaded.getdata()) == list(image.getdata())


def bomb(width, height):
    """A tiny PNG whose header promises a huge picture."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (bomb(30_000, 30_000), "cannot be read|larger than"),
        (bomb(2000, 2000), "2000 x 2000 pixels is larger than the 1000000"),
        (b"", "of 0 bytes: cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "cannot be read"),
        (png(picture())[:-40], "cannot be read"),
        ("data:image/png;base64,!!!", "not valid base64"),
        ("https://example.com/x.png", "images are not downloaded"),
        ("/nowhere/x.png", "image not found: /nowhere/x.png"),
        (3, "must be a path, bytes or a PIL image, not int"),
        ({}, "not NoneType"),
    ],
)
async def test_images_that_cannot_be_used(source, reason):
    with pytest.raises(DataError, match=reason) as raised:
        await ImageZoomInTool({"max_image_pixels": 1_000_000}).create("i", image=source)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


async def test_a_row_without_an_image():
    with pytest.raises(DataError, match=r"image_zoom_in_tool\.create_kwargs\.image is missing"):
        await ImageZoomInTool({}).create("i")


async def test_the_example_configuration_under_a_session():
    (tool,) = load_tools(builtin_config("image_zoom"))
    row = {tool.name: {"create_kwargs": {"image": {"bytes": png(picture())}}}}
    async with ToolSession({tool.name: tool}, row, request_id="t") as session:
        calls = [FunctionCall(name=tool.name, arguments='{"bbox_2d": [0, 0, 50, 50]}')] * 2
        outcomes = await session.execute(calls, turn=0)
    assert [outcome.response.image[0].size for outcome in outcomes] == [(50, 50), (50, 50)]
    assert tool._instance_dict == {}


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"config\.coordinates must be one of pixels, resized, thousandths"):
        ImageZoomInTool({"coordinates": "percent"})
