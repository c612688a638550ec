"""What runs measured: speedup, comparison, parity, breakdown, profiles."""
