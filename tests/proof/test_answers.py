"""Answers behind a finished prefill: the questions, and how a patched prefill moves the answers."""

from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch

from calibrate.model.models import from_memory, load
from calibrate.model.weights import get_model_class
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.questions import ANSWERED, EIGHTHS, PER_EIGHTH, QUOTED, ask_about
from calibrate.proof import answers, layers
from calibrate.proof.answers import answer_densely, find_worst_eighth, measure_answers
from calibrate.proof.verify import Prover
from calibrate.work.executor import open_local_executor
from support.architectures import CASES
from support.streamed import Layers, uniform
from support.tiny import save_tiny, tiny_tokenizer

LENGTH = 1024


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(str(save_tiny(tmp_path_factory.mktemp("model") / "tiny")), "cpu")


@pytest.fixture(scope="module")
def prompt():
    return Prompt(torch.randint(3, 98, (LENGTH,), generator=torch.Generator().manual_seed(0)))


def test_every_eighth_is_asked_about_in_words_of_the_prompt():
    tokenizer, length = tiny_tokenizer(), 2048
    ids = torch.randint(3, 98, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    questions = ask_about(tokenizer, ids)
    assert questions == ask_about(tokenizer, ids)  # nothing but the tokens decides
    for number, question in enumerate(questions):
        quote = question.ids[-QUOTED:] + question.answer
        starts = [at for at in range(length) if ids[at : at + len(quote)] == quote]
        assert len(question.answer) == ANSWERED
        assert [start * EIGHTHS // length for start in starts] == [number // PER_EIGHTH]
    assert len(questions) == EIGHTHS * PER_EIGHTH
    assert len(ask_about(tokenizer, ids[:250])) == 2  # a short prompt has room for fewer


@torch.no_grad()
def test_answers_are_those_that_the_dense_model_generates(loaded, prompt):
    """Each token is the most likely one after those before it, as in greedy generation, or revising has ended."""
    dense = answer_densely(loaded, prompt)
    for turn, log_probs in zip(dense.turns.ids[:2], dense.log_probs, strict=False):
        whole, rows = torch.cat([prompt.ids, turn]), LENGTH + torch.tensor(dense.turns.rows)
        logits = loaded.model(whole[None], use_cache=False).logits[0, rows].float().log_softmax(-1)
        assert torch.allclose(log_probs, logits, atol=1e-4)
        # at least one token is final after each revision
        assert log_probs[0].argmax() == turn[dense.turns.rows[0] + 1]


def with_taus(loaded, *taus):
    """A source of configurations: one tau for each layer."""
    return Layers(tuple(uniform(tau, loaded.geometry.query_heads) for tau in taus))


def make_hybrid(name):
    """A model whose first layer is of full attention too, so that its errors reach the other two."""
    config = CASES[name].config
    config.num_hidden_layers, config.layer_types = 3, config.layer_types[1:] + config.layer_types
    torch.manual_seed(0)
    return [from_memory(get_model_class(config).from_config(config).eval(), tiny_tokenizer())] * 2


@pytest.mark.parametrize("make", [
    pytest.param(lambda: [load("demo", "cpu", resident=resident) for resident in (True, False)], id="demo"),
    *(pytest.param(partial(make_hybrid, name), id=name) for name in ("gemma3", "qwen3-next")),
])  # fmt: skip
def test_answers_by_layer_are_those_of_the_whole_model(make, monkeypatch):
    """To the documents' answers, of several prompts and variants at once, however many turns run at once."""
    monkeypatch.setattr(answers, "revise_answers", lambda loaded, cache, questions: questions)
    ids = torch.randint(3, 98, (2, 400), generator=torch.Generator().manual_seed(0))
    prompts, measured = [Prompt(row, ((380, 381), (390, 392))) for row in ids], []
    for loaded, resident in zip(make(), (True, False), strict=True):
        with open_local_executor(loaded) as executor:
            executor.resident = resident
            monkeypatch.setattr(answers, "CACHE_BYTES", answers.CACHE_BYTES * resident)  # then one turn at a time
            sources = [with_taus(loaded, *[tau] * loaded.geometry.layers) for tau in (100.0, 0.5)]
            measured.append(measure_answers(Prover(executor), prompts, sources))
    whole, by_layer = (list(chain.from_iterable(variants)) for variants in measured)
    for one, other in zip(whole, by_layer, strict=True):
        assert (one.found, one.kept) == (other.found, other.kept)
        assert (*one.first, *one.second) == pytest.approx((*other.first, *other.second), rel=1e-3, abs=1e-8)
    assert max(one.kl for one in whole) > 1e-5


def test_only_errors_that_reach_later_layers_move_answers(loaded, prompt):
    """The prefill's rows of the last layer feed nothing that is read; those of the first do."""
    with open_local_executor(loaded) as executor:
        sources = [with_taus(loaded, *taus) for taus in ((0.0, 0.0), (0.0, 100.0), (0.5, 0.0), (100.0, 0.0))]
        exact, last, first, more = (kls[0] for kls in measure_answers(Prover(executor), [prompt], sources))
    assert max(map(abs, (*exact.first, *exact.second))) < 1e-6
    assert last == exact
    assert 1e-6 < first.kl < more.kl
    halves = [replace(more, first=tuple(sorted(kls * EIGHTHS, reverse=True))) for kls in ((1.0, 2.0), (3.0, 4.0))]
    assert find_worst_eighth(halves) == 3.0


def test_in_chunks_prompts_are_read_as_a_server_feeds_them(loaded, prompt, monkeypatch):
    """Like the model that is fed part by part, each behind the cache of those before; segments are cut in two."""

    def feed(loaded, prompt):
        cache = None
        for part in prompt.ids[None].split(300, 1):
            outputs = loaded.model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
        return cache, outputs.logits[0, -1:].float().log_softmax(-1)

    with open_local_executor(loaded) as executor:
        source, chunked = [with_taus(loaded, 0.5, 0.5)], Prover(executor, chunk=300)
        ((ours,),), ((whole,),) = (measure_answers(prover, [prompt], source) for prover in (chunked, Prover(executor)))
        monkeypatch.setattr(answers, "prefill", feed)
        ((fed,),) = measure_answers(Prover(executor), [prompt], source)
    assert ours.first == pytest.approx(fed.first, rel=1e-3)
    assert ours.kl != pytest.approx(whole.kl, rel=0.02)


@torch.no_grad()
def test_needles_are_those_that_the_proof_counts(loaded, monkeypatch):
    """Spans of what the dense model says next, and one of what it does not; a sparse prefill loses some."""
    for module in (answers, layers):
        monkeypatch.setattr(module, "KEPT_WITHIN", 1e-3)  # nats: the model is undecided nearly everywhere
    ids, spans = torch.randint(3, 98, (600,), generator=torch.Generator().manual_seed(1)), []
    for begin in range(430, 590, 24):
        for place in range(begin, begin + 3):
            ids[place] = loaded.model(ids[None, :place], use_cache=False).logits[0, -1].argmax()
        spans.append((begin, begin + 3))
    ids[spans[3][0]] = (ids[spans[3][0]] + 1) % 98
    prompts, source, streams = [Prompt(ids, tuple(spans))], with_taus(loaded, 3.0, 3.0), []
    forward = layers.LayerwiseForward
    monkeypatch.setattr(layers, "LayerwiseForward", lambda model, of: streams.append(len(of)) or forward(model, of))
    with open_local_executor(loaded) as executor:
        prover = Prover(executor)
        ((counted,),) = measure_answers(prover, prompts, [source])
        _, proofs = prover.prove(source, {600: prompts}, timed=False)
    assert proofs[600].needles == (counted.kept, counted.found)
    with open_local_executor(loaded) as executor:  # the dense model reads the prompt anew, beside the patched one
        assert Prover(executor).prove(source, {600: prompts}, timed=False)[1] == proofs
    assert streams == [1, 2]
    assert 0 < counted.kept < counted.found < len(spans)
