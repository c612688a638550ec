"""What a step takes: its seconds, bytes of memory and messages, and the layouts to choose from.

Read `columns` (a step's settings), `timemodel/` (seconds, term by term) with `engines` (their
constants), `memory/` (bytes) and `messages` (bytes sent); then `fitting` and `calibration`
(constants of a cluster from runs), `space` (all layouts), `ranking` (those that fit, the fastest
first), and `explain` and `scale`, which print one layout and many sizes. `runs` prices what ran.
"""
