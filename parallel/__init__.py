"""How a GPT is split, fed, trained, saved and recorded.

`config`, `record`, `sweep` and `checkpoint verify` run without torch, so that login nodes can plan
and check.
"""
