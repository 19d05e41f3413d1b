"""The page as text: well formed, closed to the outside, everything escaped and everything shown."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from page_sample import EVIL, many_runs, picture, sample, write_runs
from PIL import Image

import gcfed.report.page
from gcfed.report.drawings import embedded, scatter, sparkline
from gcfed.report.lines import folded
from gcfed.report.page import write_page

SOURCES = Path(gcfed.report.page.__file__).parent
VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """Every tag with its attributes, every text with the tags around it; fails where tags are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {self.get_starttag_text()}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        self.texts.append((tuple(self.open), data))

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    def raw(self, tag):
        return [data for inside, data in self.texts if inside[-1:] == (tag,)]

    def text(self, *tags):
        """What people read: all of it, or what is anywhere inside one of the tags."""
        shown = [(inside, data) for inside, data in self.texts if inside[-1:] not in (("script",), ("style",))]
        return " ".join(" ".join(data for inside, data in shown if not tags or {*tags} & {*inside}).split())


def written(folder, **changed):
    report = sample(folder, **changed)
    write_page(report, report.folder / "index.html")
    return Page((report.folder / "index.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_runs(folder / "runs")
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return written(folder)


def test_ids_are_unique_and_links_lead_somewhere(page, folder):
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for attrs in page.all("a")]
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    files = [link for link in links if not link.startswith("#")]
    assert "figures/dynamics.pdf" in files
    assert "../runs/moon_failed" in files
    assert [link for link in files if not (folder / "site" / link).exists()] == []
    labels = [attrs["aria-labelledby"] for _, attrs in page.tags if "aria-labelledby" in attrs]
    assert labels
    assert set(labels) <= set(ids)


def test_nothing_is_fetched_and_no_script_but_ours_can_run(page):
    assert [
        tag for tag, attrs in page.tags if tag in ("iframe", "object", "embed", "base", "form") and "action" in attrs
    ] == []
    assert all(attrs["src"].startswith("data:image/png;base64,") for attrs in page.all("img"))
    assert [(attrs["width"], attrs["height"]) for attrs in page.all("img")] == [("336", "168")]  # 0.7 × 480 × 240
    assert all(attrs["href"].startswith("data:") for attrs in page.all("link"))
    assert [attrs for _, attrs in page.tags if any(name == "style" or name.startswith("on") for name in attrs)] == []
    assert page.raw("script") == [(SOURCES / "page.js").read_text()]
    (style,) = page.raw("style")
    assert style.endswith((SOURCES / "page.css").read_text())
    assert not re.search(r"url\(|@import", style)
    (policy,) = [attrs["content"] for attrs in page.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy


def test_every_text_is_escaped(page):
    assert len(page.all("script")) == 1
    assert "alert" not in "".join(str(attrs) for tag, attrs in page.tags if tag == "script")
    for place in (
        f"Report {EVIL}",  # the title
        f"after round 1 of 9: ValueError: {EVIL}",  # a run's note
        f"GC-Fed, Table 5: Accuracy {EVIL} (%)",  # a table's title
        f"Accuracy {EVIL}",  # a figure's caption
        f"search {EVIL}",
        f"{EVIL}, MLP, 5/20",  # a federation
    ):
        assert place in page.text(), place
    assert EVIL in page.text("td")  # a trial's parameter
    assert EVIL in page.text("th")  # a table's label


def test_every_run_and_every_state_is_shown(page):
    lines = [attrs for attrs in page.all("tr") if "data-state" in attrs]
    states = [attrs["data-state"] for attrs in lines]
    assert {state: states.count(state) for state in states} == {
        "finished": 10, "diverged": 1, "failed": 2, "unfinished": 1,
    }  # fmt: skip
    text = page.text()
    assert "14 runs in 6 settings" in text
    assert "10 finished 1 diverged 2 failed 1 unfinished" in text
    assert "4 that diverged, failed or are unfinished" in text
    assert "after round 2 of 9" in text
    assert "the test loss of round 2 is not finite" in text
    assert "its files cannot be read" in text


def test_a_runs_numbers(page):
    # 0.1, 0.6, 0.62; 3 rounds of 5 kB both ways
    text = page.text("tr")
    assert "FedProx digits, MLP, 5/20, α 0.1 2 finished 3/3 62.00 62.00 44.00 2 3e-05 fedprox_s2" in text
    assert "1 finished 2/2 2.50e-01 2.50e-01 3.75e-01 2 2e-05 regression" in text


def test_tables_say_what_is_best_missing_and_different(page):
    # 51, 52, 53 % and 61, 62, 63 %: √(1² + 2²) and √(1² + 3²) are what differences are divided by
    assert (
        "FedAvg 52.00 (1.00) ≠ – FedAvg paper 59.45 (2.00) 59.45 (2.00) FedAvg difference −7.45 (3.3 σ)" in page.text()
    )
    assert (
        "FedProx 62.00 (1.00) ≠ – FedProx paper 60.45 (3.00) 60.45 (3.00) FedProx difference +1.55 (0.5 σ)"
        in page.text()
    )
    assert page.text("strong").startswith("62.00 (1.00)")
    assert page.text("u").startswith("52.00 (1.00)")
    assert [attrs["class"] for attrs in page.all("td") if "far" in attrs.get("class", "")] == ["number far"] * 2
    assert sum("bare" in attrs.get("class", "").split() for attrs in page.all("td")) == 9  # no run has α 0.05
    assert "rounds 3 (paper 800)" in page.text("p")
    assert f"{EVIL} 20.00 [1] † ≠ – {EVIL} paper" in page.text()
    views = [attrs for attrs in page.all("input") if attrs["type"] == "radio"]
    assert [attrs["value"] for attrs in views] == ["0", "1", "2", "3"]
    assert ["checked" in attrs for attrs in views] == [True, False, False, False]
    assert len(page.all("caption")) == len(page.all("table")) == 4


def test_a_search_tells_its_ends(page):
    assert "4 trials; highest value 0.9 in trial 1; lowest value 0.5 in trial 0." in page.text()
    assert page.raw("title")[1:] == ["trial 0: 0.5", "trial 1: 0.9", "trial 3: 0.7"]


def test_a_report_of_nothing(tmp_path):
    page = written(tmp_path, runs=[], comparisons=(), tables=(), pictures=(), searches=())
    assert "0 runs in 0 settings" in page.text()
    assert [attrs["href"] for attrs in page.all("a")] == ["#content", "#runs", "#reading"]


def test_written_tables_are_linked(tmp_path):
    (tmp_path / "site" / "tables").mkdir(parents=True)
    (tmp_path / "site" / "tables" / "best.csv").write_text("")
    links = [attrs["href"] for attrs in written(tmp_path, runs=[]).all("a")]
    assert [link for link in links if link.startswith("tables/")] == ["tables/best.csv"]


def test_a_thousand_runs_and_large_pictures_stay_small(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)  # 0.9 MB: does not compress
    report = sample(tmp_path, many_runs(1000), pictures=(picture(tmp_path, "noise", "", noise),) * 4)
    write_page(report, tmp_path / "index.html")
    assert (tmp_path / "index.html").stat().st_size < 5e6


def test_pictures_are_left_alone_within_their_share_and_shrink_above_it(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (300, 600, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    Image.fromarray(noise[:10, :10]).save(tmp_path / "small.png")
    large, small = (
        base64.b64decode(picture.url.removeprefix("data:image/png;base64,"))
        for picture in embedded([tmp_path / "large.png", tmp_path / "small.png"], 200_000)
    )
    assert small == (tmp_path / "small.png").read_bytes()
    assert len(large) <= 100_000
    width, height = Image.open(io.BytesIO(large)).size
    assert 320 <= width < 600
    assert abs(width - 2 * height) <= 1


def test_a_sparkline_is_the_curve():
    assert 'points="2,20.0 50,11.0 98,2.0"' in sparkline([0, 0.25, 0.5], 0.5, width=100, height=22)
    assert 'cx="50" cy="11.0"' in sparkline([0.25], 0.5, width=100, height=22)
    assert sparkline([], 0.5) == ""
    points = re.search(r'points="(.*)"', sparkline(np.linspace(0, 1, 800), 1.0, points=9))[1].split()
    assert [float(point.split(",")[1]) for point in points] == pytest.approx(np.linspace(20, 2, 9), abs=0.1)


def test_a_scatter_puts_the_ends_at_the_ends():
    drawing = scatter([3, 7], [0.5, 0.9], width=640, height=220)
    assert re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawing) == [("64.0", "186.0"), ("628.0", "12.0")]
    assert re.findall(r">([^<]+)</text>", drawing) == ["0.5", "0.9", "3", "7", "trial"]
    assert scatter([], []) == ""
    assert re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', scatter([1], [5.0], width=640, height=220)) == [("346.0", "99.0")]


@pytest.mark.parametrize("block", [0, 1], ids=["light", "dark"])
def test_texts_have_the_contrast_that_wcag_asks(page, block):
    (style,) = page.raw("style")
    base = dict(re.findall(r"--(\w+): (#\w+);", style.split("\n", 1)[0]))
    variables = re.findall(r"--(\w+): (#\w+|var\(--\w+\));", re.findall(r":root \{([^}]*)\}", style)[1 + block])
    colours = base | {name: base.get(found[6:-1], found) for name, found in variables}
    for text, ground in [("ink", "page"), ("ink", "target"), ("quiet", "page"), ("quiet", "raised"), ("link", "page")]:
        light, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    channels = np.array([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_a_note_of_many_items_is_a_list_to_unfold():
    assert folded("Failed (in no mean): a; b; c; d; e.") == ("Failed (in no mean)", ["a", "b", "c", "d", "e."])
    for short in ("Failed: a; b; c; d.", "No list at all.", f"{60 * '.'}: a; b; c; d; e"):
        assert folded(short) == (short, [])


def test_what_is_missing_comes_with_its_command(page):
    assert "11 runs of 4 cells missing, and the commands" in page.text()
    assert "FedAvg, α 0.05 python src/train.py -m partition.alpha=0.05 algorithm=fedavg" in page.text()
