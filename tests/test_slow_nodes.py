"""A preflight names the node that is slow, and knows the noise."""

import math
import re

import numpy as np
import pytest

from base.errors import UsageError
from parallel.bench import ROUNDS
from parallel.measure import node_rates
from parallel.measure.node_rates import COLUMNS, FILE, RankRates
from parallel.record.reader import read_rows
from parallel.record.writer import append_rows
from tests.conftest import run_module


def ranks_of(noise: float = 0.02, seed: int = 0, nodes: int = 4, **slow: float) -> list[RankRates]:
    """Two ranks on each node. All are slowed alike in some rounds; nodeN=0.8 alone."""
    draw = np.random.default_rng(seed)
    common = draw.uniform(0.5, 1, ROUNDS)
    ranks = []
    for n in range(2 * nodes):
        name = f"node{n // 2}"
        rates = 1e12 * slow.get(name, 1.0) * common * (1 + noise * draw.standard_normal(ROUNDS))
        measured = {"matmul": list(rates), "copy": [1e10] * ROUNDS}
        ranks.append(RankRates(n, name, f"{name} rank {n}", measured))
        if n % 2 == 0:
            ranks[n].rates["write"] = [1e8] * ROUNDS
    ranks[0].rates["all"] = [1e9] * ROUNDS
    return ranks


def slow_nodes(*arguments, **options) -> list[str]:
    rows, lines = node_rates.report(*arguments, "7", "ddp", **options)
    short = [row["node"] for row in rows if row["short"]]
    assert [line.split()[1] for line in lines if line.startswith("node ")] == short
    return short


def test_a_slow_node_is_named_and_noise_is_not():
    assert slow_nodes(ranks_of(node2=0.8), []) == ["node2"]
    assert slow_nodes(ranks_of(nodes=2, node1=0.8), []) == ["node1"]
    assert slow_nodes(ranks_of(0.0, nodes=2, node1=0.85)[::2], []) == ["node1"]
    assert slow_nodes(ranks_of(node1=0.7, node2=0.7), []) == ["node1", "node2"]
    assert slow_nodes(ranks_of(0.005, node2=0.93), []) == []  # less than a tenth
    assert slow_nodes(ranks_of(nodes=1, node0=0.5), []) == []  # nothing to compare with
    for seed in range(50):
        assert slow_nodes(ranks_of(0.1, seed, node2=0.95), []) == []
        assert slow_nodes(ranks_of(0.02, seed, node2=0.8), []) == ["node2"]


def test_the_line_says_the_rank_and_the_numbers():
    slow = ranks_of(0.0)
    slow[5].rates["matmul"][:] = [0.8 * rate for rate in slow[5].rates["matmul"]]
    _, (line,) = node_rates.report(slow, [], "7", "ddp")
    rate = r"node node2 is slow: matrix product: 0\.\d+ TFLOP/s on rank 5, 20% less than the others"
    assert re.fullmatch(rate, line)
    slow = ranks_of()
    slow[0].rates["write"][:] = [5e7] * ROUNDS
    _, (line,) = node_rates.report(slow, [], "7", "ddp")
    assert line.endswith("write to the run's folder: 0.05 GB/s on rank 0, 50% less than the others")


def test_a_node_whose_own_all_reduce_is_slow_is_named():
    ranks = ranks_of(0.0)
    for rank in ranks[::2]:
        rank.rates["in_node"] = [(3e8 if rank.node == "node2" else 1e9)] * ROUNDS
    assert slow_nodes(ranks, []) == ["node2"]


def earlier(rates: list[float], measure: str = "matmul", short: str = "", nodes: int = 1):
    row = dict.fromkeys(node_rates.MEASURES) | {"node": "node0", "nodes": nodes, "ranks": 2}
    return [row | {measure: rate, "short": short} for rate in rates]


def test_a_node_is_compared_with_its_earlier_preflights():
    now = ranks_of(0.0, nodes=1)
    rate = float(np.median(now[0].rates["matmul"]))
    for rank in now:
        rank.rates["matmul"][:] = [rate] * ROUNDS
    usual = [1.5 * rate, 1.51 * rate, 1.49 * rate]
    assert slow_nodes(now, earlier(usual)) == ["node0"]
    assert slow_nodes(now, earlier(usual[:2])) == []  # too few
    assert slow_nodes(now, earlier(usual, nodes=2)) == []  # of larger jobs
    assert slow_nodes(now, earlier(usual, short="copy")) == []
    assert slow_nodes(now, earlier([0.9 * rate, 1.5 * rate, 2.2 * rate])) == []  # they vary
    # What all nodes do together names none, but is said.
    rows, (line,) = node_rates.report(now, earlier([2e9] * 3, "all"), "7", "ddp")
    assert rows[0]["short"] == ""
    words = "all-reduce over all nodes: 1 GB/s on rank 0, 50% less than in 3 earlier preflights"
    assert line == words


def test_matrix_products_are_compared_with_the_calibration(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('gpu = "H100 SXM"\n[constants]\ngemm = 0.5\n[fit]\nsigma = 0.1\n')
    flops, sigma = node_rates.expected_flops(path, "bf16")
    assert (flops, sigma) == (pytest.approx(0.5 * 989.4e12, rel=1e-3), 0.1)
    now = ranks_of(0.0, nodes=1)
    rate = float(np.median(now[0].rates["matmul"]))
    assert slow_nodes(now, [], expected=(rate / 0.65, 0.1)) == ["node0"]
    assert slow_nodes(now, [], expected=(rate / 0.75, 0.1)) == []
    path.write_text('gpu = "this machine"\n[constants]\ngemm = 0.5\n[fit]\nsigma = 0.1\n')
    assert math.isnan(node_rates.expected_flops(path, "bf16")[0])
    path.write_text('gpu = "H100 SXM"\n')
    with pytest.raises(UsageError, match="is no calibration: no 'constants'"):
        node_rates.expected_flops(path, "bf16")


def test_two_ranks_measure_in_a_run_folder_and_keep_the_rates(tmp_path):
    run, path = tmp_path / "study" / "ddp", tmp_path / "study" / FILE
    where = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7"}
    done = run_module("parallel.bench", str(run), ranks=2, **where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("preflight: ")
    (row,) = read_rows(path, COLUMNS)
    assert (row["job"], row["run"], row["node"], row["nodes"], row["ranks"]) == (
        *("7", "ddp", "n1", 1, 2),
    )
    known = {name for name in node_rates.MEASURES if row[name]}
    assert known == {"matmul", "copy", "in_node", "all", "write"}
    assert list(run.iterdir()) == []
    with path.open("a") as file:
        file.write("half a line")  # of a job that was killed
    assert len(read_rows(path, COLUMNS)) == 1
    append_rows(path, COLUMNS, [row])
    assert len(read_rows(path, COLUMNS)) == 2
    with path.open("a") as file:
        file.write(",".join(["x"] * len(COLUMNS)) + "\n")
    with pytest.raises(UsageError, match=r"preflights.csv:4: "):
        read_rows(path, COLUMNS)
