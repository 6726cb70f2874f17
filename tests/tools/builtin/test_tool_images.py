"""Images from anywhere: what is damaged is a DataError, what the system refuses is infrastructure, and up is up."""

import base64
import contextlib
import errno
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from etude.errors import DataError, InfrastructureError, is_infrastructure
from etude.tools.builtin import images
from etude.tools.builtin.images import FORMATS, AnswerImages, image_size, image_url, load_image

LIMIT = 10_000
EXIF_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF")


def drawn(width=24, height=18):
    """A picture that differs from each of its turns."""
    image = Image.new("RGB", (width, height), "white")
    image.paste("red", (0, 0, width // 2, height // 2))
    image.paste("blue", (width // 2, 0, width, height // 3))
    return image


def encoded(kind, image=None, **options):
    held = io.BytesIO()
    (image or drawn()).save(held, kind, **options)
    return held.getvalue()


def with_orientation(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(kind, exif=exif)


FILES = {kind: encoded(kind) for kind in FORMATS}


@pytest.mark.parametrize("mode", ["I;16", "L", "RGB"])
def test_a_malformed_tiff_is_a_data_error(mode):
    data = encoded("TIFF", drawn().convert("L").convert(mode) if mode == "I;16" else drawn().convert(mode))
    broken = data.replace(b"\x11\x01\x04\x00", b"\x11\x01\x0c\x00", 1)  # StripOffsets as float64
    assert broken != data
    with pytest.raises(DataError, match=r"image of \d+ bytes: cannot be read: "):
        load_image(broken, LIMIT)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of what it skips
@given(data=st.data(), kind=st.sampled_from(FORMATS))
def test_damage_is_nothing_but_a_data_error(data, kind):
    damaged = bytearray(FILES[kind])
    for place in data.draw(st.lists(st.integers(0, min(len(damaged) - 1, 400)), min_size=1, max_size=6)):
        damaged[place] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(1, len(damaged))) :]
    for read in (load_image, image_size):
        with contextlib.suppress(DataError):
            read(bytes(damaged), LIMIT)


def closed():
    image = drawn()
    image.close()
    return image


@pytest.mark.parametrize("make", [lambda: Image.open(io.BytesIO(FILES["PNG"][:-60])), closed])
def test_a_pillow_image_that_cannot_be_used_is_a_data_error(make):
    with pytest.raises(DataError, match="cannot be read"):
        load_image(make(), LIMIT)


def test_what_is_said_is_the_same_in_every_run():
    """A model may read it."""
    for source, told in ((b"no image", "image of 8 bytes"), (closed(), "image of 24 x 18 pixels")):
        said = []
        for _ in range(2):
            with pytest.raises(DataError) as raised:
                load_image(source, LIMIT)
            said.append(str(raised.value))
        assert said[0] == said[1]
        assert said[0].startswith(f"{told}: cannot be read: ")
        assert "0x" not in said[0]


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_of_nothing_is_a_data_error(size):
    with pytest.raises(DataError, match=f"an image of {size[0]} x {size[1]} pixels shows nothing"):
        load_image(Image.new("RGB", size), LIMIT)


@pytest.mark.parametrize("read", [load_image, image_size])
@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "I/O"), MemoryError()]
)
def test_what_the_system_refuses_is_infrastructure(tmp_path, monkeypatch, read, error):
    path = tmp_path / "a.png"
    path.write_bytes(FILES["PNG"])

    def refuse(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InfrastructureError, match=r"a\.png: cannot be read now") as raised:
        read(str(path), LIMIT)
    assert is_infrastructure(raised.value)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG])
def test_what_the_name_or_the_file_is_to_blame_for_is_a_data_error(tmp_path, monkeypatch, number):
    path = tmp_path / "a.png"
    path.write_bytes(FILES["PNG"])

    def refuse(*_args, **_kwargs):
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.png: cannot be read: "):
        load_image(str(path), LIMIT)


def test_a_name_that_no_file_can_have():
    for name in ("x" * 5000, "~nobody-of-that-name/a.png", "a\0b", "\ud83d.png"):
        with pytest.raises(DataError):
            load_image(name, LIMIT)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", EXIF_FORMATS)
def test_an_image_stands_as_its_header_says(kind, orientation):
    data = with_orientation(kind, orientation)
    with Image.open(io.BytesIO(data)) as opened:
        upright = ImageOps.exif_transpose(opened).convert("RGB")
    loaded = load_image(data, LIMIT)
    assert loaded.tobytes() == upright.tobytes()
    assert loaded.size == upright.size == image_size(data, LIMIT) == ((24, 18) if orientation < 5 else (18, 24))
    again = load_image(loaded, LIMIT)  # it is turned once
    assert (again.size, again.tobytes()) == (loaded.size, loaded.tobytes())
    crop = loaded.crop((0, 0, 6, 4))
    assert load_image(crop, LIMIT).tobytes() == crop.tobytes()
    assert AnswerImages().load(data).tobytes() == upright.tobytes()


def test_pillows_own_image_is_turned_and_left_as_it_was():
    opened = Image.open(io.BytesIO(with_orientation("JPEG", 6)))
    assert load_image(opened, LIMIT).size == image_size(opened, LIMIT) == (18, 24)
    assert opened.size == (24, 18)


@pytest.mark.parametrize("orientation", [0, 9, 300])
def test_an_orientation_that_is_none(orientation):
    assert load_image(with_orientation("JPEG", orientation), LIMIT).size == (24, 18)


def test_damaged_metadata_of_a_whole_image():
    data = encoded("PNG", exif=b"Exif\0\0no tags at all")
    assert load_image(data, LIMIT).tobytes() == drawn().tobytes()
    assert image_size(data, LIMIT) == (24, 18)


def test_the_size_of_a_png_is_known_without_its_pixels(monkeypatch):
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: pytest.fail("decoded"))
    assert image_size(FILES["PNG"], LIMIT) == (24, 18)


def test_the_images_of_an_answer_are_bounded_together_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    answer = AnswerImages()
    assert answer.load(encoded("PNG", drawn(20, 20))).size == (20, 20)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(
        DataError, match="an image of 40 x 20 pixels, and one answer's images have at most 1000 together"
    ):
        answer.load(encoded("PNG", drawn(40, 20)))
    with pytest.raises(DataError, match="an image of 60 x 20 pixels is larger than the 1000"):
        answer.load(encoded("PNG", drawn(60, 20)))
    monkeypatch.undo()
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    assert answer.load(encoded("PNG", drawn(30, 20))).size == (30, 20)  # what was refused took no place
    with pytest.raises(DataError, match="of 1 x 1 pixels, and"):
        answer.load(encoded("PNG", drawn(1, 1)))


def test_the_images_of_an_answer_are_counted_broken_ones_too(monkeypatch):
    monkeypatch.setattr(images, "MAX_IMAGES", 3)
    answer = AnswerImages()
    with pytest.raises(DataError, match="cannot be read"):
        answer.load(b"no image")
    for kind in ("PNG", "GIF"):
        assert answer.load(FILES[kind]).size == (24, 18)
    with pytest.raises(DataError, match="more than 3 images"):
        answer.load(FILES["PNG"])


@pytest.mark.parametrize("kind", FORMATS)
def test_an_address_holds_the_file_as_it_is(kind, tmp_path):
    (tmp_path / "file").write_bytes(FILES[kind])
    for source in (FILES[kind], tmp_path / "file", {"path": str(tmp_path / "file")}, image_url(FILES[kind])):
        address = image_url(source)
        assert address.startswith(f"data:{Image.MIME[kind]};base64,")
        assert base64.b64decode(address.partition(",")[2]) == FILES[kind]


def test_the_address_of_a_picture_has_its_pixels():
    for mode in ("RGB", "RGBA", "L", "CMYK"):
        picture = drawn().convert(mode)
        assert list(load_image(image_url(picture), LIMIT).getdata()) == list(load_image(picture, LIMIT).getdata())
    with pytest.raises(DataError, match="no image of a known format"):
        image_url(b"no image")
