"""The benchmarks: the op against dense attention, S2O against the baselines, and whole prefills."""
