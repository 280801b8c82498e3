"""The fakes of both servers, with the same methods for tests of what is alike in them."""

from s2o_runtime.vllm.backend import BATCH
from support import fake_sglang, fake_vllm, vllm_plain


class VllmEngine(fake_vllm.FakeEngine):
    """vLLM's."""

    order = (0, 1, 2, 3, 4)  # in which vLLM sorts decodes, tails and prompts
    stock_op = vllm_plain, "s2o_attention_varlen"  # what the stock backend computes with

    def outputs(self, parts, layer=0):
        out, self.metadata = self.feed(parts, layer)
        return out

    def runs(self):
        return getattr(self.metadata, BATCH).plan(self.server.fit.layers[0]).slices

    @property
    def stock_rows(self):
        return self.impl.stock_rows


class SglangEngine(fake_sglang.FakeEngine):
    """SGLang's."""

    order = (2, 3, 0, 1, 4)
    stock_op = fake_sglang, "s2o_attention_paged"

    def outputs(self, parts, layer=0):
        return self.feed(parts, fake_sglang.Mode.MIXED, layer={"layer_id": layer})

    def runs(self):
        return self.backend.s2o_batch.plan(self.server.fit.layers[0]).slices

    @property
    def stock_rows(self):
        return self.backend.stock_rows


ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine}
