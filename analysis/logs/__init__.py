"""Logs in: one record a run, one reader a format.

Read record.py and facts.py first (what a run states), then load.py (from a path to records),
readers/ (a format each; nanogpt.py is the shortest) and parsing/, which they share. step_time.py
takes the seconds of a step from a record, rank_files.py those of its parts on each rank; naming.py
says what a table calls a run.
"""
