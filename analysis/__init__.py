"""Logs in, tables out; prediction and planning. Never loads torch: it answers on login nodes."""
