"""What a run leaves behind. Torch-free.

Read schema.py first, which says what a run folder holds, then writer.py and reader.py; lock.py and
process.py leave a folder to one writer. launch.py, facts.py, environment.py and lines.py are how a
run begins and what it says of itself. ends.py, first_end.py,
first_place.py, signals.py and hangs.py are how it ends.
"""
