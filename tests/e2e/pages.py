"""Pages in a real browser: Debian's Chromium, driven by Playwright. Where either is missing, the tests are skipped."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ringfold.observe.dashboard.server import DashboardServer, Source

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_MS = 20_000


class Recorded:
    """A page of the browser, with what it wrote to its console, and the hosts that it sent requests to."""

    def __init__(self, context: Any) -> None:  # noqa: ANN401 - Playwright need not be there when types are checked
        self.context, self.page = context, context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def go(self, url: str) -> float:
        """Open an address; the time until the first content was shown, in ms."""
        self.page.goto(url)
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        self.page.wait_for_function(f"() => {paint}")
        return float(self.page.evaluate(paint))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_text(self, selector: str, text: str) -> None:
        """Wait until an element contains this text."""
        try:
            self.page.locator(selector).filter(has_text=text).first.wait_for()
        except Exception as error:
            shown = self.page.inner_text("body")
            raise AssertionError(f"{text!r} is not in {selector} within {WAIT_MS} ms; the page:\n{shown}") from error

    def check(self, url: str) -> None:
        """The console has no error, and nothing was requested from another host."""
        assert not self.errors, self.errors
        own = url.split("#")[0].removeprefix("http://")
        foreign = [each for each in self.requests if each.split("://")[1].split("/")[0] != own.split("/")[0]]
        assert not foreign, foreign

    def heap_bytes(self) -> tuple[int, int]:
        """The size of the JavaScript heap after collecting garbage, and the number of nodes."""
        session = self.context.new_cdp_session(self.page)
        for _ in range(2):
            session.send("HeapProfiler.collectGarbage")
        session.send("Performance.enable")
        metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        session.detach()
        return int(metrics["JSHeapUsedSize"]), int(metrics["Nodes"])


@contextmanager
def opened_browser() -> Iterator[Any]:
    """A browser, for as long as the block runs."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium (on Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install 'ringfold[browser]'")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            browser.close()


class ServedPages:
    """A dashboard's server in a thread with a loop of its own. Use it with `with`."""

    def __init__(self, source: Source, token: str = "") -> None:
        self.source, self.server = source, DashboardServer(source, token)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "ServedPages":
        self._thread.start()
        self.run(self.server.start("127.0.0.1:0"))
        return self

    def __exit__(self, *error: object) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return self.server.url

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - of any coroutine
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def call(self, function: Callable[[], Any]) -> Any:  # noqa: ANN401 - of any function
        """The result of a function on the server's loop."""

        async def called() -> Any:  # noqa: ANN401 - as above
            return function()

        return self.run(called())
