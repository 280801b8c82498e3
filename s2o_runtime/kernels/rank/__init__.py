"""Algorithm 1: the ranking of every segment's prefix, in three launches of `prefill.Ranker`: means, scores, order."""
