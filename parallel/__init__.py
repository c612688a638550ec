"""How a GPT is split, fed, trained, saved and recorded.

Torch-free, so that login nodes can plan and check: `layout`, `spec`, `study`, `artifacts`,
`launch`, `sweep` and `engines` itself. Everything else loads torch.
"""
