"""The ends of prompts, their adapters and what is read of them, by the steps that vLLM's workers are given."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.vllm.backend import RequestPart
from s2o_runtime.vllm.engine import UNKNOWN, Prompts

ADAPTER, POOLING, PROMPT_LOGPROBS = DenseReason.ADAPTER, DenseReason.POOLING, DenseReason.PROMPT_LOGPROBS
OPTED_OUT = DenseReason.OPTED_OUT


def step(scheduled, new=(), running=(), finished=(), resumed=(), reasons={}):  # noqa: B006 (it never changes)
    """scheduled: tokens by request. new: (request, prompt tokens, cached ones). running: (request, computed tokens).

    resumed: (request, tokens), which are among the running ones too.
    """
    requests, computed = zip(*running, strict=True) if running else ((), ())
    new_requests = [
        SimpleNamespace(
            req_id=name,
            prompt_token_ids=[0] * length,
            prompt_embeds=None,
            num_computed_tokens=cached,
            lora_request=object() if reasons.get(name) is ADAPTER else None,
            pooling_params=object() if reasons.get(name) is POOLING else None,
            sampling_params=SimpleNamespace(
                prompt_logprobs=0 if reasons.get(name) is PROMPT_LOGPROBS else None,
                extra_args={"s2o": "off"} if reasons.get(name) is OPTED_OUT else None,
            ),
        )
        for name, length, cached in new
    ]
    cached_requests = SimpleNamespace(
        req_ids=list(requests),
        num_computed_tokens=list(computed),
        resumed_req_ids={name for name, _ in resumed},
        all_token_ids={name: [0] * tokens for name, tokens in resumed},
    )
    return SimpleNamespace(
        scheduled_new_reqs=new_requests,
        scheduled_cached_reqs=cached_requests,
        num_scheduled_tokens=scheduled,
        finished_req_ids=set(finished),
    )


class Worker:
    """vLLM's, as far as it matters here."""

    def execute_model(self, scheduler_output):
        return "ran", scheduler_output


def test_a_worker_runs_as_before_and_its_steps_are_seen():
    watched, prompts = type("Watched", (Worker,), {}), Prompts()
    prompts.watch(watched)
    first = step({"a": 300}, new=[("a", 1000, 200)])
    assert watched().execute_model(first) == ("ran", first)
    assert prompts.find_part(300, 500) == RequestPart("a", 500)
    Worker().execute_model(step({"b": 1}))  # another class is as it was
    assert prompts.find_part(300, 500) == RequestPart("a", 500)


@given(st.data())
def test_what_is_left_of_prompts_and_why_they_are_dense_in_any_order_of_steps(data):
    """Of requests that are read in chunks, decode, wait, are preempted, and end; names are used again."""
    prompts, requests = Prompts(), {}
    prompts.reads = data.draw(st.sampled_from(["all", "answers"]))
    counting = [ADAPTER, OPTED_OUT] + [POOLING, PROMPT_LOGPROBS] * (prompts.reads == "answers")
    for _ in range(data.draw(st.integers(1, 8))):
        finished = [name for name in requests if data.draw(st.sampled_from([False, False, True]))]
        for name in finished:
            del requests[name]
        scheduled, new, running, resumed, left, reasons, names = {}, [], [], [], {}, {}, {}
        for name in "abc":
            if data.draw(st.booleans()):
                continue  # waits
            if name not in requests:
                length = data.draw(st.integers(1, 6))
                cached = data.draw(st.integers(0, length - 1))
                reason = data.draw(st.sampled_from([None, ADAPTER, OPTED_OUT, POOLING, PROMPT_LOGPROBS]))
                requests[name] = request = {"end": length, "done": cached, "reason": reason}
                new.append((name, length, cached))
            else:
                request = requests[name]
                if data.draw(st.sampled_from([False, False, True])):  # preempted: what it has written is read again
                    request["end"], request["done"] = max(request["end"], request["done"] + 1), 0
                    resumed.append((name, request["end"]))
                running.append((name, request["done"]))
            queries = data.draw(st.integers(1, max(1, request["end"] - request["done"])))
            scheduled[name] = queries
            if request["done"] < request["end"]:  # still in its prompt
                sizes, behind = (queries, request["done"] + queries), request["end"] - request["done"] - queries
                left[sizes] = min(behind, left.get(sizes, behind))  # of two alike, the one that ends counts
                reasons.setdefault(sizes, set()).update({request["reason"]} & set(counting))
                names.setdefault(sizes, set()).add(name)
            request["done"] += queries
        own = {name: request["reason"] for name, request in requests.items()}
        prompts.observe(step(scheduled, new, running, finished, resumed, own))
        for sizes in [(queries, keys) for queries in range(1, 7) for keys in range(queries, 12)]:
            part = prompts.find_part(*sizes)
            if sizes not in left:  # of a microbatch, say: the step does not have it
                assert part == UNKNOWN == RequestPart(None, None, DenseReason.UNKNOWN_REQUEST)
                continue
            assert part.left == left[sizes]
            assert part.name in names[sizes]
            assert part.reason in (reasons[sizes] or {None})


def test_once_a_step_is_not_understood_nothing_is_known_and_that_is_said_once(info_log):
    prompts = Prompts()
    prompts.reads = "answers"
    prompts.observe(step({"a": 100}, new=[("a", 100, 0)]))
    assert prompts.find_part(100, 100).reason is None
    for _ in range(2):
        prompts.observe(SimpleNamespace(finished_req_ids=[]))
    prompts.observe(step({"b": 100}, new=[("b", 100, 0)]))
    assert prompts.find_part(100, 100) is UNKNOWN
    (said,) = info_log.messages
    assert said.startswith("S2O: this vLLM does not say where prompts end (AttributeError(")
