"""The baselines' Triton kernels. Importing a module imports triton; importing this package does not."""
