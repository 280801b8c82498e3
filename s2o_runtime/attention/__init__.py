"""The public attention ops.

`api` and `paged` have the ops, `backend` the choice of the code that computes a call (`s2o_runtime.call`), `compute`
that code, `replay` the launches of calls that come again, `torch_op` the nodes of compiled graphs, `result` what the
ops return, `dense` what runs where no profile chose anything.
"""
