"""Algorithm 1: the ranking of every segment's prefix. Importing a module imports triton; this package does not.

`means` has the representatives, means of parts of a segment's queries. `scores` has the logarithm of each
representative's softmax denominator, and what every step of adjacent keys weighs for a segment. `order` has the steps
by falling weight, coarsely. `prefill.Ranker` runs them one after the other.
"""
