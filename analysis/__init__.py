"""Logs in, tables out; prediction and planning. Never loads torch, so it answers on a login node."""
