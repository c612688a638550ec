"""What several log formats have in common: lines, fields, settings, steps, ends."""
