"""Logs in: one record a run, one reader a format, and the verdict on each run."""
