"""The public attention ops: a call goes from `api` or `paged` through `replay` to `backend` and `compute`."""
