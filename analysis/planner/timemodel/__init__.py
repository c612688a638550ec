"""Seconds of one training step from first principles: one function per term, each on columns.

Read `machine` (rates of a GPU and its links), `compute` (products, attention, what moves through
memory), `links` (messages inside a layer), `layer` (both, and the host that launches them),
`stages` (a pipeline), `replicas` (gradients, optimizer), and `step`, which has the bubble and adds
all terms up.

Everywhere steps is a `Columns`, machine a `Machine`, constants a dict of at most 15 (`NAMES` in
fitting.py). Letters: b sequences of a micro-batch, s sequence length, h hidden, f feed-forward, a
heads of size d, V vocabulary, L layers. Times are seconds, sizes bytes, rates bytes/s and FLOP/s.

Sources: [N] Narayanan et al. SC'21, arXiv 2104.04473. [K] Korthikanti et al. 2022, arXiv
2205.05198. [R] Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054. [L] Liu et al. 2023 (Ring
Attention), arXiv 2310.01889.
"""
