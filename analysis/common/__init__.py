"""What every room here uses: tables, statistics of repeats, and colours."""
