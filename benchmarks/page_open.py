"""How large a page of 500 runs is, and how long Chromium takes to open it.

    pip install vl-convert-python playwright
    python benchmarks/page_open.py [FILE.html...] [--rounds 7]

Without a FILE, the page of 500 runs of 200 steps each (the parity study's, under other names).
Prints of each page its bytes and the medians of the rounds, in ms from the start of the navigation:
first paint, load (every script has run: the tables sort and filter), the first chart drawn in view,
and every chart drawn; and the CPU time of the page's thread until it was open, which other work on
the machine does not stretch as it does the others. Then the machine's load average. The files take
turns, in a new context each, without a network.
"""

import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np  # noqa: E402

from models.errors import Parser, command_line  # noqa: E402
from models.files import ROOT  # noqa: E402

PARITY = ROOT / "logs/2-core-cpu/parity"


def of_500_runs() -> str:
    """The page of 500 runs of 200 steps each: the parity study's, under other names."""
    from analysis.logs.load import load
    from analysis.pages import steps, study
    from analysis.pages.html import page

    read, _ = load([PARITY])
    many = []
    for i in range(500):
        one = read[i % len(read)]
        long = {name: np.tile(getattr(one, name), 10) for name in ("step_s", "loss", "grad_norm")}
        name, iteration = f"{one.run}-repeat-{i}", np.arange(1.0, 201)
        peak = 4_000_000_000 + i  # the parity study has none
        many.append(
            replace(
                one, run=name, shown=name, iteration=iteration, skipped=[], peak_bytes=peak, **long
            )
        )
    first, last = study.of_records(many, [], None, None, "strong", False, None)
    return page("500 runs", [*first, *steps.views(many, None), *last])


_TIMES = """async () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? NaN;
    const { loadEventEnd } = performance.getEntriesByType("navigation")[0];
    charts[0]?.at.scrollIntoView();
    await charts[0]?.draw();
    const first = performance.now();
    for (const chart of charts) await chart.draw();
    return [paint, loadEventEnd, first, performance.now()];
}"""
_NAMES = ("CPU until open", "first paint", "load", "first chart", "all charts")


def opened(browser: Any, path: Path) -> list[float]:
    """The times of _NAMES of one opening, ms."""
    tab = browser.new_context(offline=True).new_page()
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    tab.goto(f"file://{path.resolve()}")
    metrics = session.send("Performance.getMetrics")["metrics"]
    cpu_s = next(one["value"] for one in metrics if one["name"] == "TaskDuration")
    times = tab.evaluate(_TIMES)
    tab.context.close()
    return [1000 * cpu_s, *times]


@command_line("page_open")
def main(argv: list[str] | None = None) -> int:
    """Print one line a page."""
    parser = Parser(prog="python benchmarks/page_open.py", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="pages to open")
    parser.add_argument("--rounds", type=int, default=7, help="how often each page is opened")
    given = parser.parse_args(argv)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        if not given.files:
            given.files = [Path(folder) / "500-runs.html"]
            given.files[0].write_text(of_500_runs())
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        found: dict[Path, list[list[float]]] = {path: [] for path in given.files}
        for _ in range(given.rounds):
            for path in given.files:
                found[path].append(opened(browser, path))
        browser.close()
        for path, times in found.items():
            middle = [statistics.median(of) for of in zip(*times, strict=True)]
            said = ", ".join(f"{n} {ms:.0f} ms" for n, ms in zip(_NAMES, middle, strict=True))
            print(f"{path.name}: {path.stat().st_size:,} bytes; {said}")
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"load average {load} on {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
