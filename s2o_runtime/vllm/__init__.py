"""S2O as an attention backend of vLLM.

`plan` decides which requests of a batch S2O computes, `fit` what a profile says on this rank, `layouts` how a cache is
read, `batch` has the tensors of one, `settings` what the user asked for, `counters` what was done, `compat` which vLLM
this is. None of these imports vLLM. `plugin` is what vLLM loads, `backend` makes a backend out of a stock one, which
`flash` does for GPUs and `cpu` for tests on vLLM's CPU engine. docs/serving.md has the user's view.
"""
