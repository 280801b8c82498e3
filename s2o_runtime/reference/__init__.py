"""Attention in plain torch: dense, ranked, and S2O itself, the oracle of the kernels."""
