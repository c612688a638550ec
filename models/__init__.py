"""What is trained: sizes and presets, arithmetic, the one-device GPT, Hugging Face import/export.

`config`, `flops` and `errors` are plain Python; only `gpt` and `hf` load torch.
"""
