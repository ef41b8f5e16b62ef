"""A step of one row as one CUDA kernel: an experiment, which README.md tells of."""
