"""The page in a real browser: nothing goes wrong, every chart is drawn, and the charts answer to hands and keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spartan.app.report.page import write_report
from tests.app.report.browser import CHROMIUM, Browser
from tests.app.report.folders import write_run

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="needs Chromium (Debian, Ubuntu: apt-get install chromium); the other tests check the page's text",
)

PAGES = ["finished", "dense", "killed", "sweep"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    killed = write_run(root / "killed", done=7, epochs=12)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 1366, "epoch": 8, "loss": NaN, "lr": 0.1}\n{"kind": "st')
    for method, sparsity in (("spartan", 0.9), ("spartan", 0.98), ("imp", 0.98), ("dense", 0.0)):
        for seed in range(2):
            folder = root / "sweep" / f"a-rather-long-name-{method}-{sparsity}-seed{seed}"
            write_run(folder, method=method, sparsity=sparsity, seed=seed, epochs=4, steps_per_epoch=20)
    runs = {
        "finished": write_run(root / "cifar10-wrn22-spartan-0.95-seed0"),
        "dense": write_run(root / "dense", method="dense", epochs=1),
        "killed": killed,
        "sweep": root / "sweep",
    }
    return {name: write_report(run) for name, run in runs.items()}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def drawn(browser: Browser) -> dict[str, int]:
    """Points of every chart on the page."""
    found = browser.run(
        "Object.fromEntries([...document.querySelectorAll('[data-chart]')].map(c => [c.dataset.chart, c.dataset.drawn]))"
    )
    return {name: int(text.removeprefix("points:")) for name, text in found.items()}


def assert_no_errors(browser: Browser) -> None:
    assert browser.run("document.documentElement.dataset.errors") == "[]"
    assert browser.log == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, width: int, dark: bool, browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    browser.open(pages[name], width, dark=dark, touch=width < 500)
    assert_no_errors(browser)
    points = drawn(browser)
    assert points
    assert all(n > 0 for n in points.values()), points
    assert browser.run("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    # No text of a chart is cut off by its edge.
    cut = browser.run("""[...document.querySelectorAll('.canvas svg')].flatMap(svg => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(t => { const b = t.getBoundingClientRect();
            return b.left < box.left - 1 || b.right > box.right + 1 || b.bottom > box.bottom + 1; }).map(t => t.textContent);
    })""")
    assert cut == []
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 26)") == dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_labels_do_not_overlap(browser: Browser, pages: dict[str, Path]) -> None:
    for width in (1200, 375):
        for name in PAGES:
            browser.open(pages[name], width)
            clashes = browser.run("""[...document.querySelectorAll('.canvas svg')].flatMap(svg => {
                const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
                return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([, q]) =>
                    p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
                    .map(([b]) => a + ' / ' + b));
            })""")
            assert clashes == [], f"{name} at {width}"


def test_theme_button(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["dense"])
    click = "document.getElementById('theme').click(), getComputedStyle(document.body).backgroundColor"
    assert browser.run(click) == "rgb(20, 23, 26)"
    assert browser.run(click) == "rgb(246, 247, 248)"
    browser.run("localStorage.clear()")


class Plot:
    """One chart on the page, to put hands on."""

    def __init__(self, browser: Browser, name: str) -> None:
        self.browser, self.name = browser, name
        browser.run(f"document.getElementById('chart-{name}').scrollIntoView()")
        box = browser.run(f"document.querySelector('#chart-{name} .plot').getBoundingClientRect().toJSON()")
        self.x, self.y, self.width, self.height = (box[k] for k in ("x", "y", "width", "height"))

    def at(self, part: float) -> tuple[float, float]:
        return self.x + part * self.width, self.y + 0.5 * self.height

    def ask(self, what: str) -> Any:
        return self.browser.run(f"document.querySelector('#chart-{self.name}'){what}")

    def tip(self) -> str | None:
        tip = ".querySelector('.tip')"
        return None if self.ask(f"{tip}.hidden") else " ".join(self.ask(f"{tip}.innerText").split())

    def points(self) -> int:
        return drawn(self.browser)[self.name]


def test_hover_drag_wheel_and_reset(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["finished"])
    plot = Plot(browser, "accuracy")
    every = plot.points()
    assert plot.tip() is None
    browser.mouse("mouseMoved", *plot.at(0.5))
    tip = plot.tip()
    assert tip is not None
    assert tip.startswith("epoch ")
    assert "top-1" in tip
    assert "top-5" in tip, "the values of all series"
    browser.drag(plot.at(0.3)[0], plot.at(0.6)[0], plot.at(0.5)[1])
    few = plot.points()
    assert 0 < few < every
    browser.mouse("mouseWheel", *plot.at(0.5), deltaX=0, deltaY=-300)
    browser.wait(f"document.querySelector('#chart-accuracy').dataset.drawn !== 'points:{few}'")
    assert 0 < plot.points() < few
    for clicks in (1, 2):
        browser.mouse("mousePressed", *plot.at(0.5), button="left", clickCount=clicks)
        browser.mouse("mouseReleased", *plot.at(0.5), button="left", clickCount=clicks)
    assert plot.points() == every
    assert_no_errors(browser)


def test_a_passing_wheel_scrolls_the_page(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["finished"])
    plot = Plot(browser, "accuracy")
    every, before = plot.points(), browser.run("scrollY")
    browser.mouse("mouseWheel", *plot.at(0.5), deltaX=0, deltaY=200)
    browser.wait(f"scrollY > {before}")
    assert plot.points() == every


def test_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["finished"])
    plot = Plot(browser, "correlation")
    every = plot.points()
    plot.ask(".querySelector('.plot').focus()")
    browser.press("Home")
    browser.press("ArrowRight")
    tip = plot.tip()
    assert tip is not None
    assert tip.startswith("epoch 2 ")
    assert plot.ask(".querySelector('[aria-live]').textContent").startswith("epoch 2: with the final mask 0.")
    browser.press("+")
    assert plot.points() < every
    browser.press("Escape")
    assert plot.points() == every
    assert plot.tip() is None
    assert "Last values: with the final mask: 1 at epoch 40" in plot.ask(".querySelector('.plot').ariaLabel")


def test_legend_log_views_and_slider(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["finished"])
    plot = Plot(browser, "accuracy")
    every = plot.points()
    plot.ask(".querySelector('.key').click()")
    assert plot.points() == every // 2
    plot.ask(".querySelector('.key').click()")
    assert plot.points() == every
    log = Plot(browser, "lr")
    log.ask(".querySelector('.tools button:last-child').click()")
    assert log.ask(".querySelector('.name').textContent") == "learning rate, log scale"
    layers = Plot(browser, "layers")
    layers.ask(".querySelectorAll('.controls button')[1].click()")
    assert layers.ask(".querySelector('.name').textContent") == "weights kept (%), log scale"
    histogram = Plot(browser, "histogram")
    before = histogram.ask(".querySelector('.bars').innerHTML")
    histogram.ask(".querySelector('input').value = 0")
    histogram.ask(".querySelector('input').dispatchEvent(new Event('input'))")
    assert histogram.ask(".querySelector('output').textContent") == "1 of 40"
    assert histogram.ask(".querySelector('.bars').innerHTML") != before
    assert_no_errors(browser)


def test_tables_sort(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["finished"])
    column = "[...document.querySelectorAll('tbody td:nth-child(5)')].map(c => +c.dataset.key)"
    click = "document.querySelectorAll('th button')[4].click()"
    browser.run(click)
    kept = browser.run(column)
    assert kept == sorted(kept)
    browser.run(click)
    assert browser.run(column) == sorted(kept, reverse=True)
    assert browser.run("document.querySelectorAll('th')[4].ariaSort") == "descending"


def test_resizing_redraws(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["finished"])
    size = {"height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.send("Emulation.setDeviceMetricsOverride", width=375, **size)
    browser.wait("document.querySelector('.canvas svg').clientWidth < 375")
    browser.wait("document.documentElement.scrollWidth <= 375")
    assert_no_errors(browser)
