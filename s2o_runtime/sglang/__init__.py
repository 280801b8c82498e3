"""S2O as an attention backend of SGLang.

`batch` has the tensors of a batch, `fields` the names of what it is cut out of, `settings` what the user asked for,
`compat` which SGLang this is, and `backend` makes a backend out of a stock one; what any server needs is in
`s2o_runtime.serving`. None of these imports SGLang.
`plugin` is what SGLang loads, and `host` what it calls to make the backend. docs/serving.md has the user's view.
"""
