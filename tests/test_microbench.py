"""Rates of this machine are measured, however short the time for them is."""

from parallel import microbench


def test_a_call_that_takes_longer_than_the_time_for_it_is_measured():
    assert microbench._rate(1.0, lambda: sum(range(1000)), 1e-9, cuda=False) > 0
