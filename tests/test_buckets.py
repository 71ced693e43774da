"""The page on which a reader moves buckets: its numbers are the package's, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddlkit.core.iteration import Prediction, predict
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.workload import Workload
from workbook.common import places
from workbook.course import example
from workbook.site import buckets
from workbook.site import pages as site

CASES = buckets.cases()


def workload_of(case: dict[str, Any]) -> Workload:
    return Workload.from_arrays(
        case["forward_s"], case["backward_s"], case["bytes"], update_s=case["update_s"]
    )


def planned(case: dict[str, Any], spec: str) -> list[int]:
    return [*make_plan(spec, workload_of(case), buckets.cost_of(case)).ends]


def told(case: dict[str, Any], ends: list[int]) -> Prediction:
    plan = FusionPlan("page", tuple(ends))
    return predict(workload_of(case), plan, buckets.cost_of(case))


def test_a_case_is_what_was_recorded() -> None:
    assert set(CASES) == {"toy", *buckets.NETWORKS}
    for case in CASES.values():
        assert case["ends"][-1] == len(case["bytes"]) == len(case["names"])


def test_the_answers_of_a_teachers_sheets() -> None:
    sheets = (places.ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
    toy = CASES["toy"]
    for ends, seconds in (
        ([1, 2, 3], (12.5, 3.5)),
        ([3], (15.5, 6.5)),
        ([2, 3], (14.0, 5.0)),
    ):
        step = told(toy, ends)
        assert (step.iteration_s, step.exposed_communication_s) == pytest.approx(
            seconds
        )
        assert all(f"{each:g} s" in sheets for each in seconds)
    small, large = CASES["googlenet"], CASES["resnet50"]
    for spec in ("ddp", "mg_wfbp", "exact"):
        step = told(small, planned(small, spec))
        assert f"{step.iteration_s * 1000:.0f} ms" in sheets
    ddp, exact = (told(large, planned(large, spec)) for spec in ("ddp", "exact"))
    assert f"the two are {ddp.iteration_s / exact.iteration_s - 1:.1%}\napart" in sheets


def test_the_page_opens_on_the_running_example() -> None:
    shown, running = CASES[example.NETWORK], example.load()
    assert [*CASES][0] == example.NETWORK
    for plan in ("ddp", "exact"):
        step = told(shown, planned(shown, plan))
        assert step.iteration_s == pytest.approx(running.iteration_s(plan), rel=1e-12)


@pytest.fixture
def browser(tmp_path: Path, fresh_browser: Any) -> Iterator[Any]:
    page = tmp_path / "alone.html"
    page.write_text(site.bucket_page(), encoding="utf-8")
    fresh_browser.get(page.as_uri() + "#toy")
    yield fresh_browser
    assert fresh_browser.get_log("browser") == []


def shown(driver: Any, name: str) -> str:
    return str(driver.find_element("id", name).text)


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
        if rng.random() < 0.5:
            case["wire"]["table"] = {
                "bytes": np.geomspace(1e3, 3e7, 8).tolist(),
                "seconds": np.sort(rng.uniform(1e-4, 1.0, 8)).tolist(),
                **case["wire"],
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
        assert played["exposed"] == pytest.approx(
            expected.exposed_communication_s, abs=1e-9
        )
        least_s = told(case, planned(case, "exact")).iteration_s
        assert told(case, best).iteration_s == pytest.approx(least_s, rel=1e-12)
        assert ddp == planned(case, "ddp") and buffer == planned(case, "buffer:4MiB")


@pytest.mark.browser
def test_what_a_reader_does_changes_what_is_shown(browser: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    assert shown(browser, "iteration") == "12.5 s"
    cut = browser.find_element("css selector", "[data-cut='0']")
    cut.send_keys(Keys.DELETE)
    assert ends_of(browser) == [2, 3]
    assert (
        shown(browser, "iteration") == f"{told(CASES['toy'], [2, 3]).iteration_s:.3g} s"
    )
    browser.find_element("css selector", "[data-cut='0']").send_keys(Keys.ARROW_LEFT)
    assert ends_of(browser) == [1, 3]

    browser.execute_script(
        "const l = document.getElementById('network'); l.value = 'googlenet'; l.onchange()"
    )
    ends = ends_of(browser)
    assert (
        shown(browser, "scaling")
        == f"{told(CASES['googlenet'], ends).scaling_factor:.3f}"
    )
    browser.find_element("id", "exact").click()
    assert shown(browser, "above").startswith("0%")
    browser.find_element("id", "single").click()
    assert shown(browser, "messages") == "1"
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
