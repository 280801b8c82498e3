"""What S2O's backends for servers share, whichever server it is.

`plan` decides which requests of a batch S2O computes, `fit` what a profile says on this rank and whether it is of the
model that is served, `calls` computes a part of a batch, `batch` keeps what is the same for all layers, `settings` is
what the user asked for, and `server` one process of a server. None of these imports a server; `s2o_runtime.vllm` and
`s2o_runtime.sglang` are what does.
"""
