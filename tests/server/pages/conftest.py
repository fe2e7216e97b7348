"""A real browser for tests of the pages: Debian's `chromium` or another one on the path, driven by Playwright."""

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for the tests of one file: while its driver runs, no other event loop can run in this thread."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]' brings the browser's driver")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with api.sync_playwright() as playwright:
        # Chromium's sandbox cannot be set up by root, as whom containers run tests.
        browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Generator[Callable[..., Any], None, None]:
    """Opens a URL in a browser without a past. What the browser complains about, such as a breach of the page's
    Content-Security-Policy, fails the test at its end."""
    contexts, complaints = [], []

    def note(kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            complaints.append(text)

    def open_url(url: str, width: int = 1280, scheme: str = "light") -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: note(message.type, message.text))
        page.on("pageerror", lambda error: note("error", str(error)))
        page.goto(url)
        return page

    yield open_url
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which finds what people who cannot see, or use no mouse, would stumble over."""
    path = Path(os.environ.get("AXE_CORE") or ROOT / "node_modules" / "axe-core" / "axe.min.js")
    if not path.is_file():
        pytest.skip("axe.min.js is not at $AXE_CORE nor in node_modules: npm install --no-save axe-core")
    return path.read_text(encoding="utf-8")


@pytest.fixture
def violations(axe: str) -> Callable[[Any], list[str]]:
    """Returns what axe-core finds on a page: its rules, each with the elements that break it."""

    def look(page: Any) -> list[str]:
        page.evaluate(axe)
        found = page.evaluate("axe.run()")["violations"]
        return [f"{rule['id']}: {[node['target'] for node in rule['nodes']]}" for rule in found]

    return look
