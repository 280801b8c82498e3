"""Quality and time of patched models against dense ones: what `s2o-eval` measures."""
