"""Triton kernels, one file per stage. Importing a stage imports triton; importing this package does not."""
