"""Numbers in words: memory is counted in GiB, files and rates in GB of 1e9 bytes."""

GIB = 2.0**30


def in_powers(count: float) -> str:
    """Returns a count in four digits, as 2e12."""
    return f"{count:.4g}".replace("e+0", "e").replace("e+", "e")
