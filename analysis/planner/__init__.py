"""The time model, its calibration, and the layouts it chooses from."""
