"""The public attention ops.

`api` has the ops, `call` a checked call, `backend` the choice of the code that computes it, `compute` that code,
`replay` the launches of calls that come again, `torch_op` the nodes of compiled graphs, `result` what the ops return,
`dense` what runs where no profile chose anything.
"""
