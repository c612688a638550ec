"""The charts of a page as files for papers and slides, drawn without a browser."""

import re
import struct
import textwrap
import zlib
from pathlib import Path

from analysis.pages.page_html import library
from analysis.pages.section import Page
from base.storage import output

MARK = "GPT scaling study"  # in the pictures
WIDTH, LINE = 700, 110  # pixels of a chart, characters of a line above it
_HEADER = 33  # bytes of a PNG before its first chunk that may be left out


def save(page: Page, folder: Path, force: bool = False) -> list[Path]:
    """Write each chart, named after its view and numbered there, as SVG and PNG, which say in
    themselves who drew them; the same data give the same bytes.

    Raises:
        UsageError: as `storage.output`; vl-convert-python is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in page.sections:
        for number, chart in enumerate(section.charts, start=1):
            words = {"text": textwrap.wrap(chart.caption, LINE), "fontWeight": "normal"}
            spec = chart.spec | {"width": WIDTH, "background": "white", "title": words}
            svg = library().vegalite_to_svg(spec)
            kinds = {"svg": f"<!-- {MARK} -->\n{svg}".encode(), "png": _png(svg)}
            name = "-".join([*re.findall(r"\w+", section.title.lower()), str(number)])
            for kind, content in kinds.items():
                written.append(folder / f"{name}.{kind}")
                with output(written[-1], MARK, force) as file:
                    file.write_bytes(content)
    return written


def _png(svg: str) -> bytes:
    """The picture, with MARK as its software."""
    png, text = library().svg_to_png(svg, scale=2), b"tEXtSoftware\0" + MARK.encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return png[:_HEADER] + chunk + png[_HEADER:]
