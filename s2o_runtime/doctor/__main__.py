"""`python -m s2o_runtime.doctor` is s2o-doctor."""

from s2o_runtime.doctor.command import main

raise SystemExit(main())
