"""What log formats share.

Read logfile.py (blocks of whole lines), line_format.py (what a format declares), lines.py and
fields.py (how its lines are read), steps.py (the table of steps), attempts.py (where a run begins
again), files_of_runs.py (which files are of one run), evidence.py (whether a file without
iterations is of a run) and failure_line.py (the line that proves how it failed). setting_names.py
reads the text before training, facts_elsewhere.py what stands outside of the log, and rate_words.py
judges rates.
"""
