"""`python -m s2o_runtime.doctor` is s2o-doctor."""

import sys

from s2o_runtime.doctor.command import main

sys.exit(main())
