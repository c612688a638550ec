"""Which network a plan needs: the fastest layout at each rate, beside a network that takes no time.

Memory does not depend on the network, so that the layouts that fit are the same at every rate.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from analysis.common.table import Column, Table
from analysis.planner import ranking
from analysis.planner.ranking import Question, Ranking
from analysis.planner.space import engine_of
from analysis.planner.timemodel.step import terms as step_terms
from base.errors import UsageError

GBITS = (1, 10, 25, 50, 100, 200, 400, 800, 1600, 3200)  # of a node, in each direction
NEAR = 10.0  # percent over a free network
_FREE = 1e12  # Gb/s: no message between nodes takes time to speak of


def table(ask: Question, percent: float) -> Table:
    """Returns the fastest layout at each rate of GBITS, and in the notes the slowest network at
    which a step takes at most `percent` longer than with a network that takes no time."""
    if ask.gpus <= ask.cluster.joined or ask.cluster.is_host:
        raise UsageError(f"--networks: {ask.gpus} GPUs are one node, and nothing leaves it")
    ranked = ask.ranked()
    if not len(ranked.order):
        raise UsageError(ranking.nothing_fits(ranked, ask.config, ask.gpus))
    free = _at(ranked, _FREE).seconds.min()
    rows: list[dict[str, Any]] = []
    for gbits in GBITS:
        at_rate = _at(ranked, gbits)
        fastest = np.array([np.argmin(at_rate.seconds)])
        [row] = ranking.rows_of(at_rate, fastest, ask.config, ask.gemms)
        rows.append(row | {"gbits": gbits, "over": row["predicted_s"] / free - 1})
    steps = ranked.steps.take(ranked.order)
    engines = np.array([*map(engine_of, steps.zero_stage, steps.fsdp2)])
    needs = [_need(ranked, engines == engine, engine, percent) for engine in np.unique(engines)]
    notes = [
        f"predicted, not measured, for {ask.cluster.name} ({ask.cluster.source})",
        *needs,
        "all rates are those of a node in each direction, as sold; messages reach the share of them"
        " that the fit or the priors say",
        *ranking.width_note(rows, ask.cluster),
        *ask.cluster.links_note(),
    ]
    layouts = ranking.table(rows, notes, "")
    last = Column("over", "longer than with a free network", ".1%")
    return replace(layouts, columns=[Column("gbits", "Gb/s", "d"), *layouts.columns[1:], last])


def _at(ranked: Ranking, gbits: float) -> Ranking:
    """Returns the layouts that fit, in order of their rows, predicted on another network."""
    cluster = replace(ranked.cluster, network=f"{gbits:f} Gb/s")
    steps = ranked.steps.take(ranked.order)
    terms = step_terms(steps, cluster.machine_for(steps), cluster.fit.constants)
    terms = {name: np.broadcast_to(seconds, (len(steps),)) for name, seconds in terms.items()}
    return ranked._replace(
        steps=steps,
        cluster=cluster,
        crowd=ranked.crowd[ranked.order],
        terms=terms,
        seconds=sum(terms.values()),
        used=ranked.used[ranked.order],
    )


def _need(ranked: Ranking, chosen: np.ndarray, engine: str, percent: float) -> str:
    """Returns a line: the slowest network at which the fastest of the chosen layouts that fit is
    near what it would be with a free one."""

    def fastest(gbits: float) -> float:
        return float(_at(ranked, gbits).seconds[chosen].min())

    most = fastest(_FREE) * (1 + percent / 100)
    low, high = 0.01, 1e5
    words = (
        f"{engine}: within {percent:g} % of its step with a free network ({fastest(_FREE):.4g} s)"
    )
    if fastest(low) <= most:
        return f"{words} on any network: no message to speak of leaves a node"
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fastest(middle) <= most else (middle, high)
    return f"{words} from {float(f'{high:.2g}'):,g} Gb/s a node on"
