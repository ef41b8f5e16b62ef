"""Makes docs/images/page.gif: the page of a running server, writing a reply and explaining a word.

    foredraft serve &
    python docs/make_page_gif.py http://127.0.0.1:8000

Needs Chromium and the extra `test-page`. The reply is shown at the page's slow pace, so that
guesses can be seen; its times are no measurement.
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

TARGET = Path(__file__).parent / "images" / "page.gif"
SIZE = (1180, 640)
SHOWN_WIDTH = 944
SHORTEST_MS = 60
REPLY_MS, WHY_MS = 1500, 4000
"""How long the finished reply and the explanation stay."""
COLOURS = 128
PROMPT = (
    "Correct the spelling and change nothing else: The old mill stands by the rivver. Every "
    "morning she opens the mill, sweeps the floor of the mill and sells flour to the town."
)


def record(address: str) -> tuple[list[tuple[float, bytes]], bytes]:
    """Frames of the page while it writes a reply, with their times, and the reasons for a word."""
    painted: list[tuple[float, bytes]] = []
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light"
        )
        page.goto(address)
        page.click(".pace >> text=slow")
        page.fill("textarea", PROMPT)
        devtools = page.context.new_cdp_session(page)

        def keep(frame: Any) -> None:
            painted.append((frame["metadata"]["timestamp"], base64.b64decode(frame["data"])))
            devtools.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

        devtools.on("Page.screencastFrame", keep)
        devtools.send("Page.startScreencast", {"format": "png"})
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.reply .facts b")
        page.wait_for_timeout(300)
        devtools.send("Page.stopScreencast")
        corrections = page.locator(".turn .token[data-by=correction]")
        drafted = page.locator(".turn .token[data-by=draft]")
        (corrections if corrections.count() else drafted).first.click()
        page.locator("#why").wait_for(state="visible")
        page.wait_for_timeout(600)
        return painted, page.screenshot()


def main(address: str) -> None:
    painted, reasons = record(address)
    kept = [painted[0]]
    for frame in painted[1:]:  # too short a frame is never seen
        if 1e3 * (frame[0] - kept[-1][0]) >= SHORTEST_MS:
            kept.append(frame)
    kept[-1] = painted[-1]
    seconds = [at for at, _ in kept]
    times = [int(1e3 * (after - at)) for at, after in pairwise(seconds)]
    height = SHOWN_WIDTH * SIZE[1] // SIZE[0]
    pictures = [
        Image.open(io.BytesIO(data)).convert("RGB").resize((SHOWN_WIDTH, height))
        for data in [*(data for _, data in kept), reasons]
    ]
    sample = Image.new("RGB", (SHOWN_WIDTH, 2 * height))
    sample.paste(pictures[-1], (0, 0))
    sample.paste(pictures[len(pictures) // 2], (0, height))
    palette = sample.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
    first, *others = (
        picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures
    )
    first.save(
        TARGET,
        save_all=True,
        append_images=others,
        duration=[*times, REPLY_MS, WHY_MS],
        loop=0,
        optimize=True,
    )
    print(f"{TARGET}: {1 + len(others)} frames, {TARGET.stat().st_size / 1e6:.2f} MB")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
