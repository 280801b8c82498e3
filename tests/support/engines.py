"""The fakes of both servers by name; they have the same methods."""

from support import fake_sglang, fake_vllm

ENGINES = {"vllm": fake_vllm.FakeEngine, "sglang": fake_sglang.FakeEngine}
