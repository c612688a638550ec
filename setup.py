"""Packaging, and the ranges of versions that were tested; constraints.txt has the exact ones."""

from setuptools import find_namespace_packages, setup

ROOMS = ("base", "models", "parallel", "slurm", "analysis")

# The tools that get a run's curves (docs/curves.md), each an extra.
CURVES = {
    "tensorboard": ["tensorboard>=2.16,<3"],
    "wandb": ["wandb>=0.31,<0.32"],
    "mlflow": ["mlflow-skinny>=3.17,<4", "sqlalchemy>=2,<2.1", "alembic>=1.13,<2"],
}

setup(
    name="gpt-scaling-study",
    version="0.2.0",
    description="GPT training in 3D parallelism, measured: studies in, tables you can defend out",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=[f"{room}*" for room in ROOMS]),
    package_data={
        "models": ["*.toml"],
        "slurm": ["*.toml", "*.sh", "*.slurm", "published/*.toml", "deepspeed/*.json"],
        "parallel.record": ["*.json", "*.txt"],
        "analysis.common": ["reference_convergence.toml"],
        "analysis.planner": ["calibrations/*.toml"],
        "analysis.pages": ["page.html", "page.css", "page.js"],
    },
    # The lowest versions are those with which the parity tests pass together, the highest those of
    # constraints.txt. DeepSpeed 0.19.0 is too old: its pipeline trains another model.
    install_requires=[
        "torch>=2.10,<2.16",
        "deepspeed>=0.19.8,<0.20",
        "megatron-core>=0.16.0,<0.20",  # since 0.17 it needs Python 3.12
        "transformers>=5.10.1,<5.24",
        "tokenizers>=0.22.2,<0.24",
        "safetensors>=0.6.2,<0.9",
        "numpy>=2.2.6,<2.5",
        "pandas>=2.3.3,<3.2",
        "vl-convert-python>=1.9,<2",
        "scipy>=1.15.3,<1.18",
        "tqdm>=4.66.5,<5",
        "psutil>=7.2,<8",
    ],
    extras_require={
        # Fused kernels; the range that megatron-core names. Not tried here, where there is no GPU.
        "gpu": ["transformer-engine[pytorch]>=2.9,<2.12"],
        "nvml": ["nvidia-ml-py>=13"],  # energy of NVIDIA GPUs (measure/energy.py)
        # Data alone: a test compares analysis/common/reference_convergence.toml with it.
        "mlperf": ["mlperf-logging>=4.1.68,<5"],
        **CURVES,
        "test": [
            *CURVES["tensorboard"],
            "playwright>=1.55,<2",  # drives Debian's Chromium
            "pytest>=9.2,<10",
            "pytest-xdist>=3.8,<4",
            "hypothesis>=6",
            "jsonschema>=4",
            "ruff",
        ],
    },
)
