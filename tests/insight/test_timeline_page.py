"""The timeline's page: what it is made of, and how it behaves in a real browser. Screenshots: tests/screenshots/."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import browser, keep_screenshot
from graphs import bucket_key
from steps import LAYOUT, gradient, step_of_buckets

from dp_compile.insight.step import Step
from dp_compile.insight.timelines import timeline_page
from dp_compile.plan.buckets import BucketPlan

MAX_NBYTES = 3 * 1024 * 1024


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(found))


def rows_of(page: str) -> list[str]:
    return re.findall(r"<tr><td.*?</tr>", page)


class Tags(HTMLParser):
    """Checks that elements nest, and collects what could load something."""

    VOID = frozenset({"meta", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(("n_buckets", "measured", "n_keys"), [(1, False, 1), (5, True, 2), (500, True, 1)])
def test_what_the_page_is_made_of(n_buckets: int, measured: bool, n_keys: int) -> None:
    page = timeline_page(step_of_buckets(n_buckets, measured=measured, n_keys=n_keys))
    tags = Tags(page)
    assert tags.open == []
    assert tags.loads == ["data:,"]
    data = data_of(page)
    assert [view["name"] for view in data["views"]] == ["planned", "measured"][: 1 + measured]
    assert len(data["lanes"]) == n_keys
    assert [len(view["transfers"]) for view in data["views"]] == [n_buckets] * (1 + measured)
    assert len(rows_of(page)) == n_buckets
    assert len(page.encode()) < MAX_NBYTES


def test_two_thousand_buckets_stay_small() -> None:
    assert len(timeline_page(step_of_buckets(2_000, per_bucket=1, measured=True)).encode()) < MAX_NBYTES


def test_a_step_without_buckets_and_of_no_length() -> None:
    step = dataclasses.replace(step_of_buckets(1), plan=BucketPlan(()))
    assert data_of(timeline_page(step))["lanes"] == []
    assert rows_of(timeline_page(step)) == []
    still = dataclasses.replace(step, ready=dataclasses.replace(step.ready, backward_s=0.0))
    assert data_of(timeline_page(still))["end"] == 0


HOSTILE = "</script><script>alert(1)</script>&\"'<b> \u2028 \U0001f600"


def hostile_step() -> Step:
    key = bucket_key("", "sum", "float32", "cpu")
    plan = BucketPlan((LAYOUT.bucket(key, [gradient(0, key, HOSTILE)], f"<i>{HOSTILE}"),))
    return dataclasses.replace(step_of_buckets(1, per_bucket=1), plan=plan, cost_source="<script>")


def test_names_cannot_leave_their_place() -> None:
    page = timeline_page(hostile_step())
    assert Tags(page).open == []
    assert page.count("<script") == 2
    assert "<b>" not in page
    assert data_of(page)["buckets"][0]["members"][0][0] == HOSTILE


# --- in a browser -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def opened(driver: Any, directory: Path, step: Step, scheme: str = "light") -> None:
    """Opens the page of a step, with what was logged before forgotten."""
    page = directory / "page.html"
    page.write_text(timeline_page(step))
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get(page.as_uri())


def requested(driver: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith("data:")]


def texts(driver: Any, selector: str) -> list[str]:
    return [each.text for each in driver.find_elements("css selector", selector)]


def pixel(driver: Any, x: float, y: float) -> list[int]:
    script = (
        "const c = document.getElementById('chart'), r = devicePixelRatio;"
        "return Array.from(c.getContext('2d').getImageData(arguments[0] * r, arguments[1] * r, 1, 1).data)"
    )
    return list(driver.execute_script(script, x, y))


def place_in_lane(driver: Any, lane: int, ms: float, data: dict[str, Any]) -> tuple[float, float]:
    """Where a time of a lane is drawn, in the chart's pixels: the gutter is 158 wide, the margin 16."""
    box = driver.execute_script(
        "const l = document.querySelectorAll('.lane')[arguments[0]], c = document.getElementById('chart');"
        "return [c.clientWidth, l.offsetTop, l.offsetHeight]",
        lane,
    )
    width, top, height = box
    span = data["end"] - data["start"]
    first, last = data["start"] - 0.01 * span, data["end"] + 0.02 * span
    return 158 + (ms - first) / (last - first) * (width - 174), top + height / 2


def point_at(driver: Any, x: float, y: float, *, click: bool = False) -> None:
    action_chains = pytest.importorskip("selenium.webdriver").ActionChains
    chart = driver.find_element("id", "chart")
    middle = chart.size["width"] / 2, chart.size["height"] / 2
    moved = action_chains(driver).move_to_element_with_offset(chart, round(x - middle[0]), round(y - middle[1]))
    (moved.click() if click else moved).perform()


def press(driver: Any, *keys: str) -> None:
    driver.find_element("id", "chart").send_keys(*keys)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "measured", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["planned", "measured"]
)
@pytest.mark.parametrize("n_buckets", [5, 500])
def test_lanes_colours_and_silence(driver: Any, tmp_path: Path, n_buckets: int, measured: bool, scheme: str) -> None:
    step = step_of_buckets(n_buckets, measured=measured)
    opened(driver, tmp_path, step, scheme)
    lanes = [re.sub(", up to .*", "", text) for text in texts(driver, ".lane")]
    assert lanes == ["compute", "layers", "waiting", "network", *["compute", "waiting", "network"] * measured]
    assert [text.split()[0] for text in texts(driver, ".view")] == ["planned", "measured"][: 1 + measured]
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[scheme]
    assert driver.get_log("browser") == []
    assert requested(driver) == [(tmp_path / "page.html").as_uri()]
    keep_screenshot(driver, f"page-{n_buckets}-{'measured' if measured else 'planned'}-{scheme}")
    data = data_of(timeline_page(step))
    drawn = {"light": [[0, 103, 163], [191, 75, 0]], "dark": [[90, 179, 230], [245, 146, 74]]}[scheme]
    transfers = data["views"][0]["transfers"]
    for transfer, colour in ((transfers[0], drawn[0]), (transfers[-1], drawn[1])):
        x, y = place_in_lane(driver, 3, transfer[3] + (transfer[4] - transfer[3]) * 0.1, data)
        assert pixel(driver, x, y - 8)[:3] == colour


def test_hover_shows_members_and_times(driver: Any, tmp_path: Path) -> None:
    step = step_of_buckets(5, measured=True)
    opened(driver, tmp_path, step, "dark")
    data = data_of(timeline_page(step))
    transfer = data["views"][0]["transfers"][2]
    point_at(driver, *place_in_lane(driver, 3, (transfer[3] + transfer[4]) / 2, data))
    (shown,) = texts(driver, "#tooltip")
    assert shown.startswith("bucket 2\n")
    assert "30.0 ms" in shown
    assert "ends here: the predicted end is earliest so" in shown
    for member in step.plan.buckets[2].members:
        assert member.label in shown
    keep_screenshot(driver, "page-hover-dark")
    point_at(driver, 5, 5)
    assert texts(driver, "#tooltip") == [""]


def test_waiting_buckets_are_found_in_a_crowd(driver: Any, tmp_path: Path) -> None:
    step = step_of_buckets(500)
    opened(driver, tmp_path, step)
    x, y = place_in_lane(driver, 1, 49.0, data_of(timeline_page(step)))
    point_at(driver, x, y + 40)
    assert texts(driver, "#tooltip")[0].startswith("bucket ")
    keep_screenshot(driver, "page-500-hover-light")


def test_keys_walk_zoom_and_say(driver: Any, tmp_path: Path) -> None:
    opened(driver, tmp_path, step_of_buckets(500, per_bucket=20))
    press(driver, "\ue014", "\ue014")
    assert texts(driver, "#selected h2") == ["bucket 1"]
    assert len(texts(driver, "#selected .members li")) == 20
    assert "bucket 1, " in driver.execute_script("return document.getElementById('spoken').textContent")
    before = driver.execute_script("return document.getElementById('chart').toDataURL()")
    press(driver, "+", "+", "+", "+", "+", "+", "+", "+")
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    press(driver, "\ue010")
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert texts(driver, "#selected h2") == ["bucket 499"]
    assert driver.execute_script("return document.getElementById('chart').toDataURL()") != before
    keep_screenshot(driver, "page-500-zoomed-light")
    press(driver, "\ue00c", "0")
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert texts(driver, "#selected") == [""]
    assert driver.get_log("browser") == []


def test_wheel_zooms_and_dragging_moves(driver: Any, tmp_path: Path) -> None:
    opened(driver, tmp_path, step_of_buckets(5))
    selenium = pytest.importorskip("selenium.webdriver")
    chart = driver.find_element("id", "chart")
    tick = "return document.getElementById('chart').toDataURL()"
    pictures = [driver.execute_script(tick)]
    origin = selenium.common.actions.wheel_input.ScrollOrigin.from_element(chart)
    selenium.ActionChains(driver).scroll_from_origin(origin, 0, -300).perform()
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    pictures.append(driver.execute_script(tick))
    selenium.ActionChains(driver).move_to_element(chart).click_and_hold().move_by_offset(-120, 0).release().perform()
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    pictures.append(driver.execute_script(tick))
    driver.find_element("id", "whole").click()
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert len(set(pictures)) == 3


def test_odd_names_are_only_shown(driver: Any, tmp_path: Path) -> None:
    opened(driver, tmp_path, hostile_step())
    press(driver, "\ue011")
    assert HOSTILE.split(" ")[0] in texts(driver, "#selected .members li")[0]
    assert driver.get_log("browser") == []


def test_several_keys_unseen_ends_and_no_buckets(driver: Any, tmp_path: Path) -> None:
    step = step_of_buckets(9, measured=True, n_keys=3)
    assert step.measured is not None
    seen = [dataclasses.replace(each, finish_s=None) for each in step.measured.buckets]
    opened(
        driver, tmp_path, dataclasses.replace(step, measured=dataclasses.replace(step.measured, buckets=tuple(seen)))
    )
    networks = [text for text in texts(driver, ".lane") if text.startswith("network")]
    assert networks == ["network float32", "network bfloat16", "network float16"] * 2
    assert "launched, its end was not seen" in texts(driver, ".legend li")
    keep_screenshot(driver, "page-keys-unseen-light")
    opened(driver, tmp_path, dataclasses.replace(step_of_buckets(1), plan=BucketPlan(())))
    press(driver, "\ue014")
    assert texts(driver, ".lane") == ["compute"]
    assert driver.get_log("browser") == []
