"""Prompts: exact lengths, three sets that share no document, domains, needles, and the user's files."""

import hashlib
import json
import logging
import random
import shutil
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from calibrate.evaluation.plan import EvaluationPlan
from calibrate.evaluation.tasks import Case, build
from calibrate.model.models import DEMO_FOLDER
from calibrate.prompts.assembly import ASK, assemble_prompt, count_tokens, mix_equal_parts
from calibrate.prompts.documents import (
    CERTIFY,
    COMPOSED,
    FOUND,
    GENERATED,
    PURPOSES,
    UNREAD,
    Document,
    DocumentPool,
    built_in,
    found_documents,
    one_text,
    read_documents,
)
from calibrate.prompts.prompts import load_prompts, make_parts, split
from calibrate.prompts.retrieval import FACTS
from calibrate.recipe import DOMAINS, Budget, Recipe
from s2o_runtime.errors import ConfigError, InputError

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


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


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory):
    """The demo model's tokenizer, made to put its first token before every text, and with a chat template."""
    plain = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    plain.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def recipe(**changes):
    settings = {"lengths": (512, 1024), "num_prompts": 4, "held_out": 2, "num_certify": 3, **changes}
    return Recipe("demo", Budget("mse", 1e-4), out=Path("unused"), **settings).validate()


def write(path, entries):
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def words(number, count):
    """A text whose words name it: about three tokens each."""
    return " ".join(f"w{number}" for _ in range(count))


def numbers_of(tokenizer, prompts):
    """Which of the texts of `words` are in prompts."""
    return {
        int(word[1:])
        for of_length in prompts.values()
        for prompt in of_length
        for word in tokenizer.decode(prompt.ids).split()
        if word[0] == "w" and word[1:].isdigit() and len(word) == 4
    }


def test_built_in_prompts_are_exact_distinct_and_reproducible(tokenizer):
    drawn = load_prompts(recipe(), tokenizer)
    for length in (512, 1024):
        prompts = drawn.calibration[length] + drawn.held_out[length] + drawn.certify[length]
        assert [prompt.length for prompt in prompts] == [length] * 9
        assert len({prompt.sha256 for prompt in prompts}) == 9
    assert sorted(drawn.calibration) == [512, 1024]
    assert sorted(drawn.held_out) == sorted(drawn.certify) == [512, 768, 1024]  # one between them is only checked
    assert drawn.record() == load_prompts(recipe(), tokenizer).record()
    assert drawn.record() != load_prompts(recipe(seed=1), tokenizer).record()


def test_domains_are_checked():
    with pytest.raises(ConfigError, match=r"domains is .*'klingon'"):
        recipe(domains=("klingon",))
    with pytest.raises(ConfigError, match="name one twice"):
        recipe(domains=("code", "code"))
    with pytest.raises(ConfigError, match="are of the built-in text, but prompts are given"):
        recipe(domains=("code",), prompts=(Path("p.jsonl"),))


def test_the_kinds_are_those_that_can_be_asked_for():
    assert sorted(DOMAINS) == sorted([*FOUND, *GENERATED, *COMPOSED])


@pytest.mark.parametrize("domain", FOUND)
def test_the_sets_of_found_text_share_no_group_and_no_document(domain):
    by_purpose = found_documents(domain)
    groups = {purpose: {document.group for document in by_purpose[purpose]} for purpose in PURPOSES}
    digests = Counter(document.digest for purpose in PURPOSES for document in by_purpose[purpose])
    assert all(groups.values())
    assert sum(map(len, groups.values())) == len(set.union(*groups.values()))
    assert set(digests.values()) == {1}


@pytest.mark.parametrize(
    ("domain", "length", "prompts", "characters"),
    [("prose", 65536, (0.5, 1, 2), 4.5), ("chinese", 65536, (0.5, 1, 2), 1.1), ("code", 131072, (0.5, 1, 8), 4)],
)
def test_found_text_suffices_as_far_as_the_docs_say(domain, length, prompts, characters):
    """For so many prompts of each set. A token has about four and a half characters of English, four of code."""
    for purpose, count in zip(PURPOSES, prompts, strict=True):
        total = sum(len(document.text) for document in found_documents(domain)[purpose])
        assert total > count * length * characters, purpose


def passages(text, length=100):
    return {text[start : start + length] for start in range(0, len(text) - length, length // 2)}


@pytest.mark.parametrize("domain", [*GENERATED, *COMPOSED])
def test_generated_text_repeats_no_passage_and_follows_from_its_seed(domain):
    """No text holds 150 characters of one before it, but the licences at the head of code files that it may quote."""
    supply, again = (DocumentPool(CERTIFY, random.Random(5)) for _ in range(2))
    documents = [document for _ in range(4) for document in islice(supply.take(domain), 3)]
    assert documents == [document for _ in range(4) for document in islice(again.take(domain), 3)]
    assert documents[0] != next(DocumentPool(CERTIFY, random.Random(6)).take(domain))
    assert len({document.group for document in documents}) == 4
    assert all(document.domain == domain and bool(document.turns) == (domain == "chat") for document in documents)
    texts = [document.as_text for document in documents]
    for number, text in enumerate(texts):
        assert len(text) > 50
        others = "\0".join(texts[:number])
        repeated = [passage for passage in passages(text) if passage in others and "---" not in passage]
        assert len(repeated) <= (len(text) // 1000 if domain in COMPOSED else 0), (domain, repeated)


def test_a_seed_writes_the_same_text_for_ever():
    """Profiles name their prompts by hashes, so words and templates may neither change nor change places."""
    writers = {**GENERATED, "chat": partial(COMPOSED["chat"], excerpt=lambda most: f"{most} lines\n" * 3)}
    texts = {name: [write_text(random.Random(seed)) for seed in range(3)] for name, write_text in writers.items()}
    facts = {name: [write_facts(16, random.Random(seed)) for seed in range(3)] for name, write_facts in FACTS.items()}
    hashes = {name: hashlib.sha256(repr(values).encode()).hexdigest()[:12] for name, values in (texts | facts).items()}
    assert hashes == {
        "json": "cb00c5d8b744",
        "tables": "335845b56a91",
        "logs": "676cc00a247b",
        "encoded": "59baec3f3ef4",
        "chat": "926e4ab5baa5",
        "needles": "39e2b8a82c9d",
        "alike": "70f5ba099474",
        "variables": "190ef2c9ce96",
        "counting": "ac901094a8d6",
        "questions": "15a2965dc3ae",
    }


def test_a_conversation_has_a_system_prompt_and_turns():
    turns = next(DocumentPool(CERTIFY, random.Random(0)).take("chat")).turns
    assert [role for role, _ in turns] == ["system", *["user", "assistant"] * (len(turns) // 2)]
    assert all(content.strip() for _, content in turns)


def test_found_text_is_handed_out_once_whatever_takes_pieces_of_it(monkeypatch):
    few = [
        Document("prose", f"g{group}", "§".join(f"{group}{part}{n}" for n in range(2000)))
        for group in range(3)
        for part in "xy"
    ]
    documents = {"prose": few, "code": [], "chinese": []}
    monkeypatch.setattr(
        "calibrate.prompts.documents.found_documents", lambda domain: dict.fromkeys(PURPOSES, documents[domain])
    )
    supply = DocumentPool(CERTIFY, random.Random(1))
    begun = [next(supply.take("prose")) for _ in range(3)]
    assert len({document.group for document in begun}) == 3  # a prompt begins with a group that none has begun
    handed_out = [document.text for document in begun]
    handed_out += [document.text for document in islice(supply.take("mixed"), 300)]
    assert not supply.used_up  # though the pieces took it all
    assert not list(supply.take("prose"))
    assert supply.used_up == {"prose"}
    words_of = Counter(word for text in handed_out for word in text.split("§"))
    assert words_of["0x1000"] == words_of["2y7"] == 1


def test_a_kind_that_runs_out_gives_its_place_to_others(tokenizer, monkeypatch, caplog):
    few = {
        purpose: [Document("prose", f"{purpose}{number}", words(start + number, 140)) for number in range(2)]
        for start, purpose in zip((100, 200, 300), PURPOSES, strict=True)
    }
    monkeypatch.setattr("calibrate.prompts.documents.found_documents", lambda domain: few)
    settings = {"lengths": (1024,), "check_lengths": (), "num_certify": 6}
    drawn = load_prompts(recipe(domains=("prose", "logs"), **settings), tokenizer)
    assert "the built-in text of prose at 1024 is used up" in caplog.text
    assert [prompt.domain for prompt in drawn.certify[1024]] == ["prose", "logs"] + ["logs"] * 4
    assert len({prompt.group for prompt in drawn.certify[1024]}) == 6
    assert numbers_of(tokenizer, drawn.calibration) == {100, 101}
    assert numbers_of(tokenizer, drawn.held_out) == {200, 201}
    assert numbers_of(tokenizer, drawn.certify) == {300, 301}
    alone = load_prompts(recipe(domains=("prose",), held_out=1, **settings), tokenizer)
    assert [len(getattr(alone, purpose)[1024]) for purpose in PURPOSES] == [1, 1, 1]
    assert "1 to calibrate on, 1 to adjust on, 1 to certify on where 4, 1, 6 were asked for" in caplog.text
    with pytest.raises(
        InputError, match="built-in prose is too short for a prompt to calibrate on of 2048 tokens: name"
    ):
        load_prompts(recipe(domains=("prose",), lengths=(2048,)), tokenizer)


def test_every_prompt_asks_for_the_needles_that_it_hides(tokenizer, with_bos):
    for reader in (tokenizer, with_bos):
        for prompt in load_prompts(recipe(lengths=(2048,), num_prompts=10, num_certify=0), reader).calibration[2048]:
            text = reader.decode(prompt.ids)
            asked = [line for line in text.splitlines() if line.startswith("# What is the secret code for")]
            assert len(asked) == 2
            isolated = text.rstrip().rpartition("\n")[2] != asked[-1]
            assert isolated == (prompt.domain == "questions")
            for line in asked:
                word, code = line.split("?")[0].split()[-1], line.split()[-1]
                assert text.count(f"# The secret code for {word} is {code}") == 1, prompt.domain
            assert all(first > 1024 for first, _ in prompt.answers)
            answered = [reader.decode(prompt.ids[first:end]).strip() for first, end in prompt.answers]
            assert answered == [line.split()[-1].rstrip(".") for line in asked]


def test_the_first_token_is_the_tokenizers_own_and_not_doubled_by_a_chat_template(tokenizer, with_bos, monkeypatch):
    drawn = load_prompts(recipe(lengths=(512,)), with_bos)
    for prompt in drawn.calibration[512]:
        assert prompt.ids[0] == with_bos.bos_token_id, prompt.domain
        assert prompt.ids[1] != with_bos.bos_token_id, prompt.domain
    assert all(prompt.ids[0] != 0 for prompt in load_prompts(recipe(lengths=(512,)), tokenizer).calibration[512])
    monkeypatch.setattr(with_bos, "chat_template", None)
    chat = load_prompts(recipe(lengths=(512,), domains=("chat",)), with_bos).calibration[512][0]
    assert with_bos.decode(chat.ids).startswith("<|endoftext|>System: ")


@pytest.mark.parametrize("end", [[], ["<eos>"]], ids=["", "eos"])
@pytest.mark.parametrize(
    ("prefix", "special"),
    [
        ([], {}),
        (["<bos>"], {"bos_token": "<bos>"}),
        ([], {"bos_token": "<bos>"}),
        (["[gMASK]", "<sop>"], {}),  # GLM
        (["<sop>"], {"cls_token": "<sop>"}),
        (["<bos>", "<sop>"], {"bos_token": "<bos>"}),
    ],
)
def test_prompts_begin_as_the_tokenizer_begins_every_text(prefix, special, end):
    """Calibration's, those of the standard library, and the evaluation's, with facts and without; an end is no part."""
    reader = letters_tokenizer(prefix, end, **special)
    served = reader("a").input_ids[: len(prefix)]
    assert reader.convert_ids_to_tokens(served) == prefix
    text = Document("text", "group", "The quick brown fox jumps over the lazy dog. " * 60)
    chat = Document("text", "group", turns=(("user", text.text), ("assistant", text.text)))
    rng, length = random.Random(0), 1500
    plan = EvaluationPlan("demo", Path("unused"), (length,), needles=4)
    prompts = [
        *(assemble_prompt(reader, iter([text]), length, rng, needles=hidden) for hidden in (False, True)),
        *(assemble_prompt(reader, iter([chat]), length, rng, needles=hidden) for hidden in (False, True)),
        assemble_prompt(reader, iter([text]), length, rng, needles=True, isolated=True),
        *built_in(reader, length, 1, 0),
        *(build(Case((task,), length, 0), plan, reader, ())[0] for task in ("needles", "perplexity")),
    ]
    starts = [prompt.ids[: len(served) + 1].tolist() for prompt in prompts]
    starts += [ids[: len(served) + 1] for ids in one_text(reader, length, 2, rng)[0]]
    assert all(start[:-1] == served and start[-1] not in reader.all_special_ids for start in starts)
    assert all(reader.convert_tokens_to_ids("<eos>") not in prompt.ids for prompt in prompts)


@pytest.mark.parametrize("saved", ["truncation", "padding", "both"])
def test_truncation_and_padding_that_a_tokenizer_has_saved_are_not_applied(saved, tmp_path):
    inner = letters_tokenizer([], []).backend_tokenizer
    if saved != "padding":
        inner.enable_truncation(64)
    if saved != "truncation":
        inner.enable_padding(length=8192, pad_id=0, pad_token="<pad>")
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>").save_pretrained(tmp_path)
    reader = AutoTokenizer.from_pretrained(tmp_path)
    document = Document("text", "group", "The quick brown fox jumps over the lazy dog. " * 50)
    assert count_tokens(reader, document) == len(document.text)
    prompt = assemble_prompt(reader, iter([document]), 2000, random.Random(0), needles=False)
    assert prompt.ids.tolist() == [reader.convert_tokens_to_ids(letter) for letter in document.text[:2000]]


def test_conversations_are_laid_out_by_the_chat_template(with_bos):
    chats = load_prompts(recipe(lengths=(1024,), domains=("chat",)), with_bos).calibration[1024]
    text = with_bos.decode(chats[0].ids)
    assert text.startswith("<|endoftext|><|system|>\n")
    before, asked, after = text.partition(f"<|endoftext|>\n<|user|>\n{ASK}<|endoftext|>\n<|assistant|>\n")
    assert asked
    assert "# The secret code for" in before
    assert after.startswith("\n# What is the secret code for")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('be nice') }}", r"does not take a conversation \(be nice\): use text"),
        ("nothing at all", "leaves the last message out"),
    ],
)
def test_a_template_that_refuses_is_named(template, said, with_bos, monkeypatch):
    monkeypatch.setattr(with_bos, "chat_template", template)
    with pytest.raises(InputError, match=said):
        load_prompts(recipe(domains=("chat",)), with_bos)


def test_few_prompts_to_calibrate_on_are_a_warning(tokenizer, caplog):
    load_prompts(recipe(lengths=(512,)), tokenizer)
    assert not caplog.text
    load_prompts(recipe(lengths=(512,), num_prompts=3), tokenizer)
    assert "3 prompts to calibrate on can say little about others: use 4 or more" in caplog.text


def test_groups_stay_together_and_duplicates_are_dropped(tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    entries = [
        {"text": words(100 + 10 * group + index, 250), "group": f"g{group}"} for group in range(9) for index in range(2)
    ]
    path = write(tmp_path / "p.jsonl", entries + entries[:5])
    drawn = load_prompts(recipe(prompts=(path,), lengths=(512,)), tokenizer)
    assert "5 of 23 documents occur before" in caplog.text
    sets = [numbers_of(tokenizer, prompts) for prompts in (drawn.calibration, drawn.held_out, drawn.certify)]
    groups = [{number // 10 for number in numbers} for numbers in sets]
    assert [len(numbers) for numbers in sets] == [4, 2, 3]
    assert sum(map(len, groups)) == len(set.union(*groups))


@pytest.mark.parametrize(
    ("texts", "counts"), [(2, [1, 1, 0]), (3, [2, 1, 0]), (6, [4, 2, 0]), (8, [4, 2, 2]), (20, [4, 2, 3])]
)
def test_too_few_texts_first_calibrate_and_adjust(tokenizer, tmp_path, caplog, texts, counts):
    path = write(tmp_path / "p.jsonl", [{"text": words(100 + index, 250)} for index in range(texts)])
    drawn = load_prompts(recipe(prompts=(path,), lengths=(512,)), tokenizer)
    assert [len(prompts[512]) for prompts in (drawn.calibration, drawn.held_out, drawn.certify)] == counts
    said = f"{counts[0]} to calibrate on, {counts[1]} to adjust on, {counts[2]} to certify on where 4, 2, 3"
    assert (said in caplog.text) == (counts != [4, 2, 3])


def test_short_texts_of_one_domain_are_joined(tokenizer, tmp_path):
    entries = [{"text": words(100 + index, 60), "domain": "ab"[index % 2]} for index in range(90)]
    drawn = load_prompts(recipe(prompts=(write(tmp_path / "p.jsonl", entries),), lengths=(512,)), tokenizer)
    assert [prompt.domain for prompt in drawn.calibration[512]] in (["a", "b"] * 2, ["b", "a"] * 2)
    for prompt in drawn.calibration[512] + drawn.held_out[512] + drawn.certify[512]:
        numbers = numbers_of(tokenizer, {512: [prompt]})
        assert len(numbers) > 1
        assert len({number % 2 for number in numbers}) == 1
        assert prompt.length == 512


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
    one = Document("chats", "g", turns=(("user", words(100, 400)), ("assistant", words(101, 400))))
    prompt = assemble_prompt(with_bos, iter([one]), 700, random.Random(0), needles=False)
    assert with_bos.decode(prompt.ids).startswith("<|endoftext|><|user|>\nw100 w100")
    assert prompt.length == 700


def test_files_and_folders(tmp_path):
    folder = tmp_path / "manuals"
    (folder / "b").mkdir(parents=True)
    texts = {"b/two.md": "two", "b/three.txt": "three", "one.md": "one", "skipped.py": "code", "empty.txt": " \n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    write(folder / "lines.jsonl", [{"text": "four", "group": 7, "domain": "d"}, '"five"'])
    single = tmp_path / "single.txt"
    single.write_text("six")
    documents = read_documents([folder, single])
    assert [document.text for document in documents] == ["three", "two", "four", "five", "one", "six"]
    assert [document.domain for document in documents] == ["manuals", "manuals", "d", "lines", "manuals", "single"]
    three, two, four, five, one, six = (document.group for document in documents)
    assert three == two == str(folder / "b")
    assert four == "7"
    assert len({three, four, five, one, six}) == 5
    shutil.rmtree(folder / "b")
    for name in ("one.md", "lines.jsonl", "empty.txt"):
        (folder / name).unlink()
    with pytest.raises(InputError, match=r"manuals holds no \.jsonl, \.txt, \.md files"):
        read_documents([folder])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (['{"text": "a"}', '{"text": '], r"p.jsonl:2: this is not JSON \(Expecting value at column 10\): expected a"),
        (['{"text": "a"}', "bare"], r"p.jsonl:2: this is not JSON \(Expecting value at column 1\): expected a string"),
        (['{"body": "a"}'], "p.jsonl:1: this is {'body': 'a'}: expected a string, or an object with \"text\""),
        (['"a"', "[1]"], r"p.jsonl:2: this is \[1\]: expected a string"),
        (
            ["[", '  "a",', '  {"text": "b"},', '  {"text": 5}', "]"],
            "p.jsonl: entry 3: this is {'text': 5}: expected a",
        ),
        (["[", '  "a",', "  b", "]"], r"p.jsonl:3: this is not JSON \(Expecting value at column 3\): expected a"),
        (["[]"], "holds no prompts: expected a string"),
        (['{"text": "a", "group": []}'], 'p.jsonl:1: "group" is '),
        (['{"messages": [{"role": "user"}]}'], 'p.jsonl:1: expected "messages" with a "role" and a text'),
        (
            [{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}],
            'a message has "tool_calls", which is',
        ),
        ([""], "holds no prompts"),
        (['"a"', '""'], "p.jsonl:2: this has no text: leave it out"),
        (['"a"', {"text": " \n"}], "p.jsonl:2: this has no text: leave it out"),
        ([{"text": None, "prompt": ""}], "p.jsonl:1: this has no text: leave it out"),
        ([{"messages": [{"role": "user", "content": " "}]}], "p.jsonl:1: this has no text: leave it out"),
        (['{"text": "a", "text": "b"}'], "p.jsonl:1: an object has 'text' twice, and only the last would be read"),
        (['{"text": "a", "id": ' + "[" * 200000], "p.jsonl:1: this is nested too deep: expected a string"),
        (["7" * 5000], "p.jsonl:1: this is inf: expected a string"),
        (
            ['"\\ud83d\\ude00"', '"a \\ud83d b"'],
            r"p.jsonl:2: the text holds half of a surrogate pair \(\\ud83d\): write",
        ),
        (['{"text": "a", "group": "\\udc00"}'], r"half of a surrogate pair \(\\udc00\)"),
        (['{"messages": [{"role": "user", "content": "\\udfff"}]}'], r"half of a surrogate pair \(\\udfff\)"),
        (['{"messages": [{"role": "\\ud800", "content": "a"}]}'], r"half of a surrogate pair \(\\ud800\)"),
    ],
)
def test_bad_lines_are_named(tmp_path, entries, message):
    with pytest.raises(InputError, match=message):
        read_documents([write(tmp_path / "p.jsonl", entries)])


TALK = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]


@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        ({"prompt": "a question", "messages": TALK}, ("prompt", "messages")),
        ({"text": "a text", "prompt": "a question"}, ("text", "prompt")),
        ({"text": ["a text"], "prompt": "a question"}, ("text", "prompt")),
        *(({"prompt": "a question", name: "an answer"}, ("prompt", name)) for name in UNREAD),
        ({"prompt": "a question", "chosen": TALK, "rejected": TALK}, ("prompt", "chosen", "rejected")),
    ],
)
def test_text_in_several_columns_is_refused_with_their_names(tmp_path, entry, columns):
    names = " and ".join(f'"{name}"' for name in columns)
    with pytest.raises(InputError, match=f"p.jsonl:2: {names} have text, and one is read: join them"):
        read_documents([write(tmp_path / "p.jsonl", ['"a"', entry])])


@pytest.mark.parametrize(
    "entry",
    [
        {"text": "", "messages": TALK},
        {"text": None, "prompt": "an answer", "completion": " "},
        {"text": "an answer", "messages": [], "id": 7, "title": "a title", "digits": 10**600},
    ],
)
def test_empty_columns_and_columns_about_a_text_do_not_hide_it(tmp_path, entry):
    (document,) = read_documents([write(tmp_path / "p.jsonl", [entry])])
    assert "an answer" in document.as_text


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_read_as_its_entries(tmp_path, name, indent):
    entries = ["one", {"text": "two", "group": "g"}, {"messages": TALK}]
    (tmp_path / name).write_text("\n " + json.dumps(entries, indent=indent))
    documents = read_documents([tmp_path / name])
    assert [document.text for document in documents] == ["one", "two", ""]
    assert documents[2].turns[1] == ("assistant", "an answer")
    assert documents[1].group == "g"
    assert len({document.group for document in documents}) == 3


@pytest.mark.parametrize("name", ["p.txt", "p.md", "p.jsonl", "p.json"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name):
    """Windows writes it; of joined files it stands within."""
    line = {"p.txt": "hello", "p.md": "hello", "p.jsonl": '"hello"\n\ufeff"hello"', "p.json": '["hello"]'}[name]
    (tmp_path / name).write_text(line, encoding="utf-8-sig")
    assert {document.text for document in read_documents([tmp_path / name])} == {"hello"}


def test_one_long_document_is_said_to_be_one(tokenizer, tmp_path):
    """Also if it occurs several times; documents of one group are no better."""
    long = words(1, 400)
    (tmp_path / "long.txt").write_text(long)
    equal = write(tmp_path / "equal.jsonl", [{"text": long}] * 40)
    grouped = write(tmp_path / "group.jsonl", [{"text": words(index, 400), "group": "g"} for index in range(3)])
    for path, documents, unit in (
        (tmp_path / "long.txt", "1 different document", "document"),
        (equal, "1 different document", "document"),
        (grouped, "3 different documents", "group"),
    ):
        with pytest.raises(InputError) as refused:
            load_prompts(recipe(prompts=(path,), lengths=(512,)), tokenizer)
        message = str(refused.value)
        assert f"has 0 prompts to adjust on of 512 tokens or more ({documents} in 1 group, the longest of" in message
        assert f"this is one {unit}, and no two sets share one, so give at least two {unit}s of 512 tokens" in message


def test_unreadable_and_too_short_files(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        read_documents([tmp_path / "none.jsonl"])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is not UTF-8 text"):
        read_documents([tmp_path / "binary.jsonl"])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"empty.txt is empty"):
        read_documents([tmp_path / "empty.txt"])
    path = write(tmp_path / "short.jsonl", [{"text": f"{index} " + "word " * 100} for index in range(5)])
    with pytest.raises(
        InputError,
        match=r"0 prompts to calibrate on of 512 tokens or more \(5 different documents in 5 groups, the longest of ",
    ):
        load_prompts(recipe(prompts=(path,)), tokenizer)


def test_a_split_says_where_each_group_is_at_once():
    """Sizes are given: at 100 tokens long groups come first, at 50 what is free is added to where it lacks."""
    documents = [Document("d", f"g{index}", f"{index}") for index in range(8)]
    sizes = {document: 120 if index < 3 else 60 for index, document in enumerate(documents)}
    wanted = {100: {"calibration": 2, "held_out": 1, "certify": 1}, 50: {"calibration": 2, "held_out": 1, "certify": 2}}
    shared = split(documents, sizes.__getitem__, wanted, random.Random(0))
    assert {len(shared["calibration"]), len(shared["held_out"])} == {2, 1}
    assert {sizes[document] for document in shared["calibration"] + shared["held_out"]} == {120}
    assert [sizes[document] for document in shared["certify"]] == [60, 60]  # joined at 100, two prompts at 50
    assert len(list(make_parts(shared["certify"], sizes.__getitem__, 100))) == 1
    assert len(list(make_parts(shared["certify"], sizes.__getitem__, 50))) == 2


def test_prompts_take_the_kinds_in_turns_and_few_have_several_each(tokenizer):
    drawn = load_prompts(recipe(lengths=(512,), num_prompts=5, num_certify=11), tokenizer)
    assert [prompt.domain for prompt in drawn.certify[512]] == [*DOMAINS, "code"]
    assert [prompt.domain for prompt in drawn.calibration[512]] == [
        f"{one}+{other}" for one, other in zip(DOMAINS[:5], DOMAINS[5:], strict=True)
    ]
    assert sorted("+".join(prompt.domain for prompt in drawn.held_out[512]).split("+")) == sorted(DOMAINS)
    texts = {prompt.domain: tokenizer.decode(prompt.ids) for prompt in drawn.certify[512]}
    assert texts["code"].startswith("# ")
    assert texts["chat"].startswith("System: ")
    assert sum("一" <= character <= "鿿" for character in texts["chinese"]) > 100
    assert not any("一" <= character <= "鿿" for text in (texts["json"], texts["prose"]) for character in text)

    chosen = load_prompts(recipe(domains=("prose", "code"), lengths=(512,)), tokenizer)
    assert [prompt.domain for prompt in chosen.calibration[512]] == ["prose", "code"] * 2


def test_kinds_that_share_a_prompt_have_equal_parts(tokenizer):
    """A conversation among texts is text, and texts after a conversation are the user's."""
    a, b = (
        [Document(kind, f"{kind}{number}", words(first + number, 100)) for number in range(9)]
        for kind, first in (("a", 100), ("b", 200))
    )
    chat = Document("chat", "c", turns=(("user", words(300, 900)), ("assistant", words(301, 10))))
    for parts_of, kinds in (([a, b], 2), ([a, [chat]], 2), ([[chat], a], 2), ([a, [chat], b], 3)):
        documents = mix_equal_parts(tokenizer, [iter(part) for part in parts_of], 900)
        prompt = assemble_prompt(tokenizer, documents, 900, random.Random(0), needles=False)
        assert prompt.length == 900
        counts = Counter(word[:2] for word in tokenizer.decode(prompt.ids).split() if word[1:].isdigit())
        assert len(counts) == kinds
        assert max(counts.values()) < 1.3 * min(counts.values()), counts


def test_a_prompt_is_of_the_kind_and_group_of_most_of_its_text(tokenizer):
    documents = [
        Document("a", "x", words(100, 20)),
        Document("b", "y", words(101, 100)),
        Document("b", "z", words(102, 90)),
    ]
    prompt = assemble_prompt(tokenizer, iter(documents), 512, random.Random(0), needles=False)
    assert (prompt.domain, prompt.group) == ("b", "y")


@pytest.mark.parametrize("domain", ["code", "chinese", "json"])
def test_no_document_is_drawn_that_a_prompt_has_no_token_of(tokenizer, domain):
    drawn = []

    def documents():
        for document in DocumentPool(CERTIFY, random.Random(0)).take(domain):
            drawn.append(document)
            yield document

    prompt = assemble_prompt(tokenizer, documents(), 4096, random.Random(0), needles=False)
    ids = [tokenizer(document.as_text + "\n\n", verbose=False).input_ids for document in drawn]
    assert sum(map(len, ids[:-1])) < prompt.length
    assert prompt.ids[:64].tolist() == ids[0][:64]
