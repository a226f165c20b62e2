"""Pictures of the dashboard for the documentation: `python -m ringfold.tools.screenshots DIRECTORY`.

The page shows made-up runs (`made_up_run.py`), so that a picture is the same whenever it is taken, but for the time of
day. It needs Chromium, Playwright and Pillow. With the font Inter (Debian: fonts-inter) the pictures look like those of
a desktop.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ringfold.errors import UsageError
from ringfold.observe.dashboard.finished import FinishedRuns
from ringfold.observe.dashboard.server import DashboardServer, Source
from ringfold.observe.view import MasterRow
from ringfold.tools.made_up_page import MadeUpSource
from ringfold.tools.made_up_run import DIVERGED_S, STALLED_S, MadeUpRun
from ringfold.wire.status import RunInfo

MAX_BYTES = 150_000


class Picture(NamedTuple):
    name: str
    source: Source
    width: int
    height: int
    scheme: str
    prepare: Callable[[Any], Awaitable[None]] | None = None


def screenshots(directory: Annotated[Path, typer.Argument(help="Where the pictures are written.")]) -> None:
    """Take pictures of the dashboard's page, light and dark, on a desk and on a phone."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise UsageError("screenshots need Chromium (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as scratch:
        for name, size in asyncio.run(_take(_pictures(Path(scratch)), chromium, directory)):
            typer.echo(f"{name}: {size / 1_000:.0f} kB")
            if size > MAX_BYTES:
                raise UsageError(f"{name} has {size} bytes, more than {MAX_BYTES}")


def _pictures(scratch: Path) -> list[Picture]:
    healthy, waiting = _live(DIVERGED_S + 40), _live(STALLED_S + 2)
    MadeUpRun(name="llm-350m-a").record(scratch / "a", 230)
    MadeUpRun(6, name="llm-350m-b", is_calm=True).record(scratch / "b", 200)
    many = MadeUpSource(MadeUpRun(peers=256, per_host=8).view(70, every_s=1))

    async def slide(page: Any) -> None:  # noqa: ANN401 - Playwright need not be there when types are checked
        moved = "slider => { slider.value = 141000; slider.dispatchEvent(new Event('input')); }"
        await page.locator("input[type=range]").evaluate(moved)
        await page.wait_for_timeout(600)

    return [
        Picture("dashboard-light.png", healthy, 1_480, 1_000, "light"),
        Picture("dashboard-dark.png", waiting, 1_480, 1_000, "dark"),
        Picture("dashboard-256.png", many, 1_480, 820, "light"),
        Picture("dashboard-phone.png", waiting, 390, 844, "light"),
        Picture("dashboard-replay.png", FinishedRuns([scratch / "a", scratch / "b"]), 1_480, 900, "light", slide),
    ]


def _live(until_s: float) -> MadeUpSource:
    view = MadeUpRun().view(until_s)
    view.masters = [
        MasterRow("10.0.0.1:48148", "leads" if until_s < STALLED_S + 40 else "away"),
        MasterRow("10.0.0.2:48148", "stands by" if until_s < STALLED_S + 40 else "leads"),
        MasterRow("10.0.0.3:48148", "stands by"),
    ]
    view.set_runs([RunInfo("llm-350m", "running", 7, 0, 18_204), RunInfo("vision-nightly", "running", 12, 0, 90_112)])
    return MadeUpSource(view)


async def _take(pictures: list[Picture], chromium: str, directory: Path) -> list[tuple[str, int]]:
    from playwright.async_api import async_playwright

    sizes = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium)
        for picture in pictures:
            server = DashboardServer(picture.source)
            await server.start("127.0.0.1:0")
            viewport = {"width": picture.width, "height": picture.height}
            context = await browser.new_context(viewport=viewport, color_scheme=picture.scheme)
            page = await context.new_page()
            await page.goto(server.url)
            await page.wait_for_selector(".pill")
            await page.wait_for_selector("canvas.map:visible")
            await page.wait_for_timeout(700)
            if picture.prepare is not None:
                await picture.prepare(page)
            content = _small(await page.screenshot())
            (directory / picture.name).write_bytes(content)
            sizes.append((picture.name, len(content)))
            await context.close()
            await server.stop()
        await browser.close()
    return sizes


def _small(png: bytes) -> bytes:
    """The picture with 256 colours: a third of the bytes, and no difference that one would see."""
    from PIL import Image

    small = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=2).save(
        small, "png", optimize=True
    )
    return small.getvalue()


if __name__ == "__main__":
    typer.run(screenshots)
