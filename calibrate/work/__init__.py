"""A calibration's work: items, and executors that run them in this process or on many GPUs."""
