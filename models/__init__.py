"""What is trained: sizes and presets, arithmetic, the one-device GPT, Hugging Face import/export.

Only `gpt`, `weights`, `tensor_files` and `hf_*` load torch.
"""
