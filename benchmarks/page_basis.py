"""What a page costs by drawing library: bytes of its scripts put inline, and ms until it is open.

    pip install plotly bokeh vl-convert-python playwright
    python benchmarks/page_basis.py [--rounds 5]

Each page holds one library's scripts and nothing else; Chromium opens them in turns, without a
network. Prints bytes, the median of the rounds' load times, and its ratio to an empty page's.
"""

import statistics
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.errors import Parser, command_line  # noqa: E402


def scripts() -> dict[str, str]:
    """library -> its scripts as one text."""
    import bokeh
    import vl_convert
    from plotly.offline import get_plotlyjs

    folder = Path(bokeh.__file__).parent / "server/static/js"
    return {
        "empty": "",
        "vl-convert (vega-embed, Vega-Lite, Vega)": vl_convert.javascript_bundle(),
        "bokeh": (folder / "bokeh.min.js").read_text(),
        "plotly": get_plotlyjs(),
    }


@command_line("page_basis")
def main(argv: list[str] | None = None) -> int:
    """Print one line a library."""
    parser = Parser(prog="python benchmarks/page_basis.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each page is opened")
    rounds = parser.parse_args(argv).rounds
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        texts, found = scripts(), {}
        for i, text in enumerate(texts.values()):
            page = f"<!DOCTYPE html><meta charset=utf-8><script>{text}</script>"
            (Path(folder) / f"{i}.html").write_text(page)
        for _ in range(rounds):
            for i, name in enumerate(texts):
                tab = browser.new_context(offline=True).new_page()
                tab.goto(f"file://{folder}/{i}.html")
                took = "performance.timing.loadEventEnd - performance.timing.navigationStart"
                found.setdefault(name, []).append(tab.evaluate(took))
                tab.context.close()
        browser.close()
    base = statistics.median(found["empty"])
    for name, text in texts.items():
        middle = statistics.median(found[name])
        print(f"{name}: {len(text.encode()):,} bytes, {middle:.0f} ms, {middle / base:.1f} x empty")
    return 0


if __name__ == "__main__":
    sys.exit(main())
