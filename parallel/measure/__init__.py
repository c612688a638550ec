"""What is measured while a run trains, or before.

Read ranges.py first, which marks the regions of a step; profiler.py and step_parts.py (a breakdown)
listen to them. steady_time.py, training_metrics.py, load_and_memory.py and energy.py are what every
run measures. slower.py says when a node or a rank is slow: node_rates.py and slow_ranks.py use it,
with rank_judge.py and own_times.py. rehearsal.py is what a run without GPUs counts.
"""
