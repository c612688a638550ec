"""Packaging, and the one place where versions are pinned."""

from setuptools import setup

setup(
    name="gpt-scaling-study",
    version="0.1.0",
    description="GPT training in 3D parallelism, measured: studies in, tables you can defend out",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["models", "parallel", "parallel.engines", "slurm", "analysis", "analysis.readers"],
    package_data={"slurm": ["*.toml"], "parallel": ["*.json"]},
    install_requires=[
        "torch==2.13.0",
        "deepspeed==0.19.8",
        "megatron-core==0.16.1",
        "transformers==5.23.0",
        "tokenizers==0.23.3",
        "safetensors==0.8.0",
        "numpy==2.4.6",
        "pandas==3.1.1",
        "matplotlib==3.11.2",
        "scipy==1.17.1",
        "tqdm==4.70.1",
    ],
    extras_require={
        "nvml": ["nvidia-ml-py==13.615.71"],  # energy of NVIDIA GPUs (parallel/meters.py)
        "test": [
            "pytest==9.2.0",
            "hypothesis==6.170.15",
            "jsonschema==4.26.0",
            "psutil==7.2.2",  # the fault campaign too
            "ruff==0.17.5",
        ],
    },
)
