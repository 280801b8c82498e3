"""What an installed S2O must do, run by test_wheel.py: python smoke.py WHERE PROFILE

WHERE: the folder that it is installed in; PROFILE: one of the demo model.
"""

import sys
from pathlib import Path

import torch

import calibrate
import s2o_runtime
from calibrate.model.models import load
from s2o_runtime import LayerConfig, load_profile, patch, s2o_attention, unpatch

home, profile = Path(sys.argv[1]).resolve(), sys.argv[2]
assert all(Path(each.__file__).is_relative_to(home) for each in (calibrate, s2o_runtime))
torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 300, 64), torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64)
out, _, stats = s2o_attention(q, k, v, LayerConfig.uniform(4, tau=0.0, segment=128), return_stats=True)
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
assert stats.density.min() == 1
model = patch(load("demo", "cpu", resident=True).model)  # found in the catalogue that is installed
ids = torch.randint(3, 256, (1, load_profile(profile).min_length))
with torch.no_grad():
    sparse = model(ids).logits
    dense = unpatch(model)(ids).logits
assert sparse.isfinite().all()
assert not torch.equal(sparse, dense)
