"""A server in a process of its own, as `etude sandbox serve` and `etude retrieve serve` start it."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import psutil

PATIENCE = 60  # seconds for what takes one, on a busy machine


class ServerProcess:
    """Started by the constructor; `url` is where it listens."""

    def __init__(self, *options, env=None, descriptors=None, group="sandbox"):
        """`descriptors` are the most that the server may open; `group` is the command that has `serve`."""
        command = [sys.executable, "-m", "etude.cli.main", group, "serve", "--port", "0", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            preexec_fn=descriptors and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))),
        )
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.stderr.read())
        self.greeting = line
        self.url = line.split()[0].removesuffix("/retrieve")

    def call(self, path, body=None, method=None, headers=None, timeout=PATIENCE):
        """Status, headers and body (decoded where it is JSON) of one request."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data=data,
            method=method or ("GET" if body is None else "POST"),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, dict(response.headers), decoded(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), decoded(error.read())

    def run(self, code, language="python", **fields):
        """The answer of /run_code."""
        status, _, answer = self.call("/run_code", {"code": code, "language": language, **fields})
        assert status == 200, answer
        return answer

    def metric(self, name, **labels):
        """One number of /metrics; 0 where there is none yet."""
        text = self.call("/metrics")[2]
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        pattern = re.escape(f"{name}{{{wanted}}}" if wanted else name) + r" (\S+)"
        found = re.search(f"^{pattern}$", text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def memory(self):
        """Bytes that the server's own process holds."""
        return psutil.Process(self.process.pid).memory_info().rss

    def descendants(self):
        """Every process below the server."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def until(self, condition, message):
        """Waits for `condition()`."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, message
            assert self.process.poll() is None or "exit" in message, self.process.stderr.read()
            time.sleep(0.02)

    def stop(self, signum=signal.SIGTERM):
        """Asks it to end, and returns its exit status and stderr."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            _, stderr = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, stderr

    def __enter__(self):
        return self

    def __exit__(self, *_):
        children = self.descendants()
        self.stop()
        _, alive = psutil.wait_procs(children, timeout=PATIENCE)
        assert not alive, "the server left processes behind"


def decoded(content):
    try:
        return json.loads(content)
    except ValueError:
        return content.decode("utf-8", "replace")


def in_background(function):
    """A thread that calls `function`, and the list that its result will be in."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results
