"""Runs the program that a test gives it, with its arguments, in a process that has loaded torch."""

import sys

del sys.argv[0]
exec(sys.argv[0])
