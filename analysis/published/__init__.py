"""Tables that others published.

As runs: published_runs.py (a row is a Record), then unstated.py (what a row leaves unsaid, for the
planner). Audited: audited.py (files and folders), read_tables.py (headings and numbers, with
printed_numbers.py), identities.py (what must hold), findings.py (which cells break it). The
vocabulary of headings is analysis/logs/published_csv.py.
"""
