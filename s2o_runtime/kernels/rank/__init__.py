"""Algorithm 1: the ranking of every segment's prefix, in up to four launches of `prefill.Ranker`: means, scores, order, tail."""
