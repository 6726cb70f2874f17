"""Rows with images: every place has its picture, prompts are measured with them, and nothing of them stays in memory."""

import base64
import copy
import errno
import gc
import io
import json
import os
import pickle
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vision_stage import build_vision_stage, picture

from etude.chat import ChatTemplate
from etude.data import DataOptions, RLDataset, SFTDataset, write_parquet
from etude.data import files as data_files
from etude.data.blobs import SMALLEST, BlobReference, Blobs
from etude.data.images import place_images
from etude.data.verl_dataset import custom_rows
from etude.errors import DataError
from etude.models import ImageReader
from etude.options.data import CustomClassOptions
from etude.tools.builtin.images import image_name, load_image

PROCESSOR = build_vision_stage("qwen2_5_vl")[1]
CHAT = ChatTemplate(PROCESSOR.tokenizer, processor=PROCESSOR)
READER = ImageReader(PROCESSOR)


def png(image):
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


def a_row(content="<image>What?", images=None, **more):
    row = {
        "data_source": "task",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {},
        "extra_info": {},
    }
    return row | ({} if images is None else {"images": images}) | more


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset(path, images=READER, **options):
    return RLDataset(str(path), CHAT, None, DataOptions(**options), images=images)


def by_processor(messages, pictures):
    text = PROCESSOR.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return PROCESSOR(text=[text], images=pictures)["input_ids"][0]


def test_every_form_of_a_picture(tmp_path):
    one, two = picture(16, 16, seed=1), picture(24, 32, seed=2)
    (tmp_path / "photos").mkdir()
    one.save(tmp_path / "photos" / "1.png")
    address = "data:image/png;base64," + base64.b64encode(png(two)).decode()
    absolute = str(tmp_path / "photos" / "1.png")
    forms = [
        "photos/1.png",
        absolute,
        f"file://{absolute}",
        {"path": "photos/1.png"},
        {"bytes": None, "path": absolute},
        {"image": absolute},
    ]
    rows = [a_row("<image>\nA <image> B", [form, address]) for form in forms]
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": "\nA "},
                {"type": "image"},
                {"type": "text", "text": " B"},
            ],
        }
    ]
    for item in dataset(lines(tmp_path / "train.jsonl", *rows)):
        assert item["raw_prompt"] == messages
        assert item["raw_prompt_ids"] == by_processor(messages, [one, two])
        assert [list(load_image(each, 10**6).getdata()) for each in item["images"]] == [
            list(each.getdata()) for each in (one, two)
        ]
        assert item["full_prompts"].count("<|image_pad|>") == 4 + 12


def test_parquet_with_bytes_and_parts(tmp_path):
    held = png(picture(40, 40, seed=3))
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}]
    rows = [
        a_row("<image>?", [{"bytes": held, "path": "a.png"}], own=1),
        a_row("No picture.", own=2) | {"images": None},
        {**a_row(None, [{"bytes": held, "path": None}], own=3), "prompt": [{"role": "user", "content": None}]},
    ]
    path = write_parquet(rows[:2], tmp_path / "train.parquet")
    first, second = dataset(path)
    assert first["images"] == [held]
    assert (second["images"], second["raw_prompt"]) == (None, [{"role": "user", "content": "No picture."}])
    rows[2]["prompt"][0]["content"] = parts
    third = dataset(write_parquet(rows[2:], tmp_path / "parts.parquet"))[0]
    assert third["raw_prompt"] == [{"role": "user", "content": parts}]
    assert (third["own"], len(third["raw_prompt_ids"])) == (
        3,
        len(by_processor(third["raw_prompt"], [picture(40, 40, seed=3)])),
    )


def test_image_parts_may_hold_their_picture_themselves(tmp_path):
    """As rows of verl 0.7 and later do."""
    one, two = picture(16, 16, seed=1), picture(24, 32, seed=2)
    one.save(tmp_path / "1.png")
    system = {"role": "system", "content": [{"type": "text", "text": "Look."}]}

    def prompt(first, second):
        parts = [{"type": "image", "image": first}, {"type": "text", "text": "or"}, {"type": "image", "image": second}]
        return [system, {"role": "user", "content": parts}]

    address = "data:image/png;base64," + base64.b64encode(png(two)).decode()
    by_path = lines(tmp_path / "x.jsonl", {**a_row(), "prompt": prompt("1.png", address)})
    held = {**a_row(), "prompt": prompt({"bytes": png(one), "path": None}, {"bytes": png(two), "path": None})}
    for path in (by_path, write_parquet([held], tmp_path / "x.parquet")):
        [item] = dataset(path)
        shown = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
        assert item["raw_prompt"] == [{"role": "system", "content": "Look."}, {"role": "user", "content": shown}]
        assert item["raw_prompt_ids"] == by_processor(item["raw_prompt"], [one, two])
        assert [list(load_image(each, 10**6).getdata()) for each in item["images"]] == [
            list(each.getdata()) for each in (one, two)
        ]


def test_the_places_may_be_in_any_message_and_the_column_have_another_name(tmp_path):
    prompt = [
        {"role": "system", "content": "<image>"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<image><image>"},
    ]
    pictures = [picture(16, 16, seed=n) for n in range(3)]
    for n, each in enumerate(pictures):
        each.save(tmp_path / f"{n}.png")
    path = lines(tmp_path / "x.jsonl", {**a_row(), "prompt": prompt, "shots": ["0.png", "1.png", "2.png"]})
    item = dataset(path, image_key="shots")[0]
    assert [message["content"] for message in item["raw_prompt"]] == [
        [{"type": "image"}],
        "a",
        "b",
        [{"type": "image"}] * 2,
    ]
    assert item["raw_prompt_ids"] == by_processor(item["raw_prompt"], pictures)


def test_prompts_are_measured_with_their_images(tmp_path):
    picture(64, 64).save(tmp_path / "large.png")
    picture(8, 8).save(tmp_path / "small.png")
    path = lines(tmp_path / "x.jsonl", a_row(images=["large.png"]), a_row(images=["small.png"]))
    sizes = [len(item["raw_prompt_ids"]) for item in dataset(path)]
    assert sizes[0] - sizes[1] == 64 - 1
    kept = dataset(path, max_prompt_length=sizes[1])
    assert (len(kept), kept.overlong) == (1, 1)
    with pytest.raises(DataError, match=rf"x\.jsonl:1: the prompt has {sizes[0]} tokens"):
        dataset(path, max_prompt_length=sizes[0] - 1, filter_overlong_prompts=False)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (a_row("What?", ["a.png"]), "the prompt has places for 0 images ('<image>'), and images holds 1"),
        (a_row("<image><image>", ["a.png"]), "places for 2 images ('<image>'), and images holds 1"),
        (a_row("<image>", []), "places for 1 images ('<image>'), and images holds 0"),
        (a_row([{"type": "image"}]), "places for 1 images ('<image>'), and images holds 0"),
        (a_row([{"type": "image", "image": "a.png"}], ["a.png"]), "image parts of the prompt name pictures, and so does"),
        (a_row([{"type": "image", "image": "a.png"}, {"type": "image"}]), "2 images ('<image>'), and its image parts name"),
        (a_row([{"type": "image", "image": 3}]), "image part[0] must be a path, bytes, or an object with one of them"),
        (a_row(images="a.png"), "images must be a list of images, got str"),
        (a_row(images=[3]), "images[0] must be a path, bytes, or an object with one of them, got int"),
        (a_row(images=[{"path": None}]), "images[0] must be a path"),
        (a_row(images=["nothing.png"]), "image not found: {folder}/nothing.png"),
        (a_row(images=["http://example.com/a.png"]), "images are not downloaded"),
        (a_row(images=["text.png"]), "cannot be read"),
        (a_row(images=["wide.png"]), "a picture of 1000 by 4 pixels: absolute aspect ratio"),
        (a_row("Hm.", videos=["a.mp4"]), "the column 'videos' is not supported: a model is shown images only"),
        (a_row("Hm.", audios=["a.mp3"]), "the column 'audios' is not supported"),
    ],
)  # fmt: skip
def test_every_fault_is_one_line_that_names_the_row(tmp_path, row, reason):
    picture(16, 16).save(tmp_path / "a.png")
    picture(1000, 4).save(tmp_path / "wide.png")
    (tmp_path / "text.png").write_text("no picture")
    path = lines(tmp_path / "x.jsonl", a_row("Fine."), row)
    with pytest.raises(DataError) as raised:
        dataset(path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert reason.format(folder=tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_bomb_is_refused_by_its_header(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.data.images.MAX_PIXELS", 100)
    picture(16, 16).save(tmp_path / "a.png")
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: an image of 16 x 16 pixels is larger than the 100 that are allowed"
    ):
        dataset(lines(tmp_path / "x.jsonl", a_row(images=["a.png"])))


def test_a_text_model_and_rows_without_images(tmp_path):
    picture(16, 16).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r":1: the row has images, and the model reads text only.*data\.image_key=null"):
        dataset(lines(tmp_path / "x.jsonl", a_row(images=["a.png"])), images=None)
    plain = lines(tmp_path / "y.jsonl", a_row("The tag <image> in SVG."))
    for images in (None, READER):
        [item] = dataset(plain, images=images)
        assert item["raw_prompt"] == [{"role": "user", "content": "The tag <image> in SVG."}]
        assert "images" not in item
    [item] = dataset(lines(tmp_path / "x.jsonl", a_row(images=["a.png"])), images=None, image_key=None)
    assert item["raw_prompt"][0]["content"] == "<image>What?"
    assert item["images"] == ["a.png"]  # a column like any other


def test_a_data_set_with_other_pictures_has_another_fingerprint(tmp_path):
    rows = [a_row(images=[{"bytes": png(picture(40, 40, seed=seed))}]) for seed in (1, 2, 1)]
    prints = [
        dataset(write_parquet([row], tmp_path / f"{n}.parquet")).fingerprints.popitem()[1] for n, row in enumerate(rows)
    ]
    assert prints[0] == prints[2] != prints[1]


ANSWER = {"role": "assistant", "content": "x"}


def test_demonstrations_have_images_as_prompts_have_them(tmp_path):
    large = png(picture(40, 40)) + bytes(SMALLEST)
    first = {"messages": [{"role": "user", "content": "Is <image> like <image>?"}, ANSWER]}
    inline = [{"type": "image", "image": "c.png"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    plain = {"messages": [{"role": "user", "content": "What is <image>?"}, ANSWER]}
    path = lines(tmp_path / "x.jsonl", first | {"images": ["a.png", {"path": "/b.png"}]}, plain)
    shown, text = SFTDataset(path)
    assert shown["images"] == [{"path": f"{tmp_path}/a.png"}, {"path": "/b.png"}]
    assert [part["type"] for part in shown["messages"][0]["content"]] == ["text", "image", "text", "image", "text"]
    assert text == plain | {"tools": None}
    [item] = SFTDataset(lines(tmp_path / "y.jsonl", {"messages": [{"role": "user", "content": inline}, ANSWER]}))
    assert item["images"] == [{"path": f"{tmp_path}/c.png"}]
    assert item["messages"][0]["content"] == [{"type": "image"}, *inline[1:]]
    rows = SFTDataset(str(write_parquet([first | {"seen": [{"bytes": large}] * 2}], tmp_path / "z.parquet")), "seen")
    assert rows[0]["images"] == [large, large]
    assert large not in rows._rows[0]["images"]  # kept in a file


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"images": ["a.png"]}, "the prompt has places for 0 images ('<image>'), and images holds 1"),
        ({"images": "a.png"}, "images must be a list of images, got str"),
        ({"videos": ["a.mp4"]}, "the column 'videos' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "places for 1 images"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}, ANSWER]},
            "or {type: image, image?}, got video",
        ),
    ],
)
def test_a_demonstration_whose_images_are_wrong_is_named(tmp_path, row, problem):
    path = lines(tmp_path / "x.jsonl", {"messages": [{"role": "user", "content": "Hi."}, ANSWER]} | row)
    with pytest.raises(DataError) as raised:
        SFTDataset(path)
    assert str(raised.value).startswith(f"{path}:1: ")
    assert problem in str(raised.value)


def test_a_picture_of_pillow_in_a_row_of_ones_own(tmp_path):
    row = a_row(images=[picture(16, 16)])
    [found] = place_images(row, "images", "prompt", tmp_path, "x")
    assert load_image(found, 10**6).tobytes() == picture(16, 16).tobytes()


# -- what stays in memory ------------------------------------------------------------------------------------------

values = st.recursive(
    st.one_of(
        st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=5),
        st.builds(lambda n, k: bytes([k]) * (SMALLEST + n), st.integers(-1, 40), st.integers(0, 3)),
        st.builds(lambda n: "data:" + "é\ud800" * (SMALLEST // 2 + n), st.integers(-10, 10)),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
)  # fmt: skip


def leaves(value):
    if isinstance(value, dict | list):
        return [leaf for member in (value.values() if isinstance(value, dict) else value) for leaf in leaves(member)]
    return [value]


@given(several=st.lists(values, max_size=5))
def test_what_is_kept_comes_back(several):
    blobs = Blobs()
    held = [blobs.store(value) for value in several]
    assert [blobs.restore(value) for value in held] == several
    assert all(len(value) < SMALLEST for value in leaves(held) if isinstance(value, bytes))


def test_equal_bytes_are_kept_once_and_the_file_vanishes():
    blobs = Blobs()
    first, second = (blobs.store({"a": [bytes(5000)], "b": name}) for name in "xy")
    assert first["a"] == second["a"] == [BlobReference(0, 5000, first["a"][0].digest)]
    number = blobs._file.fileno()
    assert os.fstat(number).st_size == 5000
    assert os.fstat(number).st_nlink == 0
    del blobs
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(number)


def test_a_full_disk_is_said(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(DataError, match=r"cannot keep the rows' images in .*No space left"):
        Blobs().store(bytes(5000))
    blobs = Blobs()
    monkeypatch.undo()
    place = blobs.store(bytes(5000))
    blobs._file.truncate(100)
    with pytest.raises(DataError, match="was cut"):
        blobs.restore(place)


def test_a_file_is_of_one_object_alone():
    """A copy would close the file of the first, or read from another's."""
    blobs = Blobs()
    assert copy.deepcopy(blobs).restore(b"x") == b"x"  # there is nothing to share yet
    place = blobs.store(bytes(5000))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(blobs)
    gc.collect()
    assert blobs.restore(place) == bytes(5000)


def test_what_the_system_cannot_open_is_named_with_its_row(tmp_path, monkeypatch):
    picture(16, 16).save(tmp_path / "a.png")
    path = lines(tmp_path / "x.jsonl", a_row(images=["a.png"]))

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("PIL.Image.open", refuse)
    with pytest.raises(DataError, match=r"x\.jsonl:1: image .*a\.png: cannot be read now: .*Too many open files"):
        dataset(path)


def test_a_turned_photograph_is_measured_as_it_is_shown(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(48, 16).save(tmp_path / "a.jpg", exif=exif)
    [item] = dataset(lines(tmp_path / "x.jsonl", a_row(images=["a.jpg"])))
    image = READER.read(load_image(item["images"][0], 10**6))
    assert image.grid[1] > image.grid[2]  # it stands upright
    assert item["full_prompts"].count("<|image_pad|>") == image.tokens


def test_a_data_set_holds_no_pictures(tmp_path):
    rows = [
        a_row(
            images=[{"bytes": png(picture(60, 60, seed=n))}],
            extra_info={"tools_kwargs": {}, "again": png(picture(60, 60, seed=n))},
        )
        for n in range(4)
    ]
    data = dataset(write_parquet(rows, tmp_path / "x.parquet"))
    assert not [row for row in data._rows if b"PNG" in repr(row).encode()]
    assert len(data._blobs._places) == 4  # the prompt's picture and the tool's are one
    assert (
        [item["images"][0] for item in data]
        == [item["extra_info"]["again"] for item in data]
        == [row["extra_info"]["again"] for row in rows]
    )


def test_large_rows_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    path = write_parquet([{"x": os.urandom(5000), "n": n} for n in range(10)], tmp_path / "x.parquet")
    monkeypatch.setattr(data_files, "_BATCH_BYTES", 12_000)
    asked = []
    iterate = data_files.pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        data_files.pq.ParquetFile,
        "iter_batches",
        lambda self, batch_size: asked.append(batch_size) or iterate(self, batch_size=batch_size),
    )
    assert [row["n"] for row in data_files.read_rows(path)] == list(range(10))
    assert asked == [2]
    small = write_parquet([{"n": n} for n in range(10)], tmp_path / "y.parquet")
    assert len(data_files.read_rows(small)) == 10
    assert asked[1] > 100


def test_a_palette_and_a_cmyk_picture(tmp_path):
    picture(20, 20).convert("P").save(tmp_path / "a.gif")
    Image.new("CMYK", (20, 20)).save(tmp_path / "b.jpg")
    [item] = dataset(lines(tmp_path / "x.jsonl", a_row("<image><image>", ["a.gif", "b.jpg"])))
    assert item["full_prompts"].count("<|image_pad|>") == 2 * READER.tokens((20, 20))


def test_a_picture_is_known_by_its_bytes_or_its_file(tmp_path):
    held = png(picture(16, 16))
    path = tmp_path / "a b.png"
    path.write_bytes(held)
    address = "data:image/png;base64," + base64.b64encode(held).decode()
    assert image_name(held) == image_name({"bytes": held, "path": "x"}) != image_name(held + b"x")
    assert image_name(str(path)) == image_name({"path": str(path)}) == image_name(path)
    assert image_name(address) == image_name(address) != image_name(address + "A")
    before = image_name(str(path))
    path.write_bytes(png(picture(16, 24)))
    assert image_name(str(path)) != before
    assert image_name(f"file://{tmp_path}/a%20b.png") is not None
    for nothing in ("", str(tmp_path / "none.png"), "a\0b", None, {}, picture(16, 16)):
        assert image_name(nothing) is None


CLASSES = """
from PIL import Image

from etude.data import RLHFDataset


class Ours(RLHFDataset):
    pass


class Old:
    def __init__(self, data_files, tokenizer, config, processor, max_samples):
        self.key = config.image_key

    def __len__(self):
        return 1

    def __getitem__(self, number):
        row = {"data_source": "task", "reward_model": {}, "extra_info": {}, "raw_prompt": self.prompt()}
        return row | {"multi_modal_data": {"image": [self.image()]}}

    def image(self):
        return Image.new("RGB", (40, 24), (200, 30, 30))

    def prompt(self):
        return [{"role": "user", "content": "<image>What?"}]


class New(Old):
    def prompt(self):
        return [{"role": "user", "content": [{"type": "image", "image": self.image()}, {"type": "text", "text": "What?"}]}]


class Film(Old):
    def __getitem__(self, number):
        return super().__getitem__(number) | {"multi_modal_data": {"video": ["film.mp4"]}}
"""


@pytest.mark.parametrize("key", ["images", "pictures"])
@pytest.mark.parametrize("name", ["Ours", "Old", "New"])
def test_images_of_a_dataset_class_of_ones_own(tmp_path, name, key):
    """The rows of verl's classes, old and new, and of one derived from ours: the images are placed as those of files."""
    Image.new("RGB", (40, 24), (200, 30, 30)).save(tmp_path / "red.png")
    file = lines(tmp_path / "rows.jsonl", a_row(**{key: ["red.png"]}))
    found = [own_class(tmp_path, file, name, key) for _ in range(2)]
    row, expected = found[0][0], dataset(file, image_key=key)[0]
    assert row["raw_prompt_ids"] == expected["raw_prompt_ids"]
    assert [load_image(each, 10**6).tobytes() for each in row["images"]] == [
        load_image(each, 10**6).tobytes() for each in expected["images"]
    ]
    assert found[0].fingerprints == found[1].fingerprints


def own_class(folder, file, name, key="images"):
    (folder / "own.py").write_text(CLASSES)
    options = DataOptions(image_key=key, custom_cls=CustomClassOptions(path=f"{folder}/own.py", name=name))
    rows = list(custom_rows(options, [file], PROCESSOR.tokenizer, PROCESSOR, {}, -1))
    return RLDataset(file, CHAT, None, options, images=READER, rows=rows)


def test_a_video_of_a_dataset_class_of_ones_own_is_refused(tmp_path):
    with pytest.raises(DataError, match="'videos' is not supported"):
        own_class(tmp_path, lines(tmp_path / "rows.jsonl", a_row()), "Film")
