"""The page in a real browser: needs playwright, and a Chromium or Chrome on PATH or named by CHROMIUM.

Screenshots lie in the test's temporary folder, or where REPORT_ARTIFACTS says.
"""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from page_sample import sample, write_runs

from gcfed.report.page import write_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser():
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH, and CHROMIUM is not set")
    with playwright.sync_playwright() as api:
        # Its sandbox does not start for root, as which tests run in containers; the page is our own.
        browser = api.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    write_runs(folder / "runs")
    report = sample(folder)
    write_page(report, report.folder / "index.html")
    return report.folder / "index.html"


@pytest.fixture(scope="module")
def visit(browser, path):
    """Opens the page; leaving it asserts that nothing was logged, raised or fetched, whatever was done with it."""

    @contextmanager
    def opened(**options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        page = context.new_page()
        page.set_default_timeout(60_000)  # a busy machine is no failure
        told, fetched = [], []
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("dialog", lambda dialog: (told.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(path.as_uri())
        try:
            yield page
            assert told == []
            assert [url for url in fetched if not url.startswith("data:")] == [path.as_uri()]
        finally:
            context.close()

    return opened


def shown(page):
    """The folders of the runs that the list shows, in its order."""
    return page.locator("#all-runs tbody tr:visible td.folder").all_inner_texts()


def sort_by(page, name):
    page.locator("#all-runs thead button", has_text=name).click()


def test_it_fits_wide_and_narrow_windows_and_follows_the_colour_scheme(visit, tmp_path):
    artifacts = Path(os.environ.get("REPORT_ARTIFACTS", tmp_path))
    artifacts.mkdir(parents=True, exist_ok=True)
    with visit() as page:
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        for width, scheme in (1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert colour == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}[scheme]
            page.screenshot(path=artifacts / f"report_{width}_{scheme}.png", full_page=True)
        assert page.evaluate("[...document.images].map((image) => image.naturalWidth)") == [480]


def test_the_list_of_runs_sorts(visit):
    with visit() as page:
        given = shown(page)
        assert given == sorted(given)
        best = ["moon_diverged", "moon_failed", "regression", "moon_unfinished"]  # 20, 20, 0.25 (an error), 30 %
        best += [f"{method}_s{seed}" for method in ("fedlc", "fedavg", "fedprox") for seed in (1, 2, 3)]
        sort_by(page, "best")
        assert shown(page) == [*best, "broken"]
        sort_by(page, "best")
        assert shown(page)[:-3] == best[:1:-1]
        assert shown(page)[-1] == "broken"  # measured nothing: last, either way
        assert page.locator("[aria-sort]").evaluate_all("all => all.map((one) => one.ariaSort)") == ["descending"]
        page.locator("#all-runs thead button", has_text="folder").press("Enter")
        assert shown(page) == given


def test_the_list_of_runs_filters(visit):
    with visit() as page:
        search = page.get_by_role("searchbox")
        search.fill("FedProx s2")
        assert shown(page) == ["fedprox_s2"]
        assert page.locator("output").inner_text() == "1 of 14 runs"
        search.fill("")
        page.get_by_role("checkbox", name="finished", exact=True).uncheck()
        assert shown(page) == ["broken", "moon_diverged", "moon_failed", "moon_unfinished"]
        page.get_by_role("checkbox", name="failed").uncheck()
        assert shown(page) == ["moon_diverged", "moon_unfinished"]
        page.locator(".plain a", has_text="moon_failed").click()
        assert shown(page) == ["moon_diverged", "moon_failed", "moon_unfinished"]


def test_a_paper_table_shows_ours_the_papers_or_the_difference(visit):
    with visit() as page:
        body = page.locator("table.compared tbody").first
        first = "th:visible, th + td:visible"  # of each line: its label and its first cell
        lines = {"ours": "52.00 (1.00)≠", "paper": "59.45 (2.00)", "difference": "−7.45 (3.3 σ)"}
        views = {name: ["FedAvg", text] for name, text in lines.items()}
        labels = ("FedAvg", "FedAvg paper", "FedAvg difference")
        views["everything"] = [text for pair in zip(labels, lines.values(), strict=True) for text in pair]
        for name, texts in views.items():
            page.get_by_role("radio", name=name, exact=True).check()
            assert [" ".join(text.split()) for text in body.locator(first).all_inner_texts()] == texts


def test_columns_without_runs_step_back(visit):
    with visit() as page:
        heads = page.locator("table.compared").first.locator("thead th:visible")
        assert [" ".join(text.split()) for text in heads.all_inner_texts()] == ["α 0.1", "α 0.05"]
        page.get_by_role("checkbox", name="only rows and columns with runs of ours").first.check()
        assert [" ".join(text.split()) for text in heads.all_inner_texts()] == ["α 0.1"]
        assert page.locator("table.compared").first.locator("tbody td:visible").count() == 9


def test_without_scripts_and_on_paper_everything_is_there(visit):
    with visit(java_script_enabled=False) as page:
        assert len(shown(page)) == 14
        assert not page.locator("form.filter").is_visible()
        page.set_viewport_size({"width": 1032, "height": 720})  # A4 on its side, without the margins
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.scrollWidth") == 1032
        assert len(shown(page)) == 14
        assert not page.get_by_role("radio").first.is_visible()
