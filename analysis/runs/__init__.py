"""Runs: facts in, tables out.

judged.py gives each run its time and its verdict; fairness.py says which may be compared,
repeats.py which belong together, baseline.py what they are compared with; ratio.py makes sides of
repeats and divides their times. On these stand the tables: run_table.py (a row a run, of which
run_row.py makes what the run says by itself), scaling_curve.py (a configuration), pairs.py (two of
them) and submissions.py (MLPerf).
throughput.py has TFLOP/s, loss_parity.py losses (log_parity.py those of other programs), gate.py
what CI lets pass, rank_times.py and slowness.py ranks, efficiency_tree.py POP's factors (moves.py:
which flags act on them, advice.py: what they are predicted to win; extra_p.py for Extra-P),
gpu_hours.py and checkpoint_costs.py where the time went, stated_facts.py what ran on what.
"""
