"""Resources of this machine: GPUs, memory limits, samples of use."""
