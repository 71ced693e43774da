"""Shared fixtures: what a test needs of the machine, and whether its absence is a failure."""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is this machine's affair, and the same tree is tried with the same examples:
# what is accepted once is accepted again. With DDLKIT_EXAMPLES=new they are others each time.
# A law that does not say how many examples it takes has half as many as with --long.
for _name, _examples in (("any machine", 50), ("long", 100)):
    settings.register_profile(
        _name,
        deadline=None,
        derandomize=os.environ.get("DDLKIT_EXAMPLES") != "new",
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=_examples,
    )
settings.load_profile("any machine")

REQUIRE_ALL = os.environ.get("DDLKIT_REQUIRE_ALL") == "1"
OURS = {"ddlkit", *(path.stem for path in Path(__file__).parent.glob("*.py"))}

# Read when torch is loaded. Tests share the cores: threads of one that wait for each other busily take
# ten times as long as one thread alone.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores Ctrl-C on behalf of what it starts in the background, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _missing(reason: str) -> None:
    """Skip where a prerequisite may be absent; fail where every test is required to run."""
    if REQUIRE_ALL:
        pytest.fail(f"DDLKIT_REQUIRE_ALL=1, but {reason}")
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that imports a package which is not here is skipped, and says so; a GPU node has no Jupyter."""
    report = yield
    lacking = re.search(
        r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr)
    )
    if report.failed and lacking and not REQUIRE_ALL and lacking[1] not in OURS:
        report.outcome = "skipped"
        reason = f"Skipped: needs {lacking[1]}, which is not installed here"
        report.longrepr = (str(collector.path), 1, reason)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported for the tests is no garbage: nobody looks for any in half a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, default=0, help="run tests in an order of chance"
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="the long fuzz, grids of half the step, and all cases of slow tests",
    )
    parser.addoption(
        "--rehearsals",
        action="store_true",
        help="also tests that repeat at full length what shorter tests hold; --long includes them",
    )
    parser.addoption(
        "--write", action="store_true", help="data/halved.csv anew, with --long"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip rehearsals unless they are asked for, and let files with a slow test come first.

    Workers then end together. With ``--shuffle SEED`` all tests are in an order of chance instead:
    none may need another before it.
    """
    if not (config.getoption("--long") or config.getoption("--rehearsals")):
        skipped = pytest.mark.skip(reason="a rehearsal: needs --rehearsals or --long")
        for item in items:
            if item.get_closest_marker("rehearsal"):
                item.add_marker(skipped)
    if seed := config.getoption("--shuffle"):
        random.Random(seed).shuffle(items)
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples before the tests, which keep it, are imported."""
    if config.getoption("--long"):
        settings.load_profile("long")


TOGETHER = {
    "searches": "errata_osf figures_osf gate planners_osf verdicts",
    "clusters": "clusters fit",
}
"""Files that need the same searches, verdicts or predictions: what a process does once for all of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file to one worker, those TOGETHER to one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    groups = {
        name: group for group, names in TOGETHER.items() for name in names.split()
    }

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return groups.get(Path(file).stem.removeprefix("test_"), file)

    return Together(config, log)


@pytest.fixture(autouse=True, scope="session")
def measurements_do_not_wait_until_others_are_quiet() -> None:
    """Neither in this process nor in the ranks of its jobs."""
    importlib.import_module("impatient")


@pytest.fixture(autouse=True, scope="session")
def ranks_start_with_what_an_optimizer_imports() -> None:
    """What forks the ranks of a test imports it once: it takes more than a second of each that trains.

    Where there is a GPU they import it themselves: nothing may look at a GPU before ranks are forked.
    """
    if shutil.which("nvidia-smi") is None:
        from ddlkit.jobs import launch

        launch.PRELOADED.append("torch._dynamo")


@pytest.fixture(autouse=True)
def signals_are_as_before() -> Iterator[None]:
    """A command that a test calls in this process leaves its handlers to no other test."""
    before = {
        n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of a fault leaves nothing behind, and so do its own fixtures, which end before this one."""
    if request.node.get_closest_marker("fault") is None:
        yield
        return
    from leftovers import none_left

    with none_left(request.getfixturevalue("tmp_path")):
        yield


@pytest.fixture(scope="session")
def require_lab() -> None:
    """The shaped-network lab must be possible here (root, iproute2, tbf)."""
    from ddlkit.lab import network

    reason = network.why_unavailable()
    if reason:
        _missing(reason)


@pytest.fixture(scope="session")
def require_emulated(require_lab: None) -> None:
    """And TUN, for the emulated link."""
    from ddlkit.lab import network, tunnel

    if not Path(tunnel.DEVICE).exists():
        _missing(network.NEEDS_TUN)


@pytest.fixture(scope="session")
def require_compiler() -> None:
    """A C++ compiler must be there: torch's inductor compiles with it."""
    if shutil.which("g++") is None:
        _missing("no g++ on the PATH")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium that talks to nobody, for all tests of a file: to start it takes a second."""
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    browser, driver_path = (
        next(filter(None, browsers), ""),
        shutil.which("chromedriver") or "",
    )
    if (
        not browser or not driver_path
    ):  # without its driver, selenium would download one
        _missing("no chromium, or no chromedriver, on the PATH")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    plain = (
        "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-sync "
    )
    plain += (
        "disable-dev-shm-usage disable-background-networking disable-component-update"
    )
    for name in (
        *plain.split(),
        "window-size=1200,1100",
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(f"--{name}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(driver_path)
    )
    yield driver
    driver.quit()


@pytest.fixture
def fresh_browser(chromium: Any) -> Iterator[Any]:
    """The Chromium as it was started: without a page, a size that was set, or what a page has stored."""
    yield chromium
    chromium.switch_to.default_content()
    chromium.get("about:blank")
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    stored = {"origin": "file://", "storageTypes": "all"}
    chromium.execute_cdp_cmd("Storage.clearDataForOrigin", stored)
    chromium.get_log("browser")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A layer profile of five tensors, of nobody's network."""
    import pandas as pd

    parameters = [250_000 * (i + 1) for i in range(5)]
    columns: dict[str, Any] = {
        **{"network": "mine", "device": "cpu", "batch": 8, "parameters": parameters},
        **{"tensor": [f"t{i}" for i in range(5)], "layer": [f"l{i}" for i in range(5)]},
        **{"gradient_bytes": [4 * n for n in parameters], "forward_s": 0.01},
        **{"backward_s": 0.02, "flops": 1e9},
    }
    path = tmp_path / "profile.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    return path
