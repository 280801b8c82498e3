"""Where prompts end, by the steps that vLLM's workers are given."""

from types import SimpleNamespace

from s2o_runtime.vllm.prompts import Prompts


def step(scheduled, new=(), running=(), finished=(), resumed=(), adapters=()):
    """scheduled: tokens by request. new: (request, prompt tokens, cached ones). running: (request, computed tokens).

    resumed: (request, tokens), which are among the running ones too.
    """
    requests, computed = zip(*running, strict=True) if running else ((), ())
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=one,
                prompt_token_ids=[0] * length,
                prompt_embeds=None,
                num_computed_tokens=cached,
                lora_request=object() if one in adapters else None,
            )
            for one, length, cached in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(requests),
            num_computed_tokens=list(computed),
            resumed_req_ids={one for one, _ in resumed},
            all_token_ids={one: [0] * tokens for one, tokens in resumed},
        ),
        num_scheduled_tokens=scheduled,
        finished_req_ids=set(finished),
    )


class Worker:
    """vLLM's, which notes what it ran."""

    def __init__(self):
        self.ran = []

    def execute_model(self, scheduler_output):
        self.ran.append(scheduler_output)
        return "output"


def test_a_worker_runs_as_before_and_its_steps_are_seen():
    class Watched(Worker):
        pass

    prompts = Prompts()
    for _ in range(2):
        prompts.watch(Watched)
    worker, first = Watched(), step({"a": 300}, new=[("a", 1000, 200)])
    assert worker.execute_model(first) == "output"
    assert worker.ran == [first]
    assert prompts.left(300, 500) == 500
    worker.execute_model(step({"a": 500}, running=[("a", 500)]))
    assert prompts.left(500, 1000) == 0
    assert Worker().execute_model(step({"b": 1})) == "output"  # another class is as it was
    assert prompts.left(500, 1000) == 0


def test_what_is_left_of_a_prompt_in_chunks():
    prompts = Prompts()
    prompts.see(step({"a": 300, "b": 1}, new=[("a", 1000, 0)], running=[("b", 70)]))
    assert (prompts.left(300, 300), prompts.left(1, 71)) == (700, None)
    prompts.see(step({"a": 600, "b": 1, "c": 50}, new=[("c", 50, 0)], running=[("b", 71), ("a", 300)]))
    assert (prompts.left(600, 900), prompts.left(50, 50), prompts.left(300, 300)) == (100, 0, None)
    prompts.see(step({"b": 1, "c": 1, "a": 100}, running=[("b", 72), ("c", 50), ("a", 900)]))
    assert (prompts.left(100, 1000), prompts.left(1, 51)) == (0, None)
    prompts.see(step({"a": 1, "b": 1}, running=[("a", 1000), ("b", 73)]))
    assert prompts.left(1, 1001) is None


def test_a_request_that_waits_or_is_dropped_is_none_of_the_step():
    prompts = Prompts()
    prompts.see(step({"a": 300}, new=[("a", 1000, 0)]))
    prompts.see(step({"b": 10}, new=[("b", 10, 0)]))  # "a" waits
    assert prompts.left(300, 300) is None
    prompts.see(step({}, finished=["a"]))
    prompts.see(step({"a": 300}, new=[("a", 400, 0)]))  # another prompt of the same name
    assert prompts.left(300, 300) == 100


def test_a_request_that_was_preempted_reads_its_own_words_again():
    prompts = Prompts()
    prompts.see(step({"a": 300}, new=[("a", 300, 0)]))
    prompts.see(step({"a": 1}, running=[("a", 300)]))
    prompts.see(step({"a": 200}, running=[("a", 0)], resumed=[("a", 320)]))
    assert prompts.left(200, 200) == 120
    prompts.see(step({"a": 120}, running=[("a", 200)]))
    assert prompts.left(120, 320) == 0


def test_of_two_requests_of_one_shape_the_one_that_ends_counts():
    prompts = Prompts()
    prompts.see(step({"a": 300, "b": 300}, new=[("a", 300, 0), ("b", 900, 0)]))
    assert prompts.left(300, 300) == 0


def test_requests_with_adapters_are_known_by_their_shapes_while_they_are_read():
    prompts = Prompts()
    prompts.see(step({"a": 300}, new=[("a", 300, 0)], adapters="a"))
    assert not prompts.adapted(300, 300)  # of a server that has no adapters nothing is asked
    prompts.lora = True
    prompts.see(step({"a": 300, "b": 200}, new=[("a", 1000, 0), ("b", 400, 0)], adapters="a"))
    assert (prompts.adapted(300, 300), prompts.adapted(200, 200)) == (True, False)
    prompts.see(step({"a": 300, "b": 200, "c": 300}, new=[("c", 600, 0)], running=[("a", 300), ("b", 200)]))
    assert (prompts.adapted(300, 600), prompts.adapted(300, 300), prompts.adapted(200, 400)) == (True, False, False)
    prompts.see(step({"a": 50, "c": 300}, new=[("a", 650, 600)], running=[("c", 300)], finished=["a"]))
    assert (prompts.adapted(50, 650), prompts.adapted(300, 600)) == (False, False)  # another one of the name
    prompts.see(step({"d": 100, "e": 100}, new=[("d", 100, 0), ("e", 100, 0)], adapters="e"))
    assert prompts.adapted(100, 100)  # of two of a shape one has an adapter
    assert prompts.adapted(70, 70)  # what no step has said may have one
    prompts.see(SimpleNamespace(finished_req_ids=[]))
    prompts.see(step({"f": 100}, new=[("f", 100, 0)]))
    assert prompts.adapted(100, 100)  # once steps are not understood, every request may


def test_a_step_that_is_not_understood_is_said_once(info_log):
    prompts = Prompts()
    for _ in range(2):
        prompts.see(SimpleNamespace(finished_req_ids=[]))
    assert prompts.left(300, 300) is None
    (said,) = info_log.messages
    assert said.startswith("S2O: this vLLM does not say where prompts end (AttributeError(")
    assert said.endswith("their last rows are sparse too")
