"""The parts that need no container: messages, output, the filter's program, files, what a run uses, the plan of a jail."""

import asyncio
import contextlib
import errno
import io
import json
import os
import socket
import struct
import subprocess
import tarfile
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox import Isolation, jail
from etude.sandbox.container import Connection, Output
from etude.sandbox.guest import files, messages, seccomp, usage
from etude.sandbox.guest.settings import Settings
from etude.sandbox.session import valid_images

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


# messages


@given(
    st.dictionaries(st.text(max_size=4), JSON, max_size=4),
    st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=1000)), max_size=3),
)
def test_a_message_comes_back(message, parts):
    reader, writer = os.pipe()
    try:
        messages.send(writer, message, parts)
        os.close(writer)
        assert messages.receive(reader) == (message, parts)
        assert messages.receive(reader) is None
    finally:
        os.close(reader)


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_message_or_an_error(data):
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    try:
        received = messages.receive(reader)
        assert received is None or isinstance(received[0], dict)
    except messages.MessageError:
        pass
    finally:
        os.close(reader)


@pytest.mark.parametrize("text", [b"[1]", b"nope", b"\xff", b"[" * 100_000, b"1" * 10_000, b"", b"{}"])
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(messages.MessageError):
        messages.decode(text)


PARTS = st.lists(st.tuples(st.sampled_from(["text", "name", "value", "image", "?"]), st.integers(-2, 9)).map(list))


@given(st.fixed_dictionaries({}, optional={"parts": PARTS | JSON}), st.binary(max_size=40))
def test_parts_make_up_the_payload_or_are_an_error(header, payload):
    try:
        _, parts = messages.decode(json.dumps(header).encode(), payload)
    except messages.MessageError:
        return
    assert b"".join(content for _, content in parts) == payload
    assert all(isinstance(name, str) for name, _ in parts)


@pytest.mark.parametrize("parts", [None, {}, "text", [["text"]], [["text", True]], [[1, 3]], [["a", 4]], [["a", 2]]])
def test_parts_that_do_not_describe_their_payload_are_refused(parts):
    with pytest.raises(messages.MessageError):
        messages.decode(json.dumps({"parts": parts}).encode(), b"abc")


def test_a_length_beyond_the_limit_is_refused_before_it_is_allocated():
    with pytest.raises(messages.MessageError, match="too long"):
        messages.lengths(struct.pack("!II", 2**32 - 1, 0))
    with pytest.raises(messages.MessageError, match="too long"):
        messages.lengths(struct.pack("!II", 10, 10), max_json=100, max_payload=9)
    with pytest.raises(messages.MessageError, match="too long"):
        messages.encode({"x": "y" * (messages.MAX_JSON + 1)})


# output


def captured(chunks, limit):
    async def read():
        reader, writer = os.pipe()
        capture = Output(reader, limit)
        loop = asyncio.get_running_loop()
        for chunk in chunks:
            await loop.run_in_executor(None, _write_all, writer, chunk)
        os.close(writer)
        output = capture.take()
        capture.close()
        return output

    return asyncio.run(read())


def _write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]


def test_output_within_its_limit_is_kept_whole():
    assert captured([b"abc", "ü€".encode(), b"\xff"], 9) == ("abcü€\ufffd", False)


def test_of_too_much_output_both_ends_are_kept():
    text, cut = captured([b"a" * 100_000, b"b" * 400_000, b"c" * 100_000], 10)
    assert cut
    assert text == "aaaaa\n… [599990 bytes left out] …\nccccc"


@given(st.text(min_size=1), st.integers(1, 40))
def test_a_cut_never_invents_characters(text, limit):
    data = text.encode("utf-8", "surrogatepass") if text.isascii() else text.encode("utf-8", "replace")
    seen, cut = captured([data], limit)
    if not cut:
        assert seen == data.decode()
        return
    head, tail = seen.split("\n… [")[0], seen.split("left out] …\n")[-1]
    assert data.decode().startswith(head)
    assert data.decode().endswith(tail)
    assert len(head.encode()) + len(tail.encode()) <= limit


def test_what_is_written_meanwhile_does_not_keep_a_drain(monkeypatch):
    async def drain():
        reader, writer = os.pipe()
        capture = Output(reader, 10)
        read, reads = os.read, []

        def read_and_write(fd, size):
            """As fast a writer as there can be."""
            data = read(fd, size)
            os.write(writer, data)
            reads.append(len(data))
            assert len(reads) < 100, "a drain that never ends"
            return data

        os.write(writer, b"x" * 1000)
        monkeypatch.setattr("etude.sandbox.container.os.read", read_and_write)
        capture.drain()
        assert sum(reads) == 1000
        os.close(writer)
        capture.close()

    asyncio.run(drain())


# the filter: what its program decides, by an interpreter of classic BPF


def decide(program, machine, call, *arguments):
    data = struct.pack(
        "=IIQ6Q", call, {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine], 0, *(arguments + (0,) * 6)[:6]
    )
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * position)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x25: accumulator > value,
                0x45: bool(accumulator & value),
            }[code]
            position += if_true if holds else if_false


ALLOW, KILL = 0x7FFF0000, 0x80000000


def refusal(number):
    return 0x00050000 | number


@pytest.fixture
def answer(machine):
    """What the filter answers to a call: one with rules by its name, any by its number."""
    program, named = seccomp.assemble(machine), seccomp.numbers(seccomp._CALLS_WITH_RULES, machine)
    return lambda call, *arguments: decide(program, machine, named.get(call, call), *arguments)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
class TestFilter:
    def test_every_listed_call_is_denied(self, answer, machine):
        for name, call in seccomp.numbers(seccomp._DENIED, machine).items():
            assert answer(call) == refusal(errno.EPERM), name

    def test_calls_that_are_absent_or_without_effect(self, answer, machine):
        for name, call in seccomp.numbers(seccomp._ABSENT, machine).items():
            assert answer(call) == refusal(errno.ENOSYS), name
        for name, call in seccomp.numbers(seccomp._WITHOUT_EFFECT, machine).items():
            assert answer(call) == refusal(0), name

    def test_all_others_up_to_the_last_known_are_allowed(self, answer, machine):
        tables = seccomp._DENIED, seccomp._ABSENT, seccomp._WITHOUT_EFFECT, seccomp._CALLS_WITH_RULES
        numbers = [number for table in tables for number in seccomp.numbers(table, machine).values()]
        assert len(set(numbers)) == len(numbers)
        for call in set(range(467)) - set(numbers):
            assert answer(call) == ALLOW, call

    def test_unknown_calls_do_not_exist(self, answer):
        for call in (467, 600, 0x40000000 + 39, 0xFFFFFFFF):
            assert answer(call) == refusal(errno.ENOSYS)

    def test_another_architecture_is_fatal(self, machine):
        other = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
        assert decide(seccomp.assemble(machine), other, 39) == KILL

    def test_clone_makes_processes_but_no_namespaces(self, answer):
        assert answer("clone", 0x1200011) == ALLOW
        assert answer("clone", 0x3D0F00) == ALLOW  # a thread
        for bit in (17, 25, 26, 27, 28, 29, 30):
            assert answer("clone", 17 | 1 << bit) == refusal(errno.EPERM)

    @pytest.mark.parametrize("call", ["socket", "socketpair"])
    def test_sockets_are_local_or_of_the_internet(self, answer, call):
        for family in range(64):
            expected = ALLOW if family in (1, 2, 10) else refusal(errno.EAFNOSUPPORT)
            assert answer(call, family) == expected
            assert answer(call, family | 1 << 32) == expected
        for family in (2, 10):
            for protocol in range(300):
                expected = ALLOW if protocol in (0, 6, 17) else refusal(errno.EPROTONOSUPPORT)
                assert answer(call, family, 1, protocol) == expected
        assert answer(call, 1, 1, 1) == ALLOW  # PF_UNIX as a protocol, as some programs have it

    @pytest.mark.parametrize(
        ("call", "arguments", "number"),
        [
            ("ioctl", (0, 0x5412), errno.EPERM),  # TIOCSTI
            ("ioctl", (0, 0x541C), errno.EPERM),
            ("fcntl", (3, 1024), errno.EPERM),
            ("fcntl", (3, 1026), errno.EPERM),
            ("fcntl", (3, 1031 | 1 << 32), errno.EPERM),
            ("setsockopt", (3, 1, 7), 0),
            ("setsockopt", (3, 1 | 1 << 32, 8 | 1 << 32), 0),
            ("setsockopt", (3, 1, 32), errno.EPERM),
            ("setsockopt", (3, 1, 33), errno.EPERM),
            ("mmap", (0, 4096, 3, 0x40022), errno.ENOMEM),
            ("madvise", (0, 4096, 21), errno.EINVAL),
            ("fadvise64", (3, 0, 0, 4), 0),
            ("msync", (0, 4096, 4), 0),
        ],
    )
    def test_calls_that_end_for_some_arguments(self, answer, call, arguments, number):
        assert answer(call, *arguments) == refusal(number)

    @pytest.mark.parametrize(
        ("call", "arguments"),
        [
            ("ioctl", (0, 0x5401)),
            ("fcntl", (3, 1030)),  # F_DUPFD_CLOEXEC
            ("fcntl", (3, 1032)),  # F_GETPIPE_SZ
            ("fcntl", (3, 6)),
            ("fcntl", (1031, 1)),
            ("setsockopt", (3, 1, 2)),  # SO_REUSEADDR
            ("setsockopt", (3, 6, 7)),  # TCP's option of that number
            ("mmap", (0, 4096, 3, 0x22)),
            ("madvise", (0, 4096, 4)),
            ("fadvise64", (3, 0, 0, 2)),
            ("msync", (0, 4096, 1)),
        ],
    )
    def test_the_same_calls_are_allowed_with_others(self, answer, call, arguments):
        assert answer(call, *arguments) == ALLOW

    def test_the_supervisor_keeps_its_limits_and_priority(self, answer):
        for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
            assert answer(name, 0) == ALLOW
            assert answer(name, 1) == refusal(errno.EPERM)
            assert answer(name, 1 | 1 << 32) == refusal(errno.EPERM)
        for name, everybody in (("setpriority", 2), ("ioprio_set", 3)):
            assert answer(name, 0, 0) == ALLOW
            assert answer(name, 0, 1) == refusal(errno.EPERM)
            assert answer(name, everybody, 0) == refusal(errno.EPERM)


# files


def test_files_are_written_beneath_and_read_back(tmp_path):
    written = [("a", b"1"), ("deep/er/b", b"2"), ("deep/c", b"")]
    files.write_files(str(tmp_path), written)
    assert files.read_files(str(tmp_path), [path for path, _ in written] + ["none"], 100) == (written, {})
    files.write_files(str(tmp_path), [("a", b"again")])
    assert (tmp_path / "a").read_bytes() == b"again"


def test_no_link_is_followed_in_either_direction(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (inside / "link").symlink_to(outside / "secret")
    (inside / "folder").symlink_to(outside)
    (inside / "loop").symlink_to("loop")
    os.mkfifo(inside / "pipe")
    (inside / "directory").mkdir()
    names = ["link", "folder/secret", "loop", "pipe", "directory"]
    found, refused = files.read_files(str(inside), names, 1000)
    assert found == []
    assert sorted(refused) == sorted(names)
    files.write_files(str(inside), [("link", b"mine")])  # replaces the link, not what it points to
    assert (outside / "secret").read_text() == "secret"
    assert (inside / "link").read_bytes() == b"mine"
    with pytest.raises(OSError, match="folder"):
        files.write_files(str(inside), [("folder/secret", b"mine")])
    assert sorted(outside.iterdir()) == [outside / "secret"]


def test_no_more_is_read_than_the_budget(tmp_path):
    files.write_files(str(tmp_path), [("a", b"x" * 60), ("b", b"x" * 60), ("c", b"x" * 40)])
    found, refused = files.read_files(str(tmp_path), ["a", "b", "c"], 100)
    assert [path for path, _ in found] == ["a", "c"]
    assert "60 bytes" in refused["b"]


# what a run uses


def test_this_process_is_counted():
    me = os.getpid()
    held = usage.memory_bytes([me], 1 << 60)
    assert 1 << 20 < held < 1 << 40
    assert 0 < usage.memory_bytes([me], 0) <= held * 2
    assert usage.cpu_seconds([me]) > 0
    assert usage.memory_bytes([2**22 + 1], 0) == 0  # ended meanwhile
    assert usage.cpu_seconds([2**22 + 1]) == 0


def test_memory_that_is_not_resident_counts(tmp_path, monkeypatch):
    """Swapped out, in tables of pages, in huge pages; and none of what a process writes into its own name."""
    status = "Name:\tVmRSS: 9999 kB\nVmRSS:\t  10 kB\nVmSwap:\t  200 kB\nVmPTE:\t  3000 kB\nHugetlbPages:\t  40000 kB\n"
    monkeypatch.setattr(
        usage, "_read", lambda path: status if path == "/proc/7/status" else "Pss: 4 kB\nPss_Anon: 3 kB\n"
    )
    assert usage.memory_bytes([7], 1 << 30) == 43210 << 10
    assert usage.memory_bytes([7], 0) == 43004 << 10


def test_each_socket_counts_as_full(monkeypatch):
    monkeypatch.setattr(usage, "_read", lambda path: "sockets: used 3\nTCP: inuse 1 orphan 0 tw 0 alloc 1 mem 64\n")
    with socket.socket(socket.AF_UNIX) as one:
        assert usage.socket_bytes() >= 3 * 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_descendants_are_found():
    pid = os.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", "30"])
    try:
        assert pid in list(usage.processes(isolated=False))
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_what_a_thread_has_started_is_found():
    reader, writer = os.pipe()
    started, over = threading.Event(), threading.Event()
    children = []

    def start():
        children.append(subprocess.Popen(["cat"], stdin=reader, stdout=subprocess.DEVNULL))
        started.set()
        over.wait()

    thread = threading.Thread(target=start)
    thread.start()
    started.wait()
    try:
        assert children[0].pid in list(usage.processes(isolated=False))
    finally:
        over.set()
        os.close(writer)
        children[0].wait()
        thread.join()
        os.close(reader)


# the plan


def test_a_plan_shows_nothing_private(tmp_path):
    plan = jail.plan_of(tmp_path, ("/some/site-packages",))
    inside = [target for _, target in plan.binds]
    assert "/opt/etude/libraries-0" in inside
    private = ("/home", "/var", "/run", "/sys", "/proc", "/tmp", "/mnt")
    assert not [path for path in inside if path.startswith(private)]
    assert not [path for path in inside if path in ("/", "/root", "/etc/passwd", "/etc/shadow")]
    assert "sandbox" in (tmp_path / "etc" / "passwd").read_text()
    assert json.dumps(asdict(plan))


@pytest.mark.parametrize("mode", [Isolation.BUBBLEWRAP, Isolation.NAMESPACES, Isolation.NONE], ids=lambda m: m.value)
def test_no_shell_is_between_us_and_the_interpreter(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(jail.shutil, "which", lambda name: "/usr/bin/bwrap")
    settings = Settings(True, "", (), {})
    command = jail.command_line(mode, tmp_path, (), 5, settings)
    assert Path(command[0]).name.startswith(("python", "bwrap"))
    assert not {"sh", "bash", "/bin/sh", "/bin/bash"} & set(command)
    assert Settings.decode(settings.encode()) == settings


# what an interpreter claims

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 10, 10, 8, 2, 0, 0, 0) + b"rest"


async def test_a_closed_connection_is_watched_no_more():
    """Neither of the two that wait is left behind, nor a number that the next descriptor gets."""
    ours, theirs = socket.socketpair()
    number = ours.detach()
    connection = Connection(number, 10, 10)
    sending = asyncio.ensure_future(connection.send({"x": "y" * 10_000_000}))
    receiving = asyncio.ensure_future(connection.receive())
    await asyncio.sleep(0.01)
    connection.shut_down()
    await asyncio.wait({sending, receiving}, timeout=10)
    connection.close()
    assert not asyncio.get_running_loop().remove_reader(number)
    assert not asyncio.get_running_loop().remove_writer(number)
    assert await receiving is None
    with pytest.raises(OSError):
        await sending
    theirs.close()


def test_only_reasonable_png_files_are_images():
    huge = PNG.replace(struct.pack(">II", 10, 10), struct.pack(">II", 30_000, 30_000))
    assert valid_images([PNG, huge, b"GIF89a", PNG + bytes(3 << 20), b""]) == (PNG,)
    assert len(valid_images([PNG] * 100)) == 8


# whole folders


def test_a_folder_comes_back_as_it_was(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "run.sh").write_bytes(b"x" * 700)
    (tmp_path / "a" / "b" / "run.sh").chmod(0o755)
    (tmp_path / "a" / "same").hardlink_to(tmp_path / "a" / "b" / "run.sh")
    for name, target in {"in": "../a/b", "up": "../../etc", "round": "b/../../..", "root": "/etc"}.items():
        (tmp_path / "a" / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    packed = files.pack(str(tmp_path), 1 << 20)
    (back := tmp_path / "back").mkdir()
    files.unpack(str(back), packed)
    assert sorted(str(path.relative_to(back)) for path in back.rglob("*")) == [
        "a",
        "a/b",
        "a/b/run.sh",
        "a/in",
        "a/same",
    ]
    assert (back / "a" / "same").read_bytes() == b"x" * 700
    assert os.access(back / "a" / "in" / "run.sh", os.X_OK)
    assert files.pack(str(tmp_path), 1000) is None


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "link/out"])
def test_an_archive_writes_nothing_outside(tmp_path, name):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, ".."
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo(name))
    (folder := tmp_path / "folder").mkdir()
    with contextlib.suppress(OSError):
        files.unpack(str(folder), packed.getvalue())
    assert not (tmp_path / "out").exists()
