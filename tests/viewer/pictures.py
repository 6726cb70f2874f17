"""The docs' pictures of the viewer in a browser: python -m tests.viewer.pictures RUN docs/images (make screenshots)."""

import sys
from pathlib import Path

from PIL import Image

from tests.viewer.web_stage import browsing, serving

PAGES = {"overview": "overview", "list": "trajectories?split=train&step=1", "timeline": "timeline"}


def main(run, folder):
    with serving(run) as url, browsing() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})

        def shoot(name):
            page.wait_for_timeout(1000)  # what a page draws after its first paint
            path = Path(folder) / f"viewer-{name}.png"
            page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
            print(path, path.stat().st_size)

        for name, where in PAGES.items():
            page.goto(f"{url}/#/{where}")
            page.wait_for_selector(f"main[data-page={where.partition('?')[0]}]")
            shoot(name)
        page.goto(f"{url}/#/trajectories?step=1&stop=completed&tool=calculator")
        page.locator("tr[data-place]").first.click()
        page.wait_for_selector("main[data-page=trajectory]")
        page.get_by_text("side by side").click()
        page.wait_for_selector(".column")
        shoot("group")
        page.go_back()
        page.locator("#raw summary").click()
        page.locator('.modes button:has-text("entropy")').click()
        page.evaluate("scrollTo(0, document.querySelector('#raw').offsetTop - 80)")
        page.locator(".tok").nth(4).hover()
        shoot("tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
