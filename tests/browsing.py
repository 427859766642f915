"""A real browser for tests of pages. The tests share it; pages may load only their own files."""

import shutil
from importlib.util import find_spec

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
MISSING = [] if find_spec("playwright") else ["playwright: pip install -e '.[browser]'"]
MISSING += [] if CHROMIUM else ["chromium: Debian's package of that name"]
needs_a_browser = pytest.mark.skipif(bool(MISSING), reason=f"no {'; no '.join(MISSING)}")
PHONE, DESK = (390, 844), (1280, 800)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """Opens files. A page may load only itself and files in `root`, and may log no error."""
    contexts, wrong = [], []

    def open_page(file, hash="", root=None, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()

        def guard(route):
            if route.request.url.startswith(((root or file).as_uri(), "blob:")):
                route.continue_()
            else:
                wrong.append(route.request.url)
                route.abort()

        context.route(lambda url: not url.startswith("data:"), guard)
        page.on(
            "console",
            lambda message: wrong.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{file.as_uri()}{hash}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
