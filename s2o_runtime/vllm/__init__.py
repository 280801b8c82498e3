"""S2O as an attention backend of vLLM.

`batch` has the tensors of a batch and of the cache, `compat` says which vLLM this is; what any server needs is in
`s2o_runtime.serving`. None of these imports vLLM. `plugin` is what vLLM loads, `backend` makes a backend out of a stock
one, which `flash` does for GPUs; `engine` asks the vLLM around it. docs/serving.md has the user's view.
"""
