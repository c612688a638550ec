"""What is trained: sizes and presets, arithmetic, the one-device GPT, Hugging Face import/export.

Only `gpt`, `weights`, `tensor_files`, `generate` and `hf_*` load torch.
"""
