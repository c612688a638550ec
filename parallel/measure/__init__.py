"""What is measured while a run trains, or before.

Read ranges.py first, which marks the regions of a step; profiler.py and step_parts.py (a breakdown)
listen to them. steady_time.py, training_metrics.py, load_and_memory.py and energy.py are what every
run measures. slower.py says what stands out of its noise: node_rates.py (nodes) and rank_judge.py
(ranks) use it; own_times.py and slow_windows.py are the times and windows of slow ranks.
rehearsal.py is what a run without GPUs counts.
"""
