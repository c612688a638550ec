"""Studies in, sbatch scripts out. Torch-free."""
