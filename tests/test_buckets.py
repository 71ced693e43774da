"""The page on which a reader moves buckets: its numbers are the package's, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Prediction, predict
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.workload import Workload
from ddlkit.report import site
from ddlkit.report.site import buckets

CASES = buckets.cases()
SCRIPT = Path(site.__file__).with_name("buckets.js")


def workload_of(case: dict[str, Any]) -> Workload:
    return Workload.from_arrays(
        case["forward_s"], case["backward_s"], case["bytes"], update_s=case["update_s"]
    )


def told(case: dict[str, Any], ends: list[int]) -> Prediction:
    plan = FusionPlan("page", tuple(ends))
    return predict(workload_of(case), plan, AlphaBeta(**case["wire"]))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "alone.html"
    path.write_text(site.bucket_page(), encoding="utf-8")
    return path


def test_one_file_is_the_whole_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<(?:script|img|iframe)[^>]*\bsrc=|@import|url\(|https?://", text)
    assert set(re.findall(r'href="([^"]*)"', text)) == {"data:,"}
    assert len(re.findall(r"fill: #[0-9a-f]{6};", text)) == len(buckets.COLOURED) + 1
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 300


def test_a_case_is_what_was_recorded() -> None:
    assert set(CASES) == {"toy", *buckets.NETWORKS}
    assert told(CASES["toy"], [1, 2, 3]).iteration_s == pytest.approx(12.5)
    for case in CASES.values():
        assert case["ends"][-1] == len(case["bytes"]) == len(case["names"])


@pytest.fixture
def browser(page: Path, start_browser: Any) -> Iterator[Any]:
    driver = start_browser()
    driver.get(page.as_uri())
    yield driver
    assert driver.get_log("browser") == []


def shown(driver: Any) -> dict[str, str]:
    names = ("messages", "iteration", "exposed", "scaling", "best", "above")
    return {name: driver.find_element("id", name).text for name in names}


def choose(driver: Any, name: str) -> None:
    driver.execute_script(
        "const l = document.getElementById('network'); l.value = arguments[0]; l.onchange()", name
    )


def ends_of(driver: Any) -> list[int]:
    return list(driver.execute_script("return state.ends"))


@pytest.mark.browser
def test_the_page_computes_what_the_package_does(browser: Any) -> None:
    """Random steps under random plans; the best plan; the rules by which others cut."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = int(rng.integers(1, 30))
        case = {
            "forward_s": rng.uniform(0, 2),
            "backward_s": rng.uniform(0, 1, n).tolist(),
            "bytes": rng.integers(1, 60_000_000, n).tolist(),
            "update_s": rng.choice([0.0, 0.3]),
            "wire": {
                "alpha_s": 10 ** rng.uniform(-5, 0),
                "beta_s_per_byte": 10 ** rng.uniform(-10, -7),
            },
        }
        ends = sorted({*rng.integers(1, n + 1, 3).tolist(), n})
        found = browser.execute_script(
            "const [net, ends] = arguments, wire = net.wire;"
            "return [model.play(net, ends, wire, 1), model.exact(net, wire, 1), model.ddp(net),"
            " model.buffer(net, 4 * MIB)]",
            json.loads(json.dumps(case)),
            ends,
        )
        played, best, ddp, buffer = found
        expected = told(case, ends)
        assert played["iteration"] == pytest.approx(expected.iteration_s, rel=1e-12)
        assert played["exposed"] == pytest.approx(expected.exposed_communication_s, abs=1e-9)
        workload, cost = workload_of(case), AlphaBeta(**case["wire"])
        least_s = predict(workload, make_plan("exact", workload, cost), cost).iteration_s
        assert told(case, best).iteration_s == pytest.approx(least_s, rel=1e-12)
        assert tuple(ddp) == make_plan("ddp", workload).ends
        assert tuple(buffer) == make_plan("buffer:4MiB", workload).ends


@pytest.mark.browser
def test_what_a_reader_does_changes_what_is_shown(browser: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    assert shown(browser)["iteration"] == "12.5 s"
    cut = browser.find_element("css selector", "[data-cut='0']")
    cut.send_keys(Keys.DELETE)
    assert ends_of(browser) == [2, 3]
    assert shown(browser)["iteration"] == f"{told(CASES['toy'], [2, 3]).iteration_s:.3g} s"
    browser.find_element("css selector", "[data-cut='0']").send_keys(Keys.ARROW_LEFT)
    assert ends_of(browser) == [1, 3]

    choose(browser, "googlenet")
    ends = ends_of(browser)
    assert shown(browser)["scaling"] == f"{told(CASES['googlenet'], ends).scaling_factor:.3f}"
    browser.find_element("id", "exact").click()
    assert shown(browser)["above"].startswith("0%")
    browser.find_element("id", "single").click()
    assert shown(browser)["messages"] == "1"
    browser.find_element("id", "split").click()
    assert len(ends_of(browser)) == 2

    handle = browser.find_element("css selector", "[data-cut='0'] circle")
    before = ends_of(browser)
    ActionChains(browser).drag_and_drop_by_offset(handle, 60, 0).perform()
    after = ends_of(browser)
    assert len(after) == 2 and after[0] > before[0]
    strip = browser.find_element("id", "strip")
    ActionChains(browser).move_to_element_with_offset(strip, -300, 20).click().perform()
    assert len(ends_of(browser)) == 3


@pytest.mark.browser
def test_every_cut_and_control_is_reached_by_keyboard_and_named(browser: Any) -> None:
    choose(browser, "resnet18")
    names = browser.execute_script(
        "return [...document.querySelectorAll('input, select, button')]"
        ".map(e => (e.closest('label') || e).textContent.trim())"
    )
    assert all(names)
    handles = browser.execute_script(
        "return [...document.querySelectorAll('.cut')].map(e => [e.tabIndex, e.getAttribute('aria-label')])"
    )
    assert [tab for tab, _ in handles].count(0) == 1 and all(name for _, name in handles)
