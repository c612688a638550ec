"""Logs in: one record a run, one reader a format, and its step time."""
