"""Algorithm 1: the ranking of every segment's prefix, which `prefill.Ranker` runs: means, scores, order, tail."""
