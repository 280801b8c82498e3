"""The public attention ops.

`api` and `paged` have the ops, `backend` the choice of the code that computes a call (`s2o_runtime.call`), `compute`
that code, `replay` the way of every call through them, `torch_op` the nodes of compiled graphs, `dense` what
runs where no profile chose anything.
"""
