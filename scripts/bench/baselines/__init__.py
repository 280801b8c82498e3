"""Sparse attention of other papers: each selects key blocks for a whole layer, one kernel computes attention over them.

They are what S2O is compared with, in evaluations and benches; README.md beside this file describes each. They are in
the repository and not in the package. Importing `settings` imports no torch, and only a call on a GPU imports triton.
"""
