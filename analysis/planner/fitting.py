"""Constants of the time and memory models: their priors, and the robust fits that move them.

Every constant is positive and fitted as a logarithm. A prior is a centre and a width in log: what
is known before any run of the cluster is seen. The fit minimises the soft-l1 loss of log(predicted
/ measured) over the calibration rows plus the squared distance from the priors in widths.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from analysis.planner.certainty import models_of, unknown, widened, widths
from analysis.planner.columns import Array, Columns
from analysis.planner.timemodel.machine import Machine
from analysis.planner.timemodel.step import luck, seconds
from base.intervals import Interval

MAX_ROWS = 20
NOISE = 0.04  # of one run's log time, before any run is seen
UNMODELLED = 0.1  # spread of log time that no constant explains
UNSEEN = 0.07  # spread expected of rows that were not fitted
# Constants stay at their priors if the rows are e^6 times as likely so. Chosen by eye: of 110 fits
# to 10 or 20 published rows drawn at random, those with less were all of the Ultra-Scale sweep, and
# each of them raised the error of the rows that were not drawn.
STRONG = 6.0
USUAL_ROWS = 3  # as many rows of that spread are added to a fit's own residuals

MOST_GPUS = 10_752  # of a row that the priors were chosen on (MLPerf v4.1)
# Spread of log seconds for each doubling beyond: 1.48 medians of how much 52 series of published
# rows of one layout grew beside what was predicted (benchmarks/planner/growth.py at f3d0a3bd).
GROWTH = 1.48 * 0.0096

# name: (centre, width in log). A share is of the data sheet's rate; seconds are of one layer, step
# or micro-batch, as said.
PRIORS: dict[str, tuple[float, float]] = {
    "gemm": (0.82, 0.15),  # share of the peak that a large GEMM reaches
    "sat": (120.0, 0.7),  # size of a GEMM's shortest side, at which its time doubles
    "align": (0.3, 0.7),  # added share of a GEMM's time, where a side is no multiple of 64
    "attn": (0.42, 0.5),  # share of the peak that attention's two products reach
    "mem": (0.95, 0.2),  # share of the memory's rate that element-wise kernels reach
    "launch": (0.6e-3, 0.7),  # seconds in which the host launches the forward of a layer
    "link": (0.8, 0.4),  # share of the links' rate inside a node that an all-reduce reaches
    "gap": (0.3e-3, 1.0),  # seconds in which the kernels of a layer's forward start and drain
    "latency": (3e-5, 1.5),  # seconds of a collective of two ranks before its bytes count
    "network": (0.8, 0.5),  # share of a node's network that an all-reduce of two nodes reaches
    "head": (1.0, 0.4),  # factor on the time of the output layer and the loss
    "exposed": (1.2, 0.7),  # factor on data-parallel traffic: what no computation hides
    "step": (0.01, 1.5),  # seconds a step: gradient norm, scaler, logging
    "micro": (2e-3, 0.8),  # seconds a micro-batch, beside its layers
    "engine": (1.05, 0.07),  # factor on the micro-batches of rows marked `slower`
}
NAMES = tuple(PRIORS)
HIDDEN = ("launch", "latency")  # that may be so short that no run shows them

# Share of the peak of half precision that the fastest of many GEMMs reaches on a card (stas00/
# ml-engineering, compute/accelerator/README.md, "Maximum Achievable Matmul FLOPS", BF16). The GEMMs
# of a step reach less: of H100's 0.803 they reach 0.76, and on the cards that nobody has seen as
# much less.
BEST_GEMM = {
    "H100 SXM": 0.803,
    "H200": 0.803,
    "GB200": 0.729,
    "GB300": 0.729,  # of GB200; its own is not published
    "B200": 0.776,
    "B300": 0.786,
    "MI300X": 0.514,
    "MI325X": 0.604,
    "MI355X": 0.680,
    "Gaudi 2": 0.969,
    "Gaudi 3": 0.741,
    # 24 of 65 TFLOP/s at 4096 x 4096 x 4096: 70 W hold the clock down (forums.developer.nvidia.com,
    # topic 264462, 2023).
    "T4": 0.37,
}
OF_BEST = 0.76 / 0.803
# Power holds the clock of products down: GB300 and B300 may draw 1,400 and 1,100 W where GB200 and
# B200 draw 1,200 and 1,000.
MORE_POWER = 1.12
# Shares of the best in seen steps: dense ones and Llama 4 on GB200; Llama 3 and DeepSeek-V2 on
# B200, which may draw less power; Llama and DeepSeek-V2 on MI300X and MI355X.
SEEN_OF_BEST = {"GB200": 0.84, "GB300": 0.84 * MORE_POWER, "B300": 0.7 * MORE_POWER}
SEEN_OF_BEST |= dict.fromkeys(("B200", "MI300X", "MI325X", "MI355X"), 0.7)
# Priors of one card where more is known. Of an 8-GPU H100 node (Azure ND H100 v5:
# samuel-bohman/AI-benchmarking-guide@26d18e9458): its switch adds, so an all-reduce exceeds the
# link's rate in one direction (479 GB/s of 450); STREAM reaches 2.9 of 3.35 TB/s; FlashAttention 2
# forward reaches 328 of 989 TFLOP/s, backward less.
_HOPPER = {"attn": (0.17, 0.5), "mem": (0.87, 0.15), "link": (1.05, 0.4), "network": (1.0, 0.5)}
# A Blackwell node has the same kind of switch and of tensor cores.
CARDS: dict[str, dict[str, tuple[float, float]]] = dict.fromkeys(
    ("H100 SXM", "H200", "B200", "B300", "GB200", "GB300"), _HOPPER
)
CARDS["T4"] = {"attn": (0.42 * 0.37 / 0.87, 0.5)}  # its clock is as low in attention's products
INTERVAL = 1.2816  # standard deviations that hold the middle 80 % of a normal distribution


def priors_of(card: str) -> dict[str, tuple[float, float]]:
    """Returns the priors of a card by its name in models/gpus.toml; PRIORS where nothing else is
    known."""
    priors = CARDS.get(card, {})
    if best := BEST_GEMM.get(card):
        priors = priors | {"gemm": (SEEN_OF_BEST.get(card, OF_BEST) * best, 0.1)}
    return PRIORS | priors


@dataclass(frozen=True)
class Fit:
    """Fitted constants. covariance: of their logs; sigma: robust scale of the log residuals.
    at_priors: the runs gave no reason to move the constants. gpus: the most of a run behind it.
    models: of the fitted runs, by `models_of`. card: whose priors these are; "" with runs."""

    constants: dict[str, float]
    covariance: np.ndarray
    sigma: float
    n: int
    at_priors: bool = False
    gpus: int = MOST_GPUS
    models: frozenset[str] = frozenset()
    card: str = ""

    def seconds(self, steps: Columns, machine: Machine) -> Array:
        return seconds(steps, machine, self.constants)

    def _own(self, steps: Columns, machine: Machine) -> Array:
        """Returns the standard deviation, (n,), of each row's own log seconds: residuals, luck."""
        return np.hypot(self.sigma, luck(steps, machine, self.constants))

    def _shared(self, steps: Columns, machine: Machine) -> np.ndarray:
        """Returns the log seconds, (n, k), by one deviation of what rows share: constants, GPUs
        beyond runs."""
        theta = np.log([self.constants[name] for name in NAMES])
        root = np.linalg.cholesky(self.covariance)
        beyond = GROWTH * np.log2(np.maximum(steps.gpus / self.gpus, 1.0))
        return np.column_stack([_with_slopes(steps, machine, theta).slopes @ root, beyond])

    def stated_variance(self, steps: Columns, machine: Machine) -> Array:
        """Returns the variance, (n,), of log seconds that the fit itself states."""
        return self._own(steps, machine) ** 2 + (self._shared(steps, machine) ** 2).sum(axis=1)

    def unknown(self, steps: Columns, machine: Machine) -> dict[str, Array]:
        """Returns what is not known of each row, {name: bool (n,)}."""
        measured = widths()
        return unknown(steps, machine, self, measured.cards, measured.engines)

    def _widened(self, variance: Array, steps: Columns, machine: Machine) -> Array:
        """Returns a variance or covariance of log seconds whose INTERVAL deviations held 80 %."""
        scale = widths().with_runs if self.n else widths().without_runs
        unknown_sizes = widths().unknown
        return scale.factor**2 * widened(variance, self.unknown(steps, machine), unknown_sizes)

    def covariances(self, steps: Columns, machine: Machine) -> np.ndarray:
        """Returns the covariance, (n, n), of the rows' log seconds: alike rows err together."""
        own, shared = self._own(steps, machine), self._shared(steps, machine)
        stated = np.outer(own, own) * likeness(steps) + shared @ shared.T
        return self._widened(stated, steps, machine)

    def spread(self, steps: Columns, machine: Machine) -> Array:
        """Returns the standard deviation of log seconds, of which INTERVAL hold 80 %."""
        return np.sqrt(self._widened(self.stated_variance(steps, machine), steps, machine))

    def interval(self, seconds: Array, steps: Columns, machine: Machine) -> Interval:
        """Returns the middle 80 % around predicted seconds."""
        half = INTERVAL * self.spread(steps, machine)
        return Interval(seconds * np.exp(-half), seconds * np.exp(half))


class Sloped(NamedTuple):
    """Values (n,) and their slopes (n, constants)."""

    values: Array
    slopes: np.ndarray


def _with_slopes(steps: Columns, machine: Machine, theta: np.ndarray, step: float = 1e-4) -> Sloped:
    """Returns the log seconds of rows; all constants moved in one evaluation."""
    moved = theta + step * np.vstack([np.zeros(len(theta)), np.eye(len(theta))])
    constants = {name: np.exp(moved[:, i])[:, None] for i, name in enumerate(NAMES)}
    log_seconds = np.log(seconds(steps, machine, constants))
    return Sloped(log_seconds[0], ((log_seconds[1:] - log_seconds[0]) / step).T)


def prior_fit(priors: dict[str, tuple[float, float]] = PRIORS, card: str = "") -> Fit:
    """Returns the priors, of a card, as a fit: what a prediction uses before any run is seen."""
    variances = [priors[n][1] ** 2 for n in NAMES]
    return Fit({n: priors[n][0] for n in NAMES}, np.diag(variances), UNSEEN, 0, card=card)


def card_fit(card: str) -> Fit:
    """Returns the priors of a card, by its name in models/gpus.toml, as a fit."""
    return prior_fit(priors_of(card), card)


def soft_l1(misses: np.ndarray) -> np.ndarray:
    """Returns the square roots of the soft-l1 losses of misses: who minimises squares them."""
    return np.sqrt(2 * (np.sqrt(1 + misses * misses) - 1) + 1e-12)


@dataclass(frozen=True)
class _Problem:
    """What a fit minimises, as a function of z: how many prior widths each constant has moved."""

    steps: Columns
    machine: Machine
    wanted: np.ndarray  # log of the measured seconds
    noise: np.ndarray  # of each: NOISE and, where runs stall or do not, that luck
    centre: np.ndarray
    width: np.ndarray

    def theta(self, z: np.ndarray) -> np.ndarray:
        """Returns the logs of the constants."""
        return self.centre + z * self.width

    def residuals(self, z: np.ndarray) -> Sloped:
        """Returns the residuals whose squares are summed: soft-l1 of the measurements, and z, the
        distance from the priors."""
        theta = self.theta(z)
        log_seconds, slopes = _with_slopes(self.steps, self.machine, theta)
        misses = (log_seconds - self.wanted) / self.noise
        slopes = slopes * self.width / self.noise[:, None]
        robust = soft_l1(misses)
        flatter = np.abs(misses) / (np.sqrt(1 + misses * misses) * robust)  # slope of `soft_l1`
        residuals = np.concatenate([np.sign(misses) * robust, z])
        return Sloped(residuals, np.concatenate([slopes * flatter[:, None], np.eye(len(z))]))

    def solve(self) -> np.ndarray:
        """Returns the logs of the constants at the least of three minima.

        A host that launches fast enough to be hidden gives `launch` no slope, and messages that
        begin at once give `latency` none, so the search starts from both sides of each.
        """
        from scipy.optimize import least_squares  # 0.2 s to load: only where something is fitted

        evaluated = lru_cache(1)(lambda z: self.residuals(np.frombuffer(z)))  # asked for twice
        settings = {"bounds": (-4, 4), "max_nfev": 40, "ftol": 1e-4, "xtol": 1e-4}
        starts = [np.zeros(len(NAMES)), *(1.5 * (np.array(NAMES) == n) for n in HIDDEN)]
        solutions = [
            least_squares(
                lambda z: evaluated(z.tobytes()).values,
                start,
                jac=lambda z: evaluated(z.tobytes()).slopes,
                **settings,
            )
            for start in starts
        ]
        return self.theta(min(solutions, key=lambda solution: solution.cost).x)

    def log_odds(self, theta: np.ndarray) -> float:
        """Returns the log of how many times as likely the rows are with a fit as with the priors'
        centres.

        With a fit: over all constants that the priors allow, by Laplace's approximation at the best
        ones, runs off by `NOISE`; constants that are free to fit anything count against it. With
        the centres: runs off by `UNMODELLED`. Runs that went wrong for reasons that no constant has
        (a stall, a slow link) would move constants that were right.
        """
        rows, slopes = self.residuals((theta - self.centre) / self.width)
        fitted = -0.5 * rows @ rows - np.linalg.slogdet(slopes.T @ slopes)[1] / 2
        wider = replace(self, noise=np.sqrt(self.noise**2 - NOISE**2 + UNMODELLED**2))
        rows = wider.residuals(np.zeros(len(self.width))).values
        centres = -0.5 * rows @ rows
        return float(fitted - centres + np.log(wider.noise / self.noise).sum())

    def fit_at(self, theta: np.ndarray, at_priors: bool) -> Fit:
        """Returns the fit at the constants exp(theta): with their covariance and `sigma`.

        sigma: what each row's error would be, had the row been left out (its leverage taken
        out). Their middle 80 % give the width, together with `USUAL_ROWS` rows of the usual error.
        """
        n = len(self.wanted)
        log_seconds, slopes = _with_slopes(self.steps, self.machine, theta)
        prior = np.diag(1 / self.width**2)
        weighted = slopes / self.noise[:, None]
        covariance = np.linalg.inv(weighted.T @ weighted + prior)
        leverage = np.einsum("ij,jk,ik->i", weighted, covariance, weighted)
        unseen = np.abs(log_seconds - self.wanted) / (1.0 - np.minimum(leverage, 0.9))
        scale = np.quantile(unseen, 0.8) / INTERVAL
        sigma = np.sqrt((n * scale**2 + USUAL_ROWS * UNSEEN**2) / (n + USUAL_ROWS))
        # Rows that are off by `sigma`, and not by NOISE, leave the constants less sure.
        weighted = slopes / np.sqrt(self.noise**2 - NOISE**2 + sigma**2)[:, None]
        covariance = np.linalg.inv(weighted.T @ weighted + prior)
        constants = dict(zip(NAMES, np.exp(theta), strict=True))
        behind = {"gpus": int(self.steps.gpus.max()), "models": frozenset(models_of(self.steps))}
        return Fit(constants, covariance, float(sigma), n, at_priors=at_priors, **behind)


def fit(
    steps: Columns,
    machine: Machine,
    measured: Array,
    priors: dict[str, tuple[float, float]] = PRIORS,
) -> Fit:
    """Returns constants from the measured seconds of a few runs."""
    if not len(measured):
        return prior_fit(priors)
    centre, width = np.array([priors[name] for name in NAMES]).T
    noise = np.hypot(NOISE, luck(steps, machine, dict(zip(NAMES, centre, strict=True))))
    problem = _Problem(steps, machine, np.log(measured), noise, np.log(centre), width)
    theta = problem.solve()
    at_priors = problem.log_odds(theta) < -STRONG
    return problem.fit_at(problem.centre if at_priors else theta, at_priors)


def features(steps: Columns) -> np.ndarray:
    """Returns numbers that describe runs before they ran, (n, k); each column has unit spread."""
    sizes = "hidden layers tp pp dp micro_batch n_micro gpus vpp cp".split()
    raw = [np.log2(getattr(steps, name)) for name in sizes]
    raw += [
        steps.hidden / steps.tp % 64 != 0,
        steps.hidden / steps.heads % 64 != 0,
        steps.heads / steps.tp,
    ]
    raw += [3.0 * (steps.zero_stage == 3), steps.recompute, steps.sequence_parallel, steps.offload]
    table = np.stack([np.asarray(v, float) for v in raw], axis=1)
    spread = table.std(axis=0)
    return table[:, spread > 0] / spread[spread > 0] if (spread > 0).any() else table[:, :1]


def slopes(
    steps: Columns, machine: Machine, priors: dict[str, tuple[float, float]] = PRIORS
) -> np.ndarray:
    """Returns by how much one width of each prior changes each row's log time, (n, constants)."""
    theta = np.log([priors[name][0] for name in NAMES])
    widths = np.array([priors[name][1] for name in NAMES])
    return _with_slopes(steps, machine, theta).slopes * widths


def likeness(steps: Columns) -> np.ndarray:
    """Returns the correlation, (n, n), of what no constant explains of rows: alike layouts err
    together."""
    table = features(steps)
    return np.exp(-2.0 * ((table[:, None, :] - table[None, :, :]) ** 2).mean(axis=2))


def choose(steps: Columns, count: int, prior_slopes: np.ndarray) -> np.ndarray:
    """Returns the indices of `count` rows to calibrate with: those that leave least unknown of all
    rows.

    Before any run, log times of two rows covary: by the priors (prior_slopes: `slopes`), and by
    their `likeness`. Measured times are not used, so these are the runs that one would submit.
    """
    if len(steps) <= count:
        return np.arange(len(steps))
    return telling(UNMODELLED**2 * likeness(steps) + prior_slopes @ prior_slopes.T, count)


def telling(covariance: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of `count` rows, each the row whose measurement reduces the variance of
    all the most; covariance: of their log times."""
    chosen: list[int] = []
    for _ in range(count):
        gain = (covariance**2).sum(axis=0) / (np.diag(covariance) + NOISE**2)
        gain[chosen] = -1.0
        # Repeats of one layout gain the same. Rounding, which differs between machines, must not
        # choose between them: the first is taken.
        best = int(np.flatnonzero(gain >= gain.max() * (1 - 1e-9))[0])
        chosen.append(best)
        column = covariance[:, best]
        covariance = covariance - np.outer(column, column) / (column[best] + NOISE**2)
    return np.sort(np.array(chosen, int))
