"""Algorithm 1: the ranking of every segment's prefix, by launches of `prefill.Ranker`: means, scores, order, tail."""
