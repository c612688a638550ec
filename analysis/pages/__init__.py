"""The offline page. Read in this order: section.py (what a page is made of), first_screen.py (its
words), run_views.py, step_views.py and cost_views.py (a study in, sections out), charts.py (what is
drawn, there and by analysis.plots), page_html.py with page.html, page.css and page.js (how it
looks). The page is made of SECTIONS in their order.
"""

from collections.abc import Callable

from analysis.pages import cost_views, run_views, step_views
from analysis.pages.section import Section, Study

SECTIONS: tuple[Callable[[Study], list[Section]], ...] = (
    run_views.scaling,
    run_views.runs,
    step_views.every_step,
    cost_views.breakdown,
    cost_views.memory_view,
    cost_views.clock,
    run_views.about,
    run_views.provenance,
)
