"""Bytes in words: memory is counted in GiB, files and rates in GB of 1e9 bytes."""

GIB = 2.0**30
