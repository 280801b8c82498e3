"""Prompts: exact lengths, three sets that share no document, domains, needles, and the user's files."""

import hashlib
import json
import random
import re
import shutil
from collections import Counter
from functools import partial
from itertools import islice, product
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from calibrate.evaluation.plan import EvaluationPlan
from calibrate.evaluation.tasks import Case, build
from calibrate.model.models import DEMO_FOLDER
from calibrate.prompts.documents import (
    CALIBRATION,
    CERTIFY,
    COMPOSED,
    FOUND,
    GENERATED,
    HELD_OUT,
    PURPOSES,
    UNREAD,
    Document,
    DocumentPool,
    make_held_out_prompts,
    make_prompts_of_one_text,
    read_documents,
    read_found_documents,
)
from calibrate.prompts.prompts import (
    ASK,
    _take_turns,
    assemble_prompt,
    count_tokens,
    load_prompts,
    make_parts,
    mix_equal_parts,
    split,
)
from calibrate.prompts.retrieval import FACTS, count_needles
from calibrate.recipe import DOMAINS, Budget, Recipe
from s2o_runtime.errors import InputError

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TALK = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
FOX = "The quick brown fox jumps over the lazy dog. "


def letters_tokenizer(prefix, end, **special):
    """A tokenizer of printable letters that puts some tokens before every text and some behind it."""
    names = ["<pad>", "<bos>", "[gMASK]", "<sop>", "<eos>"]
    vocabulary = {token: number for number, token in enumerate([*names, "\n", *map(chr, range(32, 127))])}
    inner = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<pad>"))
    if prefix or end:
        inner.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A", *end], special_tokens=[(name, vocabulary[name]) for name in names]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", **special)


def bos_tokenizer(template):
    """The demo model's tokenizer, made to put its first token before every text, and with a chat template."""
    plain, bos = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), "<|endoftext|>"
    plain.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=bos, eos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


@pytest.fixture(scope="module")
def with_bos():
    return bos_tokenizer(CHATML)


def recipe(**changes):
    options = {"lengths": (512, 1024), "num_prompts": 4, "held_out": 2, "num_certify": 3, **changes}
    return Recipe("demo", Budget("mse", 1e-4), out=Path("unused"), **options).validate()


def write(path, entries):
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def words(number, count):
    """A text whose words name it: about three tokens each."""
    return " ".join(f"w{number}" for _ in range(count))


def numbers_of(tokenizer, prompts):
    """The numbers of the texts of `words` in prompts."""
    return {int(number) for prompt in prompts for number in re.findall(r"\bw(\d{3})\b", tokenizer.decode(prompt.ids))}


@settings(max_examples=6, deadline=None, phases=[Phase.generate])  # an example takes a second: none is shrunk
@given(
    seed=st.integers(0, 99),
    lengths=st.sampled_from([(512,), (512, 1024), (512, 2048)]),
    checked=st.sampled_from([(), (768,)]),
    domains=st.none() | st.lists(st.sampled_from(DOMAINS), unique=True, min_size=1).map(tuple),
    counts=st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(0, 11)),
    needles=st.booleans(),
    template=st.sampled_from([CHATML, None, "plain"]),
)
def test_built_in_prompts(tokenizer, seed, lengths, checked, domains, counts, needles, template):
    """Exact lengths, no text twice, no group in two sets, kinds in turns, all needles asked for, the same per seed."""
    reader = tokenizer if template == "plain" else bos_tokenizer(template)
    options = dict(zip(("num_prompts", "held_out", "num_certify"), counts, strict=True))
    options |= {"lengths": lengths, "check_lengths": checked, "domains": domains, "hide_needles": needles}
    drawn = load_prompts(recipe(seed=seed, **options), reader)
    assert tuple(drawn.calibration) == lengths
    assert tuple(drawn.held_out) == (*lengths, *checked)
    assert list(drawn.certify) == (list(drawn.held_out) if counts[2] else [])
    kinds, groups, hashes = domains or DOMAINS, [], []
    for count, by_length in zip(counts, drawn.by_purpose, strict=True):
        groups.append({prompt.group for prompts in by_length.values() for prompt in prompts})
        for length, prompts in by_length.items():
            names = [prompt.domain for prompt in prompts]
            hashes += [prompt.sha256 for prompt in prompts]
            if count < len(kinds):  # each has several, in equal parts
                assert sorted("+".join(names).split("+")) == sorted(kinds)
            else:
                assert names == [kinds[number % len(kinds)] for number in range(count)]
            for prompt in prompts:
                assert prompt.length == length
                assert (prompt.ids[0] == 0, prompt.ids[1] == 0) == (template != "plain", False)
                check_needles(reader, prompt, count_needles(length) if needles else 0)
    assert len(set(hashes)) == len(hashes)
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert drawn.record() == load_prompts(recipe(seed=seed, **options), reader).record()
    assert drawn.record() != load_prompts(recipe(seed=seed + 1, **options), reader).record()


def check_needles(reader, prompt, count):
    """Each needle is hidden once and asked for in the second half; isolated where the prompt is of questions."""
    text = reader.decode(prompt.ids)
    asked = [line for line in text.splitlines() if line.startswith("# What is the secret code for")]
    assert len(asked) == len(prompt.answers) == count
    assert ("secret code" in text) == bool(count)
    for line in asked:
        word, code = line.split("?")[0].split()[-1], line.split()[-1]
        assert text.count(f"# The secret code for {word} is {code}") == 1, prompt.domain
    assert all(first > prompt.length // 2 for first, _ in prompt.answers)
    answered = [reader.decode(prompt.ids[first:end]).strip() for first, end in prompt.answers]
    assert answered == [line.split()[-1].rstrip(".") for line in asked]
    if count and "+" not in prompt.domain:
        assert (text.rstrip().rpartition("\n")[2] != asked[-1]) == (prompt.domain == "questions")


def test_a_prompt_reads_like_its_kind(tokenizer, with_bos):
    options = {"lengths": (512,), "num_certify": 10, "hide_needles": False}
    texts = {
        prompt.domain: tokenizer.decode(prompt.ids)
        for prompt in load_prompts(recipe(**options), tokenizer).certify[512]
    }
    assert texts["code"].startswith("# ")
    assert texts["chat"].startswith("System: ")
    chinese = {domain: sum("一" <= character <= "鿿" for character in text) for domain, text in texts.items()}
    assert chinese["chinese"] > 100
    assert chinese["json"] == chinese["prose"] == 0
    (chat, *_) = load_prompts(recipe(lengths=(1024,), domains=("chat",)), with_bos).calibration[1024]
    text = with_bos.decode(chat.ids)
    assert text.startswith("<|endoftext|><|system|>\n")
    before, asked, after = text.partition(f"<|endoftext|>\n<|user|>\n{ASK}<|endoftext|>\n<|assistant|>\n")
    assert asked
    assert "# The secret code for" in before
    assert after.startswith("\n# What is the secret code for")


@pytest.mark.parametrize(
    ("domain", "length", "prompts", "characters"),
    [("prose", 65536, (0.5, 1, 2), 4.5), ("chinese", 65536, (0.5, 1, 2), 1.1), ("code", 131072, (0.5, 1, 8), 4)],
)
def test_found_text_is_split_without_overlap_and_suffices_as_far_as_the_docs_say(domain, length, prompts, characters):
    """For so many prompts of each set. A token has about four and a half characters of English, four of code."""
    by_purpose = read_found_documents(domain)
    groups = [{document.group for document in by_purpose[purpose]} for purpose in PURPOSES]
    contents = Counter(document for purpose in PURPOSES for document in by_purpose[purpose])
    assert all(groups)
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert set(contents.values()) == {1}
    for purpose, count in zip(PURPOSES, prompts, strict=True):
        total = sum(len(document.text) for document in by_purpose[purpose])
        assert total > count * length * characters, purpose


@pytest.mark.parametrize("domain", [*GENERATED, *COMPOSED])
def test_generated_text_repeats_no_passage(domain):
    """No text holds 150 characters of one before it, but the licences at the head of code files that it may quote."""
    pool = DocumentPool(CERTIFY, random.Random(5))
    documents = [document for _ in range(4) for document in islice(pool.take(domain), 3)]
    assert len({document.group for document in documents}) == 4
    assert all(document.domain == domain and bool(document.turns) == (domain == "chat") for document in documents)
    for turns in filter(None, (document.turns for document in documents)):
        assert [role for role, _ in turns] == ["system", *["user", "assistant"] * (len(turns) // 2)]
        assert all(content.strip() for _, content in turns)
    texts = [document.as_text for document in documents]
    for number, text in enumerate(texts):
        assert len(text) > 50
        others = "\0".join(texts[:number])
        passages = {text[start : start + 100] for start in range(0, len(text) - 100, 50)}
        repeated = [passage for passage in passages if passage in others and "---" not in passage]
        assert len(repeated) <= (len(text) // 1000 if domain in COMPOSED else 0), (domain, repeated)


def test_a_seed_writes_the_same_text_for_ever(tmp_path):
    """Profiles name their prompts by hashes, so words and templates may neither change nor change places.

    Built-in prompts as a whole are not among these: they depend on Python's own library.
    """
    assert sorted(DOMAINS) == sorted([*FOUND, *GENERATED, *COMPOSED])
    writers = {**GENERATED, "chat": partial(COMPOSED["chat"], excerpt=lambda most: f"{most} lines\n" * 3)}
    texts = {name: [write_text(random.Random(seed)) for seed in range(3)] for name, write_text in writers.items()}
    needles = {name: [draw(16, random.Random(seed)) for seed in range(3)] for name, draw in FACTS.items()}
    facts = {name: [([one.fact for one in some], some) for some in drawn] for name, drawn in needles.items()}
    path = write(tmp_path / "p.jsonl", [{"text": f"{n} " + FOX * n, "group": n % 9} for n in range(9, 40)])
    drawn = load_prompts(recipe(prompts=(path,)), letters_tokenizer(["<bos>"], []))
    files = {"files": [[prompt.sha256 for prompts in part.values() for prompt in prompts] for part in drawn.by_purpose]}
    written = texts | facts | files
    hashes = {name: hashlib.sha256(repr(values).encode()).hexdigest()[:12] for name, values in written.items()}
    assert hashes == {
        "json": "cb00c5d8b744", "tables": "335845b56a91", "logs": "676cc00a247b", "encoded": "59baec3f3ef4",
        "chat": "926e4ab5baa5", "needles": "39e2b8a82c9d", "questions": "15a2965dc3ae", "files": "774f70003973",
    }  # fmt: skip


def test_found_text_is_handed_out_once_whatever_takes_excerpts_of_it(monkeypatch):
    few = [
        Document("prose", f"g{group}", "§".join(f"{group}{part}{n}" for n in range(2000)))
        for group in range(3)
        for part in "xy"
    ]
    documents = {"prose": few, "code": [], "chinese": []}
    monkeypatch.setattr(
        "calibrate.prompts.documents.read_found_documents", lambda domain: dict.fromkeys(PURPOSES, documents[domain])
    )
    pool = DocumentPool(CERTIFY, random.Random(1))
    begun = [next(pool.take("prose")) for _ in range(3)]
    assert len({document.group for document in begun}) == 3  # a prompt begins with a group that none has begun
    handed_out = [document.text for document in begun]
    handed_out += [document.text for document in islice(pool.take("mixed"), 300)]
    assert not pool.used_up  # though the excerpts took it all
    assert not list(pool.take("prose"))
    assert pool.used_up == {"prose"}
    words_of = Counter(word for text in handed_out for word in text.split("§"))
    assert words_of["0x1000"] == words_of["2y7"] == 1


def test_a_kind_that_runs_out_gives_its_place_to_others(tokenizer, monkeypatch, caplog):
    few = {
        purpose: [Document("prose", f"{purpose}{number}", words(start + number, 140)) for number in range(2)]
        for start, purpose in zip((100, 200, 300), PURPOSES, strict=True)
    }
    monkeypatch.setattr("calibrate.prompts.documents.read_found_documents", lambda domain: few)
    options = {"lengths": (1024,), "check_lengths": (), "num_certify": 6}
    drawn = load_prompts(recipe(domains=("prose", "logs"), **options), tokenizer)
    assert "the built-in text of prose at 1024 is used up" in caplog.text
    assert [prompt.domain for prompt in drawn.certify[1024]] == ["prose", "logs"] + ["logs"] * 4
    assert len({prompt.group for prompt in drawn.certify[1024]}) == 6
    for start, prompts in zip((100, 200, 300), drawn.by_purpose, strict=True):
        assert numbers_of(tokenizer, prompts[1024]) == {start, start + 1}
    alone = load_prompts(recipe(domains=("prose",), held_out=1, **options), tokenizer)
    assert [len(getattr(alone, purpose)[1024]) for purpose in PURPOSES] == [1, 1, 1]
    assert "1 to calibrate on, 1 to adjust on, 1 to certify on where 4, 1, 6 were asked for" in caplog.text
    with pytest.raises(InputError, match="built-in prose is too short for a prompt to calibrate on of 2048 tokens"):
        load_prompts(recipe(domains=("prose",), lengths=(2048,)), tokenizer)


@pytest.mark.parametrize("end", [[], ["<eos>"]], ids=["", "eos"])
@pytest.mark.parametrize("special", [{}, {"bos_token": "<bos>"}, {"cls_token": "<sop>"}], ids=str)
@pytest.mark.parametrize("prefix", [[], ["<bos>"], ["[gMASK]", "<sop>"]], ids=str)  # the last as GLM
def test_prompts_begin_as_the_tokenizer_begins_every_text(prefix, special, end):
    """Calibration's, those of the standard library, and the evaluation's, with facts and without; an end is no part."""
    reader = letters_tokenizer(prefix, end, **special)
    served = reader("a").input_ids[: len(prefix)]
    assert reader.convert_ids_to_tokens(served) == prefix
    text = Document("text", "group", FOX * 60)
    chat = Document("text", "group", turns=(("user", text.text), ("assistant", text.text)))
    rng, length = random.Random(0), 1500
    plan = EvaluationPlan("demo", Path("unused"), (length,), needles=4)
    prompts = [
        assemble_prompt(reader, iter([document]), length, rng, needles=hidden, isolated=isolated)
        for document, hidden, isolated in product((text, chat), (False, True), (False, True))
    ]
    prompts += make_held_out_prompts(reader, length, 1, 0)
    prompts += [build(Case(task, length, 0), plan, reader, ()) for task in ("needles", "agreement")]
    starts = [prompt.ids[: len(served) + 1].tolist() for prompt in prompts]
    starts += [ids[: len(served) + 1] for ids in make_prompts_of_one_text(reader, length, 2, rng)[0]]
    assert all(start[:-1] == served and start[-1] not in reader.all_special_ids for start in starts)
    assert all(reader.convert_tokens_to_ids("<eos>") not in prompt.ids for prompt in prompts)


def test_truncation_and_padding_that_a_tokenizer_has_saved_are_not_applied(tmp_path):
    inner = letters_tokenizer([], []).backend_tokenizer
    inner.enable_truncation(64)
    inner.enable_padding(length=8192, pad_id=0, pad_token="<pad>")
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>").save_pretrained(tmp_path)
    reader = AutoTokenizer.from_pretrained(tmp_path)
    document = Document("text", "group", FOX * 50)
    assert count_tokens(reader, document) == len(document.text)
    prompt = assemble_prompt(reader, iter([document]), 2000, random.Random(0), needles=False)
    assert prompt.ids.tolist() == [reader.convert_tokens_to_ids(letter) for letter in document.text[:2000]]


def test_a_template_that_refuses_is_named():
    refusal = r"does not take a conversation \(be nice\)"
    for template, problem in (("{{ raise_exception('be nice') }}", refusal), ("nothing", "the last message out")):
        with pytest.raises(InputError, match=problem):
            load_prompts(recipe(domains=("chat",)), bos_tokenizer(template))


def test_conversations_of_users(with_bos, tmp_path):
    """A last message of the user is followed by the question for the needles; roles go on taking turns when joined."""
    entries = [
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": words(100 + index, 90)}]}
        for index in range(40)
    ]
    drawn = load_prompts(recipe(prompts=(write(tmp_path / "chats.jsonl", entries),), lengths=(512,)), with_bos)
    for prompt in drawn.calibration[512]:
        text = with_bos.decode(prompt.ids)
        assert prompt.length == 512
        assert text.count("be kind") == text.count("<|system|>") == text.count("<|user|>") == 1
        assert f"\n\n{ASK}<|endoftext|>\n<|assistant|>\n" in text
        assert text.count("# The secret code for") == 1
    chat = Document("chats", "g", turns=(("user", words(100, 400)), ("assistant", words(101, 400))))
    prompt = assemble_prompt(with_bos, iter([chat]), 700, random.Random(0), needles=False)
    assert with_bos.decode(prompt.ids).startswith("<|endoftext|><|user|>\nw100 w100")
    assert prompt.length == 700
    wordy = bos_tokenizer(CHATML.replace("}}|>", "}}|>" + " a long header" * 40))  # facts move on behind the end
    turns = tuple((("user", "assistant")[number % 2], words(100 + number, 20)) for number in range(60))
    prompt = assemble_prompt(wordy, iter([Document("chats", "g", turns=turns)]), 2048, random.Random(0), needles=True)
    check_needles(wordy, prompt, 2)


ENTRIES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.sampled_from([60, 130, 250]), st.booleans(), st.booleans()),
    max_size=12,
)  # domain, group, words, of a chat, written twice


@settings(max_examples=25, deadline=None)
@given(entries=ENTRIES, lengths=st.sampled_from([(512,), (512, 1024)]), seed=st.integers(0, 9))
def test_users_documents_are_in_one_set_with_their_groups(tokenizer, tmp_path_factory, entries, lengths, seed):
    """At every length; short ones are joined with others of their kind, and one that occurs twice is left out."""
    described = [("c", 6, 400, False, False), ("c", 7, 400, True, True), *entries]
    written = []
    for number, (domain, group, count, chat, twice) in enumerate(described, 100):
        text = words(number, count)
        content = {"messages": [{"role": "user", "content": text}]} if chat else {"text": text}
        written += [{**content, "domain": domain, "group": f"{domain}{group}"}] * (1 + twice)
    path = write(tmp_path_factory.mktemp("users") / "p.jsonl", written)
    drawn = load_prompts(recipe(prompts=(path,), lengths=lengths, check_lengths=(), seed=seed), tokenizer)
    groups = []
    for by_length in drawn.by_purpose:
        groups.append(set())
        for length, prompts in by_length.items():
            numbers = [numbers_of(tokenizer, [prompt]) for prompt in prompts]
            assert sum(map(len, numbers)) == len(set().union(*numbers))
            for prompt, of_prompt in zip(prompts, numbers, strict=True):
                assert prompt.length == length
                (kind,) = {(described[number - 100][0], described[number - 100][3]) for number in of_prompt}
                assert prompt.domain == kind[0]
                groups[-1] |= {described[number - 100][:2] for number in of_prompt}
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert all(prompts for part in (drawn.calibration, drawn.held_out) for prompts in part.values())


def test_a_split_settles_the_place_of_each_group_at_once():
    """One of many documents takes no other's place to certify on, whichever order the groups are drawn in."""
    many = [Document("notes", "folder", text=f"{number}" + "x" * 100) for number in range(20)]
    others = [Document("notes", f"file {number}", text=f"{number}" + "y" * 100) for number in range(5)]
    for seed in range(8):
        wanted = {100: {CALIBRATION: 1, HELD_OUT: 1, CERTIFY: 4}}
        shared = split([*many, *others], lambda document: len(document.text), wanted, random.Random(seed))
        groups = {document.group for document in shared[CERTIFY]}
        assert len(groups) == 4
        turns = _take_turns(make_parts(shared[CERTIFY], lambda document: len(document.text), 100))
        assert {part[0].group for part in turns[:4]} == groups


@pytest.mark.parametrize(
    ("texts", "counts"), [(2, [1, 1, 0]), (3, [2, 1, 0]), (6, [4, 2, 0]), (8, [4, 2, 2]), (20, [4, 2, 3])]
)
def test_too_few_texts_first_calibrate_and_adjust(tokenizer, tmp_path, caplog, texts, counts):
    caplog.set_level("INFO")
    entries = [{"text": words(100 + index, 250)} for index in range(texts)]
    path = write(tmp_path / "p.jsonl", entries + entries[:1])
    drawn = load_prompts(recipe(prompts=(path,), lengths=(512,)), tokenizer)
    assert f"1 of {texts + 1} documents occur before" in caplog.text
    assert [len(prompts[512]) for prompts in drawn.by_purpose] == counts
    warning = f"{counts[0]} to calibrate on, {counts[1]} to adjust on, {counts[2]} to certify on where 4, 2, 3"
    assert (warning in caplog.text) == (counts != [4, 2, 3])
    assert ("to calibrate on can say little about others" in caplog.text) == (counts[0] < 4)


def test_files_and_folders(tmp_path):
    folder = tmp_path / "manuals"
    (folder / "b").mkdir(parents=True)
    texts = {"b/two.md": "two", "b/three.txt": "three", "one.md": "one", "skipped.py": "code", "empty.txt": " \n"}
    for name, text in (texts | {"../single.txt": "six"}).items():
        (folder / name).write_text(text)
    write(folder / "lines.jsonl", [{"text": "four", "group": 7, "domain": "d"}, '"five"'])
    documents = read_documents([folder, tmp_path / "single.txt"])
    assert [document.text for document in documents] == ["three", "two", "four", "five", "one", "six"]
    assert [document.domain for document in documents] == ["manuals", "manuals", "d", "lines", "manuals", "single"]
    groups = [document.group for document in documents]
    assert groups[:3] == [str(folder / "b")] * 2 + ["7"]
    assert len(set(groups)) == 5
    shutil.rmtree(folder / "b")
    for name in ("one.md", "lines.jsonl", "empty.txt"):
        (folder / name).unlink()
    for path, content, problem in (
        (folder, None, r"manuals holds no \.jsonl, \.txt, \.md files"),
        (tmp_path / "none.jsonl", None, r"cannot be read \(No such file or directory\)"),
        (tmp_path / "binary.jsonl", b"\xff\xfe\x00", "it is not UTF-8 text"),
        (tmp_path / "empty.txt", b"", r"empty.txt is empty"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=problem):
            read_documents([path])


BAD_FILES = [
    ('{"text": "a"}\n{"text": ', r":2: this is not JSON \(Expecting value at column 10\): expected a string"),
    ('{"body": "a"}', ":1: this is {'body': 'a'}: expected a string, or an object with \"text\""),
    ('"a"\n[1]', r":2: this is \[1\]: expected a string"),
    ('[\n "a",\n {"text": "b"},\n {"text": 5}\n]', ": entry 3: this is {'text': 5}: expected a string"),
    ('[\n  "a",\n  b\n]', r":3: this is not JSON \(Expecting value at column 3\): expected a string"),
    ("[]", " holds no prompts: expected a string"),
    ('{"text": "a", "group": []}', ':1: "group" is '),
    ('{"messages": [{"role": "user"}]}', ':1: expected "messages" with a "role" and a text'),
    ('{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}', ':1: a message has "tool_calls"'),
    ('"a"\n{"text": " \\n"}', ":2: this has no text"),
    ('{"messages": [{"role": "user", "content": " "}]}', ":1: this has no text"),
    ('{"text": "a", "text": "b"}', ":1: an object has 'text' twice, and only the last would be read"),
    ('{"text": "a", "id": ' + "[" * 200000, ":1: this is nested too deep: expected a string"),
    ("7" * 5000, ":1: this is inf: expected a string"),
    ('"\\ud83d\\ude00"\n"a \\ud83d b"', r":2: the text holds half of a surrogate pair \(\\ud83d\)"),
    ('{"text": "a", "group": "\\udc00"}', r":1: the text holds half of a surrogate pair \(\\udc00\)"),
    ('{"messages": [{"role": "user", "content": "\\udfff"}]}', r":1: .* half of a surrogate pair \(\\udfff\)"),
]
COLUMNS = [("prompt", "messages"), ("text", "prompt"), ("prompt", "chosen", "rejected")]
COLUMNS += [("prompt", name) for name in UNREAD]
for columns, first in product(COLUMNS, ("a question", ["a question"])):
    names = " and ".join(f'"{name}"' for name in columns)
    entry = json.dumps({**dict.fromkeys(columns, TALK), columns[0]: first})
    BAD_FILES.append((entry, f":1: {names} have text, and one is read: join them"))


@pytest.mark.parametrize(("content", "problem"), BAD_FILES)
def test_bad_lines_are_named(tmp_path, content, problem):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=f"p.jsonl{problem}"):
        read_documents([path])


@pytest.mark.parametrize(("name", "encoding"), [("p.jsonl", "utf-8"), ("p.json", "utf-8-sig")])
def test_a_json_array_is_read_as_its_entries_and_a_byte_order_mark_as_nothing(tmp_path, name, encoding):
    """Windows writes the mark; of joined files it stands within. Columns that are empty or about a text hide none."""
    about = {"text": "two", "messages": [], "id": 7, "title": "a title", "digits": 10**600, "group": "g"}
    entries = [{"text": None, "prompt": "one", "completion": " "}, about, {"text": "", "messages": TALK}]
    for text in ("\n " + json.dumps(entries), json.dumps(entries, indent=1)):
        (tmp_path / name).write_text(text, encoding=encoding)
        documents = read_documents([tmp_path / name])
        assert [document.text for document in documents] == ["one", "two", ""]
        assert documents[2].turns[1] == ("assistant", "an answer")
        assert documents[1].group == "g"
        assert len({document.group for document in documents}) == 3
    (tmp_path / "p.txt").write_text("hello", encoding=encoding)
    (tmp_path / "joined.jsonl").write_text('"hello"\n\ufeff"hello"', encoding=encoding)
    assert {document.text for document in read_documents([tmp_path / "p.txt", tmp_path / "joined.jsonl"])} == {"hello"}


@pytest.mark.parametrize(
    ("entries", "documents", "groups", "remedy"),
    [
        ([{"text": words(1, 400)}] * 40, "1 different document", "1 group", "this is one document"),
        ([{"text": words(n, 400), "group": "g"} for n in range(3)], "3 different documents", "1 group", "one group"),
        ([{"text": words(n, 60)} for n in range(5)], "5 different documents", "5 groups", "add longer prompts"),
    ],
    ids=["equal", "grouped", "short"],
)
def test_too_few_documents_are_counted(tokenizer, tmp_path, entries, documents, groups, remedy):
    with pytest.raises(InputError) as refused:
        load_prompts(recipe(prompts=(write(tmp_path / "p.jsonl", entries),), lengths=(512,)), tokenizer)
    assert f"of 512 tokens or more ({documents} in {groups}, the longest of" in str(refused.value)
    assert remedy in str(refused.value)


def test_kinds_that_share_a_prompt_have_equal_parts(tokenizer):
    """A conversation among texts is text, and texts after a conversation are the user's."""
    a, b = (
        [Document(kind, f"{kind}{number}", words(first + number, 100)) for number in range(9)]
        for kind, first in (("a", 100), ("b", 200))
    )
    chat = Document("chat", "c", turns=(("user", words(300, 900)), ("assistant", words(301, 10))))
    for sources, kinds in (([a, b], 2), ([a, [chat]], 2), ([[chat], a], 2), ([a, [chat], b], 3)):
        documents = mix_equal_parts(tokenizer, [iter(source) for source in sources], 900)
        prompt = assemble_prompt(tokenizer, documents, 900, random.Random(0), needles=False)
        assert prompt.length == 900
        counts = Counter(word[:2] for word in tokenizer.decode(prompt.ids).split() if word[1:].isdigit())
        assert len(counts) == kinds
        assert max(counts.values()) < 1.3 * min(counts.values()), counts
    described = [("a", "x", 20), ("b", "y", 100), ("b", "z", 90)]
    documents = [Document(kind, group, words(100 + n, count)) for n, (kind, group, count) in enumerate(described)]
    prompt = assemble_prompt(tokenizer, iter(documents), 512, random.Random(0), needles=False)
    assert (prompt.domain, prompt.group) == ("b", "y")  # those of most of its text


@pytest.mark.parametrize("domain", ["code", "chinese", "json"])
def test_no_document_is_taken_that_a_prompt_has_no_token_of(tokenizer, domain):
    taken, pool = [], DocumentPool(CERTIFY, random.Random(0))
    documents = (taken.append(document) or document for document in pool.take(domain))
    prompt = assemble_prompt(tokenizer, documents, 4096, random.Random(0), needles=False)
    ids = [tokenizer(document.as_text + "\n\n", verbose=False).input_ids for document in taken]
    assert sum(map(len, ids[:-1])) < prompt.length
    assert prompt.ids[:64].tolist() == ids[0][:64]
