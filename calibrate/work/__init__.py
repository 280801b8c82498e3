"""Who does a calibration's work: items of work, and executors that run them in this process or on many GPUs."""
