"""What a run saves, and how it goes on from there.

Read contents.py (what is saved), checkpointer.py (when), rank_files.py and folders.py (where), then
attempts.py (how a run begins) and loading.py. doors/ has the checkpoints of other programs.
"""
