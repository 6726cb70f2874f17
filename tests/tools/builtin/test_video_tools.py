"""The Video-Holmes tools on a real video: exact frames, a user's models, limits on hostile files."""

import sys

import av
import numpy as np
import pytest

from etude.errors import ConfigError, DataError, InfrastructureError, MissingExtraError, ToolError
from etude.schemas import FunctionCall
from etude.tools import ToolSession, builtin_config, load_tools
from etude.tools.builtin.frame_extraction import FRAMES, MAX_FRAMES, FrameExtractionTool
from etude.tools.builtin.frame_models import FrameCaptionTool, ObjectDetectionTool
from etude.tools.builtin.video import VideoOptions, read_frames, video_seconds

RATE, SECONDS = 10, 4
MODELS = '''
"""Stands in for a detector and a captioner: it really looks at the picture."""

import numpy as np

LOADED = []


def detect(image, labels=None):
    red = np.asarray(image)[:, :, 0] > 128
    ys, xs = np.nonzero(red)
    box = [int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1]
    return [
        {"label": "nothing", "score": 0.1, "box": [0, 0, 1, 1]},
        {"label": (labels or ["square"])[0], "score": 0.9, "box": box},
    ]


class Captioner:
    def __init__(self):
        LOADED.append(self)

    async def __call__(self, image, prompt=None, model_name="none"):
        level = int(np.asarray(image)[:8, :, 2].mean())
        return f" {model_name} sees {image.size[0]}x{image.size[1]}, blue {level // 20}, asked {prompt} "


def broken(image, **arguments):
    raise RuntimeError("out of memory\\nat line 3")


def wrong(image, **arguments):
    return {"label": "x"}


SOMETHING = 3
'''


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """Forty frames of 96 x 64; the blue level rises with time, and a red square moves to the right."""
    path = tmp_path_factory.mktemp("films") / "film.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(RATE * SECONDS):
            pixels = np.zeros((64, 96, 3), np.uint8)
            pixels[:, :, 2] = number * 5
            left = 8 + number
            pixels[16:48, left : left + 32] = (255, 0, 0)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


@pytest.fixture
def models(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def blue(image):
    return np.asarray(image)[:8, :, 2].mean() / 5


def test_the_frame_shown_at_a_time(video):
    assert video_seconds(video, VideoOptions()) == pytest.approx(SECONDS)
    times = [0.0, 0.05, 0.1, 1.55, 3.95]
    frames = read_frames(video, times, 96, VideoOptions())
    assert [blue(frame) for frame in frames] == pytest.approx([0, 0, 1, 15, 39], abs=0.499)
    assert all(frame.size == (96, 64) for frame in frames)
    assert read_frames(video, [1.0], 48, VideoOptions())[0].size == (48, 32)
    assert read_frames(video, [1.0], 4000, VideoOptions())[0].size == (96, 64)  # never enlarged


async def test_extraction(video):
    tool = FrameExtractionTool({})
    await tool.create("t", video_path=str(video), num_frames=4, resolution=48)
    response, reward, metrics = await tool.execute("t", {})
    assert response.text == (
        "The video is 4.00 s long.\nFrame 0 at 0.50 s\nFrame 1 at 1.50 s\nFrame 2 at 2.50 s\nFrame 3 at 3.50 s"
    )
    assert [blue(image) for image in response.image] == pytest.approx([5, 15, 25, 35], abs=0.6)
    assert all(image.size == (48, 32) for image in response.image)
    assert (reward, metrics) == (0.0, {"num_frames": 4})
    response, _, _ = await tool.execute("t", {"start": 2, "end": 99, "num_frames": 1})
    assert response.text.endswith("Frame 4 at 3.00 s")
    await tool.release("t")
    assert FRAMES._of == {}
    assert tool._instance_dict == {}


@pytest.mark.parametrize(
    "parameters",
    [
        {"start": 4.5},
        {"start": 2, "end": 1},
        {"start": -1},
        {"start": "x"},
        {"end": float("nan")},
        {"num_frames": 0},
        {"num_frames": 17},
        {"num_frames": 2.5},
        {"num_frames": True},
    ],
)
async def test_impossible_spans_are_told(video, parameters):
    tool = FrameExtractionTool({})
    await tool.create("t", video_path=str(video))
    with pytest.raises(ToolError, match=r"^Error: "):
        await tool.execute("t", parameters)
    await tool.release("t")


async def test_frames_of_one_trajectory_are_bounded(video):
    tool = FrameExtractionTool({"max_frames": 256})
    await tool.create("t", video_path=str(video), resolution=8)
    await tool.execute("t", {"num_frames": 200, "end": 0.2})
    with pytest.raises(ToolError, match=f"may extract {MAX_FRAMES} frames"):
        await tool.execute("t", {"num_frames": 57, "end": 0.2})
    await tool.release("t")


async def test_the_whole_set_in_one_conversation(video, models, monkeypatch):
    monkeypatch.setenv("ETUDE_DETECTION_MODEL", f"{models}:detect")
    monkeypatch.setenv("ETUDE_CAPTION_MODEL", f"{models}:Captioner")
    tools = {tool.name: tool for tool in load_tools(builtin_config("video_holmes"))}
    row = {
        "execute_frame_extraction": {"create_kwargs": {"video_path": str(video), "num_frames": 4, "resolution": 48}},
        "execute_object_detection": {"create_kwargs": {"resolution": 96}},
        "execute_frame_caption": {"create_kwargs": {"model_name": "blip2"}},
        "calc_video_reward": {"create_kwargs": {"ground_truth": "C"}},
    }
    async with ToolSession(tools, row, request_id="t7") as session:

        async def call(name, arguments="{}"):
            [outcome] = await session.execute([FunctionCall(name=name, arguments=arguments)], turn=0)
            return outcome

        early = await call("execute_object_detection")
        assert early.response.text == "Error: no frame has been extracted yet; call execute_frame_extraction first"
        assert len((await call("execute_frame_extraction")).response.image) == 4
        found = (await call("execute_object_detection", '{"frame": 2, "labels": ["red square"]}')).response.text
        heading, first, second = found.splitlines()
        assert heading == "Frame 2 at 2.50 s: 2 found"
        assert first.startswith("red square 0.90 [0.3")  # at 33 of 96 pixels, whatever the frames' resolution
        assert second.startswith("nothing 0.10")
        caption = (await call("execute_frame_caption", '{"prompt": "the mood"}')).response.text
        assert caption == "Frame 3 at 3.50 s: blip2 sees 96x64, blue 8, asked the mood"
        missing = await call("execute_frame_caption", '{"frame": 4}')
        assert missing.response.text == "Error: there is no frame 4; frames are numbered from 0 to 3"
        await call("calc_video_reward", '{"answer": "C"}')
        rewards = await session.calc_rewards()
    assert rewards["calc_video_reward"] == 1.0
    assert FRAMES._of == {}
    assert not any(tool._instance_dict for tool in tools.values())


async def test_a_class_is_loaded_once(video, models):
    frames = FrameExtractionTool({})
    captions = FrameCaptionTool({"model": f"{models}:Captioner", "num_workers": 3})
    loaded = sys.modules[captions._named.__module__].LOADED
    assert loaded == []
    for name in ("a", "b"):
        await frames.create(name, video_path=str(video))
        await frames.execute(name, {})
        await captions.create(name)
        await captions.execute(name, {})
        await captions.release(name)
        await frames.release(name)
    assert len(loaded) == 1


@pytest.mark.parametrize(
    ("model", "reason"), [("broken", "RuntimeError: out of memory at line 3"), ("wrong", "a list")]
)
async def test_a_model_that_fails_is_infrastructure(video, models, model, reason):
    frames, tool = FrameExtractionTool({}), ObjectDetectionTool({"model": f"{models}:{model}"})
    await frames.create("t", video_path=str(video))
    await tool.create("t")
    await frames.execute("t", {})
    with pytest.raises(InfrastructureError, match=reason):
        await tool.execute("t", {})
    for labels in ([], "x", [1], ["x"] * 51):
        with pytest.raises(ToolError, match="labels must be a list"):
            await tool.execute("t", {"labels": labels})
    await frames.release("t")


def test_without_a_model_the_run_does_not_start(models, monkeypatch):
    for name in ("ETUDE_DETECTION_MODEL", "ETUDE_CAPTION_MODEL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ConfigError, match=r"video_holmes\.yaml.*'execute_object_detection': config\.model names no model"
    ):
        load_tools(builtin_config("video_holmes"))
    with pytest.raises(ConfigError, match="has no 'detekt'; did you mean 'detect'"):
        ObjectDetectionTool({"model": f"{models}:detekt"})
    with pytest.raises(ConfigError, match="cannot be called"):
        FrameCaptionTool({"model": f"{models}:SOMETHING"})


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_seconds": 3}, "a duration of 4 s; 3 s are allowed"),
        ({"max_pixels": 100}, "frames of 96 x 64; 100 pixels are allowed"),
    ],
)
async def test_limits_of_a_video(video, limits, reason):
    with pytest.raises(DataError, match=reason):
        await FrameExtractionTool(limits).create("t", video_path=str(video))


def test_a_deadline_of_decoding(video):
    with pytest.raises(DataError, match="not decoded within 1e-09 s"):
        read_frames(video, [3.9], 96, VideoOptions(decode_seconds=1e-9))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.mp4", b""),
        ("noise.mp4", bytes(range(256)) * 40),
        ("text.mp4", b"not a video at all\n" * 100),
        ("playlist.m3u8", b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"),
        ("list.ffconcat", b"ffconcat version 1.0\nfile /etc/passwd\n"),
    ],
)
def test_hostile_files(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=name) as raised:
        video_seconds(path, VideoOptions())
    assert "\n" not in str(raised.value)


def test_a_truncated_video(video, tmp_path):
    path = tmp_path / "cut.mp4"
    path.write_bytes(video.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cut\.mp4"):
        read_frames(path, [0.5], 96, VideoOptions())


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({}, "video_path is missing"),
        ({"video_path": "/nowhere.mp4"}, "video not found: /nowhere.mp4"),
        ({"video_path": "x", "num_frames": 99}, "num_frames may be from 1 to 16"),
        ({"video_path": "x", "resolution": 0}, "resolution from 1 to 2048"),
    ],
)
async def test_rows_that_make_no_sense(kwargs, reason):
    with pytest.raises(DataError, match=reason):
        await FrameExtractionTool({}).create("t", **kwargs)


def test_without_pyav_the_pip_line_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'etude\[video\]'"):
        FrameExtractionTool({})
