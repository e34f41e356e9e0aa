"""The page as a browser shows it: drawn, readable, offline, wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import running_browser
from run_folders import Speed, closed, simulated, write_folder

from specstack_loadtest.report import write_report
from specstack_loadtest.summary import write_summary

USERS = (1, 4)
INK = """(canvas) => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colors = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 200) colors.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
  }
  return [...colors];
}"""
"""The opaque colours of a canvas."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For all tests."""
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two sides at two loads."""
    runs = {
        (side, repeat): simulated(Speed(budget=budget), USERS, 30, 5, seed=repeat, cap=3)
        for side, budget in (("plain", 0), ("goodput", 3))
        for repeat in range(2)
    }
    folder = tmp_path_factory.mktemp("page") / "f"
    write_folder(folder, closed(users=USERS, seconds=30, warmup=5, name="crossover"), runs)
    write_summary(folder)
    return write_report(folder)


class Opened:
    """A page and all that went wrong in it."""

    def __init__(self, browser: Any, file: Path, width: int, scheme: str) -> None:
        self.context = browser.new_context(
            offline=True, viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("requestfailed", lambda request: self.faults.append(f"failed: {request.url}"))
        self.requests: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn]", timeout=60_000)
        self.page.wait_for_timeout(500)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")


@pytest.fixture(params=[(1280, "light"), (400, "dark")], ids=["wide-light", "narrow-dark"])
def opened(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Opened]:
    """The page, drawn."""
    found = Opened(browser, report, *request.param)
    yield found
    found.context.close()


def test_nothing_goes_wrong_and_nothing_is_fetched(opened: Opened, report: Path) -> None:
    assert opened.faults == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report.as_uri()]


def test_every_plot_is_drawn_in_the_colours_of_its_sides(opened: Opened) -> None:
    page = opened.page
    places = page.eval_on_selector_all(".plot", "found => found.map((one) => one.id)")
    assert {"crossover", "throughput", "over-time", "ttft_ms-0", "e2e_ms-1"} < set(places)
    assert {"acceptance-0", "acceptance-1"} < set(places)
    for place in places:
        sides = (
            ["goodput"] if place.startswith(("acceptance", "crossover")) else ["plain", "goodput"]
        )
        colors = {
            color for canvas in page.query_selector_all(f"#{place} canvas, #{place} >> canvas")
            for color in canvas.evaluate(INK)
        }  # fmt: skip
        for side in sides:
            assert near(color_of(page, side), colors), f"{place}: nothing in the colour of {side}"


def test_an_empty_plot_is_noticed(opened: Opened) -> None:
    """Control: a side that is hidden leaves none of its colour."""
    page = opened.page
    page.click("button[data-side=goodput]")
    page.wait_for_timeout(500)
    canvas = page.query_selector("#ttft_ms-0 >> canvas")
    colors = set(canvas.evaluate(INK))
    assert not near(color_of(page, "goodput"), colors)
    assert near(color_of(page, "plain"), colors)
    page.click("button[data-side=goodput]")
    page.wait_for_timeout(500)
    assert near(color_of(page, "goodput"), set(canvas.evaluate(INK)))


def color_of(page: Any, side: str) -> tuple[int, ...]:
    """As the legend shows it."""
    shown = page.eval_on_selector(
        f"button[data-side={side}] i", "one => getComputedStyle(one).backgroundColor"
    )
    return tuple(int(part) for part in shown.removeprefix("rgb(").removesuffix(")").split(","))


def near(wanted: tuple[int, ...], colors: set[int]) -> bool:
    """Whether one of the colours is the wanted one, but for blending."""
    return any(
        all(abs(((color >> shift) & 255) - part) < 24
            for shift, part in zip((16, 8, 0), wanted, strict=True))
        for color in colors
    )  # fmt: skip


def test_the_page_is_as_wide_as_its_window(opened: Opened) -> None:
    width, inner = opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner


def test_tables_hold_every_side_of_every_load(opened: Opened) -> None:
    page = opened.page
    rows = page.eval_on_selector_all(
        "#throughput-section table.sides tbody th.side",
        "found => found.map((one) => one.innerText.trim())",
    )
    assert rows == ["plain", "goodput"] * len(USERS)
    assert page.locator("#latency table").count() == 4
    assert page.locator("text=goodput is faster than plain at every load").count() == 1


def test_text_can_be_read_in_its_colours(opened: Opened) -> None:
    """WCAG AA, of what the page is made of."""
    ratios = opened.page.evaluate(CONTRAST)
    assert ratios
    assert {what: ratio for what, ratio in ratios.items() if ratio < 4.5} == {}


CONTRAST = """() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const weights = [0.2126, 0.7152, 0.0722];
  const light = (rgb) => weights.reduce((sum, weight, i) => sum + weight * channel(rgb[i]), 0);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const rgb = parse(getComputedStyle(node).backgroundColor);
      if (rgb.length < 4 || rgb[3] > 0) return rgb;
    }
    return [255, 255, 255];
  };
  const ratios = {};
  const texts = "p, li, th, td, small, h1, h2, h3, a, .chip, button, code, .choice";
  for (const node of document.querySelectorAll(texts)) {
    if (!node.innerText || !node.innerText.trim()) continue;
    const both = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    const [a, b] = both.sort((x, y) => y - x);
    const name = `${node.tagName}.${node.className}`;
    ratios[name] = Math.min(ratios[name] ?? 99, (a + 0.05) / (b + 0.05));
  }
  return ratios;
}"""


def test_the_page_prints(opened: Opened, tmp_path: Path) -> None:
    made = opened.page.pdf(path=str(tmp_path / "page.pdf"), print_background=True)
    assert len(made) > 50_000
    assert opened.faults == []
