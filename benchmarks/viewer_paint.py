"""How fast the web viewer's pages appear: `python benchmarks/viewer_paint.py DIR` serves a run's folder and opens each page
in Chromium, five times with an empty cache. Prints the medians of the first paint, of the page being drawn from its answers,
and of the bytes received, beside the time that the server took to read the dumps.

Needs Chromium (`apt install chromium`) and `pip install playwright`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

PAGES = ("overview", "why", "trajectories", "trajectories?group=1", "timeline")
PAINT = "performance.getEntriesByType('paint').find((entry) => entry.name === 'first-contentful-paint')?.startTime"
SIZE = "performance.getEntriesByType('resource').reduce((sum, entry) => sum + entry.transferSize, 0)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    command = [sys.executable, "-m", "etude.cli.main", "view", str(folder), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        started = time.perf_counter()
        measure(browser, url, "trajectories")
        print(f"first page, with the dumps read: {time.perf_counter() - started:.2f} s")
        for page in PAGES:
            paints, drawn, sizes = zip(*(measure(browser, url, page) for _ in range(5)))
            paint, whole, size = map(statistics.median, (paints, drawn, sizes))
            print(f"{page:22} first paint {paint:5.0f} ms, drawn {whole:5.0f} ms, {size / 1024:6.0f} KiB")
        server.terminate()


def measure(browser, url: str, page: str) -> tuple[float, float, float]:
    """Returns (ms to the first paint, ms until the page is drawn, bytes) in a fresh context."""
    context = browser.new_context()
    tab = context.new_page()
    started = time.perf_counter()
    tab.goto(f"{url}/#/{page}")
    tab.wait_for_selector("main[data-page]")
    drawn = 1000 * (time.perf_counter() - started)
    found = tab.evaluate(PAINT), drawn, tab.evaluate(SIZE)
    context.close()
    return found


if __name__ == "__main__":
    main()
