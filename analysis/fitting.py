"""Constants of the time model: their priors, and the robust fit that moves them.

Every constant is positive and fitted as a logarithm. A prior is a centre and a width in log: what
is known before any run of the cluster was seen. The fit minimises the soft-l1 loss of log(predicted
/ measured) over the calibration rows plus the squared distance from the priors in widths.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis import timemodel
from analysis.collectives import AllReduces
from analysis.timemodel import Machine
from parallel.columns import Array, Columns

MAX_ROWS = 20
NOISE = 0.04  # of one run's log time, before any was seen
TABLE_NOISE, TABLE_RUNS = 0.15, 3  # of an all-reduce in a step beside one alone; a table's weight
UNMODELLED = 0.1  # spread of log time that no constant explains
UNSEEN = 0.07  # spread expected of rows that were not fitted

# name: (centre, width in log). Centres are per unit of the data sheet's rate, or seconds.
PRIORS: dict[str, tuple[float, float]] = {
    "gemm": (0.82, 0.15),
    "sat": (120.0, 0.7),
    "align": (0.3, 0.7),
    "attn": (0.42, 0.5),
    "mem": (0.95, 0.2),
    "launch": (0.6e-3, 0.7),
    "link": (0.8, 0.4),
    "gap": (0.3e-3, 1.0),
    "latency": (3e-5, 1.5),
    "network": (0.8, 0.5),
    "head": (1.0, 0.4),
    "exposed": (1.2, 0.7),
    "step": (0.01, 1.5),
    "micro": (2e-3, 0.8),
    "engine": (1.05, 0.07),
}
NAMES = tuple(PRIORS)

# What is known of one card beyond that: of an 8-GPU H100 node, that the switch adds, so that an
# all-reduce exceeds one direction's link (479 GB/s of 450), 2.9 of 3.35 TB/s in STREAM, 328 of 989
# TFLOP/s in FlashAttention 2 forward (backward is slower), GEMMs at 0.70 of the FP8 peak, where the
# power limit rules (Azure ND H100 v5: samuel-bohman/AI-benchmarking-guide@26d18e9458). Engines of
# its generation overlap data-parallel traffic with backward (Megatron-LM's README says how).
_HOPPER = {
    "gemm": (0.76, 0.1),
    "attn": (0.27, 0.6),
    "mem": (0.87, 0.15),
    "link": (1.05, 0.4),
    "network": (1.0, 0.5),
    "exposed": (0.4, 0.9),
}
CARDS: dict[str, dict[str, tuple[float, float]]] = {"H100 SXM": _HOPPER, "H200": _HOPPER}


INTERVAL = 1.2816  # standard deviations that hold the middle 80 % of a normal distribution


def priors_of(card: str) -> dict[str, tuple[float, float]]:
    """The priors of a card by its name in models.hardware: everybody's, where nothing is known."""
    return PRIORS | CARDS.get(card, {})


@dataclass(frozen=True)
class Fit:
    """Fitted constants. covariance: of their logs; sigma: robust scale of the log residuals."""

    constants: dict[str, float]
    covariance: np.ndarray
    sigma: float
    n: int

    def seconds(self, x: Columns, machine: Machine) -> Array:
        return timemodel.seconds(x, machine, self.constants)

    def spread(self, x: Columns, machine: Machine) -> Array:
        """Standard deviation of log seconds: the residuals' and the constants' together."""
        _, grad = _with_slopes(x, machine, np.log([self.constants[n] for n in NAMES]))
        return np.sqrt(self.sigma**2 + np.einsum("ij,jk,ik->i", grad, self.covariance, grad))


def _slopes(
    seconds: Callable[[dict], Array], theta: np.ndarray, step: float = 1e-4
) -> tuple[Array, np.ndarray]:
    """Log seconds (n,) and their slopes (n, constants); all constants moved in one evaluation."""
    moved = theta + step * np.vstack([np.zeros(len(theta)), np.eye(len(theta))])
    constants = {name: np.exp(moved[:, i])[:, None] for i, name in enumerate(NAMES)}
    logs = np.log(seconds(constants))
    return logs[0], ((logs[1:] - logs[0]) / step).T


def _with_slopes(x: Columns, machine: Machine, theta: np.ndarray) -> tuple[Array, np.ndarray]:
    return _slopes(lambda c: timemodel.seconds(x, machine, c), theta)


def prior_fit(priors: dict[str, tuple[float, float]] = PRIORS) -> Fit:
    """What is believed before any run was seen."""
    widths = np.array([priors[n][1] for n in NAMES])
    return Fit({n: priors[n][0] for n in NAMES}, np.diag(widths**2), 0.08, 0)


def fit(
    x: Columns,
    machine: Machine,
    measured: Array,
    priors: dict[str, tuple[float, float]] = PRIORS,
    table: AllReduces | None = None,
) -> Fit:
    """Constants from the measured seconds of a few runs and of the cluster's all-reduces, if any.

    The points of a table err together (it was taken on idle links): they weigh as `TABLE_RUNS`.
    """
    from scipy.optimize import least_squares  # 0.2 s to load: only where something is fitted

    if not len(measured) and table is None:
        return prior_fit(priors)
    centre = np.log([priors[n][0] for n in NAMES])
    width = np.array([priors[n][1] for n in NAMES])
    wanted = np.log(measured)
    n = len(measured)
    alone = machine.take(np.zeros(1, int))  # the cluster's machine; a table has one

    seen: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}

    def evaluate(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """soft_l1 on the data rows only, as a square root so that least_squares may square it."""
        key = z.tobytes()
        if key not in seen:
            seen.clear()
            theta = centre + z * width
            logs, grad = _with_slopes(x, machine, theta)
            r, drdz = (logs - wanted) / NOISE, grad * width / NOISE
            if table is not None:
                logs, grad = _slopes(lambda c: table.seconds(alone, c), theta)
                noise = TABLE_NOISE * np.sqrt(max(1.0, len(logs) / TABLE_RUNS))
                r = np.concatenate([r, (logs - np.log(table.measured)) / noise])
                drdz = np.concatenate([drdz, grad * width / noise])
            robust = np.sqrt(2 * (np.sqrt(1 + r * r) - 1) + 1e-12)
            slope = np.abs(r) / (np.sqrt(1 + r * r) * robust)
            rows = np.concatenate([np.sign(r) * robust, z])
            seen[key] = rows, np.concatenate([drdz * slope[:, None], np.eye(len(z))])
        return seen[key]

    # A host that launches too slowly to matter gives no slope to follow: start from both sides.
    starts = [np.zeros(len(centre)), np.where(np.array(NAMES) == "launch", 1.5, 0.0)]
    found = min(
        (
            least_squares(
                lambda z: evaluate(z)[0],
                start,
                jac=lambda z: evaluate(z)[1],
                bounds=(-4, 4),
                max_nfev=40,
                ftol=1e-4,
                xtol=1e-4,
            )
            for start in starts
        ),
        key=lambda solution: solution.cost,
    )
    theta = centre + found.x * width
    logs, grad = _with_slopes(x, machine, theta)
    residuals = logs - wanted
    weight = 1 / NOISE**2
    known = np.diag(1 / width**2)
    if table is not None:
        _, of_table = _slopes(lambda c: table.seconds(alone, c), theta)
        noise = TABLE_NOISE * np.sqrt(max(1.0, len(of_table) / TABLE_RUNS))
        known = known + of_table.T @ of_table / noise**2
    information = weight * grad.T @ grad + known
    covariance = np.linalg.inv(information)
    # What each row's error would be, had it been left out (its leverage taken out): their middle
    # 80 % says how wide the interval is, with a few rows' worth of what is usual.
    leverage = weight * np.einsum("ij,jk,ik->i", grad, covariance, grad)
    unseen = np.abs(residuals) / (1.0 - np.minimum(leverage, 0.9))
    scale = np.quantile(unseen, 0.8) / INTERVAL if n else 0.0
    sigma = np.sqrt((n * scale**2 + 3 * UNSEEN**2) / (n + 3))
    covariance = np.linalg.inv(grad.T @ grad / sigma**2 + known)
    return Fit(dict(zip(NAMES, np.exp(theta), strict=True)), covariance, float(sigma), n)


def features(x: Columns) -> np.ndarray:
    """What tells runs apart before they ran, (n, k), each column of unit spread."""
    raw = [
        np.log2(v)
        for v in (x.hidden, x.layers, x.tp, x.pp, x.dp, x.micro_batch, x.n_micro, x.gpus, x.vpp)
    ]
    raw += [x.hidden / x.tp % 64 != 0, x.hidden / x.heads % 64 != 0, x.heads / x.tp]
    raw += [3.0 * (x.zero_stage == 3), x.recompute, x.sequence_parallel, x.offload]
    table = np.stack([np.asarray(v, float) for v in raw], axis=1)
    spread = table.std(axis=0)
    return table[:, spread > 0] / spread[spread > 0] if (spread > 0).any() else table[:, :1]


def slopes(
    x: Columns, machine: Machine, priors: dict[str, tuple[float, float]] = PRIORS
) -> np.ndarray:
    """How far each prior's width moves each row's log time, (n, constants)."""
    theta = np.log([priors[name][0] for name in NAMES])
    return _with_slopes(x, machine, theta)[1] * np.array([priors[name][1] for name in NAMES])


def choose(x: Columns, count: int, known_of: np.ndarray | None = None) -> np.ndarray:
    """Indices of `count` rows to calibrate with: those that leave least unknown of all rows.

    Before any run, log times of rows i and j covary by the priors (known_of: `slopes`) and by what
    no constant explains, alike for alike layouts. The rows are taken one by one, each the one whose
    measurement shrinks the variance of all the most. Their times are never looked at: these are
    the runs one would queue.
    """
    n = len(x)
    if n <= count:
        return np.arange(n)
    table = features(x)
    apart = ((table[:, None, :] - table[None, :, :]) ** 2).mean(axis=2)
    covariance = UNMODELLED**2 * np.exp(-2.0 * apart)
    if known_of is not None:
        covariance = covariance + known_of @ known_of.T
    chosen: list[int] = []
    for _ in range(count):
        gain = (covariance**2).sum(axis=0) / (np.diag(covariance) + NOISE**2)
        gain[chosen] = -1.0
        # Repeats of one layout gain the same. Rounding, which differs between machines, must not
        # choose between them: the first is taken.
        best = int(np.flatnonzero(gain >= gain.max() * (1 - 1e-9))[0])
        chosen.append(best)
        known = covariance[:, best]
        covariance = covariance - np.outer(known, known) / (known[best] + NOISE**2)
    return np.sort(chosen)
