"""S2O as an attention backend of SGLang.

`batch` has the tensors of a batch, `compat` says which SGLang this is and what a batch is cut out of, and `backend`
makes a backend out of a stock one; what any server needs is in `s2o_runtime.serving`. None of these imports SGLang.
`plugin` is what SGLang loads, and `engine` what it calls to make the backend. docs/serving.md has the user's view.
"""
