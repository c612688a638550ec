"""What is trained: sizes and presets, arithmetic, the one-device GPT, Hugging Face import/export.

Read config.py, gpt.py and flops.py; then hf_config.py and hf_weights.py, the same model by other
names. Only `gpt`, `tensor_files`, `hf_weights` and `hf_model` load torch.
"""
