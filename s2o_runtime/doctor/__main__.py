"""`python -m s2o_runtime.doctor` is s2o-doctor."""

from .command import main

raise SystemExit(main())
