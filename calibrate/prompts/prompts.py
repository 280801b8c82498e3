"""The prompts of a calibration: one of an exact length from documents, and three sets that share no text."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain, zip_longest
from random import Random
from typing import Any

from calibrate.prompts.documents import (
    CALIBRATION,
    CERTIFY,
    FOUND,
    HELD_OUT,
    PURPOSES,
    SEPARATOR,
    Document,
    DocumentPool,
    TooShortError,
    Turn,
    drop_duplicates,
    hide_in_documents,
    join_documents,
    read_documents,
    read_found_documents,
)
from calibrate.prompts.prompt import Origins, Prompt, PromptSet
from calibrate.prompts.retrieval import (
    Retrieval,
    count_needles,
    encode,
    encode_all,
    get_start_tokens,
    hide_and_ask_within,
    make_needles,
    spread,
)
from calibrate.recipe import Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.fields import group_by_key, pluralize

ASK = "List the secret codes that are hidden in the text above."
TODAY = "26 Jul 2024"  # for chat templates that state the date: prompts do not depend on the day
WORDS = {CALIBRATION: "to calibrate on", HELD_OUT: "to adjust on", CERTIFY: "to certify on"}

Wanted = Mapping[int, Mapping[str, int]]  # number of prompts of each purpose, by length in tokens

log = logging.getLogger("calibrate")


def split(
    documents: Sequence[Document], size: Callable[[Document], int], wanted: Wanted, rng: Random
) -> dict[str, list[Document]]:
    """Share documents out so that the prompts of every length are there, as far as the documents go.

    The longest length is served first, and a group stays where it was put, so it has one purpose at all lengths. At
    each length one prompt to calibrate and one to adjust on come first, then the others of these two, then those to
    certify on, each of another group if there are enough, because a certificate counts groups. Groups with a document
    as long as the prompt go before those that must be joined. size: returns a document's tokens. rng: draws the
    order of the groups.
    """
    groups = group_by_key((document.group, document) for document in documents)
    free = rng.sample(sorted(groups), len(groups))
    shared: dict[str, list[Document]] = {purpose: [] for purpose in PURPOSES}
    for length in sorted(wanted, reverse=True):
        tallies = {purpose: _Tally(length, size, shared[purpose]) for purpose in PURPOSES}
        for long_only in (True, False):
            candidates = [
                name for name in free if not long_only or any(size(document) >= length for document in groups[name])
            ]
            while candidates and (purpose := _choose_purpose(tallies, wanted[length])) is not None:
                by_domain = tallies[purpose].by_domain
                # the first group of the domain that has the fewest prompts
                name = min(candidates, key=lambda name: by_domain[groups[name][0].domain])
                candidates.remove(name)
                free.remove(name)
                shared[purpose] += groups[name]
                tallies[purpose].add(groups[name])
    return shared


def make_parts(documents: Iterable[Document], size: Callable[[Document], int], length: int) -> list[list[Document]]:
    """Return the documents of each prompt: one of at least `length` tokens, or several of one kind that reach it."""
    return _Tally(length, size, ()).add(documents)


def _choose_purpose(tallies: Mapping[str, _Tally], wanted: Mapping[str, int]) -> str | None:
    """Return the purpose that gets the next group; None if all have what they want."""
    counts = {purpose: tallies[purpose].by_domain.total() for purpose in (CALIBRATION, HELD_OUT)}
    if lacking := [purpose for purpose, count in counts.items() if count < wanted[purpose]]:
        return min(lacking, key=lambda purpose: (counts[purpose] > 0, counts[purpose] / wanted[purpose]))
    return CERTIFY if len(tallies[CERTIFY].groups) < wanted[CERTIFY] else None


class _Tally:
    """The prompts of one length that documents make.

    by_domain: number of prompts of each domain. groups: those that a prompt begins with.
    """

    def __init__(self, length: int, size: Callable[[Document], int], documents: Iterable[Document]) -> None:
        self._length, self._size = length, size
        # short documents are joined within one domain, and conversations apart from plain text
        self._unfinished: dict[tuple[str, bool], list[Document]] = defaultdict(list)
        self._tokens: Counter[tuple[str, bool]] = Counter()
        self.by_domain: Counter[str] = Counter()
        self.groups: set[str] = set()
        self.add(documents)

    def add(self, documents: Iterable[Document]) -> list[list[Document]]:
        """Add documents, and return the prompts that they complete."""
        prompts = []
        for document in documents:
            kind, tokens = (document.domain, bool(document.turns)), self._size(document)
            if tokens >= self._length:
                prompts.append([document])
                continue
            self._unfinished[kind].append(document)
            self._tokens[kind] += tokens
            if self._tokens[kind] >= self._length:
                prompts.append(self._unfinished.pop(kind))
                del self._tokens[kind]
        self.by_domain.update(prompt[0].domain for prompt in prompts)
        self.groups.update(prompt[0].group for prompt in prompts)
        return prompts


def load_prompts(recipe: Recipe, tokenizer: Any) -> PromptSet:
    """Make the recipe's prompts from the user's documents, or the built-in ones.

    The same recipe and tokenizer give the same prompts, as long as the documents are the same: the built-in code is the
    Python standard library's. Raises InputError if a prompt file is bad, or the documents are too few or too short.
    """
    wanted = {
        length: {
            CALIBRATION: recipe.num_prompts if length in recipe.lengths else 0,
            HELD_OUT: recipe.held_out,
            CERTIFY: recipe.num_certify,
        }
        for length in (*recipe.lengths, *recipe.checked_lengths)
    }
    prompts = (_cut_files if recipe.prompts is not None else _cut_built_in)(recipe, tokenizer, wanted)
    for length, numbers in wanted.items():
        counts = {purpose: len(getattr(prompts, purpose).get(length, ())) for purpose in PURPOSES}
        if counts != numbers:
            there = ", ".join(f"{counts[purpose]} {WORDS[purpose]}" for purpose in PURPOSES)
            asked = ", ".join(map(str, numbers.values()))
            message = "%s has prompts of %d tokens for %s where %s were asked for: add documents"
            log.warning(message, recipe.prompt_source, length, there, asked)
    fewest = min(map(len, prompts.calibration.values()))
    if fewest < 4:
        message = "%s to calibrate on can say little about others: use 4 or more (--num-prompts)"
        log.warning(message, pluralize(fewest, "prompt"))
    return prompts


def _cut_built_in(recipe: Recipe, tokenizer: Any, wanted: Wanted) -> PromptSet:
    """Cut prompts of the kinds in turns; fewer prompts than kinds have several each, in equal parts.

    Where a kind's text is used up the others follow it, and a prompt is of the kind that most of it is. If no other was
    asked for, there are fewer prompts.
    """
    kinds = recipe.used_domains
    used_up: set[str] = set()
    for kind in FOUND:
        read_found_documents(kind)  # read once, not by each thread

    def cut(purpose: str, length: int) -> list[Prompt]:
        rng = Random(f"{recipe.seed}/{length}/{purpose}")
        pool = DocumentPool(purpose, rng)
        count = wanted[length][purpose]
        prompts: dict[int, Prompt] = {}
        for number in sorted(range(count), key=lambda number: number % len(kinds)):  # what is composed takes the rest
            own = kinds[number::count] if count < len(kinds) else (kinds[number % len(kinds)],)
            order = [*rng.sample(own, len(own)), *(kind for kind in kinds if kind not in own)]
            taken = [pool.take(kind) for kind in order]
            parts = [*taken[: len(own) - 1], chain.from_iterable(taken[len(own) - 1 :])]
            documents = mix_equal_parts(tokenizer, parts, length)
            options = {"needles": recipe.hide_needles, "isolated": "questions" in own}
            try:
                prompt = assemble_prompt(tokenizer, documents, length, rng, **options)
            except TooShortError:
                break
            prompts[number] = replace(prompt, domain="+".join(own)) if len(own) > 1 else prompt
        if count and not prompts and purpose != CERTIFY:
            raise InputError(
                f"{recipe.prompt_source} is too short for a prompt {WORDS[purpose]} of {length} tokens: "
                "name more kinds, such as json, or use a shorter length"
            )
        used_up.update(f"{kind} at {length}" for kind in pool.used_up.intersection(kinds))
        return [prompts[number] for number in sorted(prompts)]

    prompts = _cut_all(wanted, cut)
    if used_up:
        message = "the built-in text of %s is used up: nothing is repeated, other kinds take its place"
        log.warning(message, ", ".join(sorted(used_up)))
    return prompts


def _cut_files(recipe: Recipe, tokenizer: Any, wanted: Wanted) -> PromptSet:
    """Cut prompts of the user's documents."""
    size = cache(partial(count_tokens, tokenizer))
    read = read_documents(recipe.prompts or ())
    documents = drop_duplicates(read)
    if len(documents) < len(read):
        log.info("%d of %d documents occur before and are left out", len(read) - len(documents), len(read))
    shared = split(documents, size, wanted, Random(recipe.seed))
    truncated: set[Document] = set()

    def cut(purpose: str, length: int) -> list[Prompt]:
        rng = Random(f"{recipe.seed}/{length}/{purpose}")
        chosen = _take_turns(make_parts(shared[purpose], size, length))[: wanted[length][purpose]]
        if wanted[length][purpose] and not chosen and purpose != CERTIFY:
            longest = max(map(size, documents))
            raise InputError(_describe_shortage(recipe.prompt_source, documents, longest, purpose, length))
        truncated.update(part[-1] for part in chosen if sum(map(size, part)) > length)
        return [assemble_prompt(tokenizer, iter(part), length, rng, needles=recipe.hide_needles) for part in chosen]

    prompts = _cut_all(wanted, cut)
    if truncated:
        log.info("%d documents are longer than their prompts: what is beyond the length is left out", len(truncated))
    return prompts


def _describe_shortage(source: str, documents: Sequence[Document], longest: int, purpose: str, length: int) -> str:
    """Say that files give no prompt for a purpose at a length in tokens. longest: tokens of the longest document."""
    groups, count = len({document.group for document in documents}), pluralize(len(documents), "different document")
    remedy = "at least 1 must be, add longer prompts of other groups or use a shorter length"
    if groups == 1:
        unit = "document" if len(documents) == 1 else "group"
        remedy = (
            f"this is one {unit}, and no two sets share one, so give at least two {unit}s of {length} tokens or more, "
            "or split the text into lines of a .jsonl file"
        )
    return (
        f"{source} has 0 prompts {WORDS[purpose]} of {length} tokens or more ({count} in {pluralize(groups, 'group')}, "
        f"the longest of {longest} tokens): {remedy}"
    )


def _take_turns(chosen: Iterable[list[Document]]) -> list[list[Document]]:
    """Return the parts with their domains in turns, and in each domain its groups: the first few are of many groups."""
    domains = group_by_key((part[0].domain, part) for part in chosen).values()
    groups = [group_by_key((part[0].group, part) for part in parts).values() for parts in domains]
    return _merge_in_turns([_merge_in_turns([*parts]) for parts in groups])


def _merge_in_turns(lists: Sequence[list[list[Document]]]) -> list[list[Document]]:
    return [part for row in zip_longest(*lists) for part in row if part is not None]


def _cut_all(wanted: Wanted, cut: Callable[[str, int], list[Prompt]]) -> PromptSet:
    """Cut the prompts of every purpose and length, in threads: tokenizers leave Python's lock."""
    with ThreadPoolExecutor() as threads:
        pending = {
            (purpose, length): threads.submit(cut, purpose, length)
            for length in sorted(wanted, reverse=True)  # the longest take longest
            for purpose in reversed(PURPOSES)
            if wanted[length][purpose] or purpose == HELD_OUT
        }
        calibration, held_out, certify = (
            {length: pending[purpose, length].result() for length in wanted if (purpose, length) in pending}
            for purpose in PURPOSES
        )
    return PromptSet(calibration=calibration, held_out=held_out, certify=certify)


def assemble_prompt(
    tokenizer: Any, documents: Iterator[Document], length: int, rng: Random, *, needles: bool, isolated: bool = False
) -> Prompt:
    """Make a prompt of the first `length` tokens of documents, of which as many are taken as are needed.

    A tokenizer's own first tokens stand before plain text. A conversation is laid out by the tokenizer's chat template,
    which writes them itself; without a template as "User: ... Assistant: ...". The first document decides which of
    the two a prompt is: further conversations are text in plain text, and further texts are the user's in a
    conversation. Raises InputError if the documents are too short, or the template does not take the conversation.

    Args:
        needles: hide facts, drawn by `rng`, in the text and ask for them at its end: after plain text, or as the answer
            of a conversation's last turn. A quarter of the prompt at most are these questions.
        isolated: ask in plain text each question by itself, spread over its second half, not at its end.
    """
    # the order of draws is a part of what a seed means: needles, documents, the order of questions
    asked = make_needles(count_needles(length) if needles else 0, rng)
    first = next(documents, None)
    if first is None:
        raise TooShortError(length)
    documents = chain([first], documents)
    if isolated and not first.turns:
        text, origins = join_documents(tokenizer, documents, length)
        start = len(get_start_tokens(tokenizer))
        return Prompt.from_ids(*hide_and_ask_within(tokenizer, text, asked, rng, start), origins)
    retrieval = Retrieval.from_needles(tokenizer, asked, rng).cap_questions(length // 4)
    if not first.turns:
        return hide_in_documents(tokenizer, documents, length, retrieval)
    length -= len(retrieval.questions)
    turns, origins = _join_turns(tokenizer, documents, length)
    text = _lay_out(tokenizer, turns, [needle.fact for needle in asked], length)
    return Prompt.from_ids(*retrieval.ask_after(text), origins)


def mix_equal_parts(tokenizer: Any, kinds: Sequence[Iterator[Document]], length: int) -> Iterator[Document]:
    """Yield documents of several kinds for one prompt: its share of the tokens of each, and all of the last."""
    for documents in kinds[:-1]:
        missing = length // len(kinds)
        for document in documents:
            tokens = count_tokens(tokenizer, document)
            yield document if tokens <= missing else document.truncate(missing / tokens)
            missing -= tokens
            if missing <= 0:
                break
    yield from kinds[-1]


def encode_served(tokenizer: Any, document: Document) -> list[int]:
    """Tokenize a document as it is served: after the tokenizer's first tokens, a conversation by the chat template."""
    if document.turns:
        return _encode_layout_start(tokenizer) + encode(tokenizer, _apply_template(tokenizer, document.turns))
    return get_start_tokens(tokenizer) + encode(tokenizer, document.text)


def count_tokens(tokenizer: Any, document: Document) -> int:
    """Return the number of tokens that a document brings to a prompt, without what a layout of turns adds."""
    return sum(map(len, encode_all(tokenizer, document.contents)))


@lru_cache(maxsize=1 << 16)
def _count_text(tokenizer: Any, text: str) -> int:
    return len(encode(tokenizer, text))


def _join_turns(tokenizer: Any, documents: Iterator[Document], length: int) -> tuple[list[Turn], Origins]:
    """Join conversations of `length` tokens into one, in which roles take turns; the first has the system message."""
    turns: list[Turn] = []
    origins: Origins = Counter()
    for document in documents:
        origins[document.domain, document.group] += min(count_tokens(tokenizer, document), length - origins.total())
        for role, content in document.turns or (("user", document.text),):
            if turns and role == turns[-1][0]:
                turns[-1] = role, turns[-1][1] + SEPARATOR + content
            elif not turns or role != "system":
                turns.append((role, content))
        if origins.total() >= length:
            return turns, origins
    raise TooShortError(length)


def _lay_out(tokenizer: Any, turns: list[Turn], facts: list[str], length: int) -> list[int]:
    """Return the first `length` tokens of a conversation; with facts hidden in it, its end asks for them."""
    begin = _encode_layout_start(tokenizer)
    if not facts:
        ids = begin + encode(tokenizer, _apply_template(tokenizer, turns))
        if len(ids) < length:
            raise TooShortError(length)
        return ids[:length]
    end = encode(tokenizer, _ask_at_end(tokenizer, turns)[1])
    room = length - len(begin) - len(end)
    if room < 1:
        raise InputError(f"length {length} is too short for a conversation with needles: use a longer one")
    span = room
    for _ in range(40):  # what the layout adds between turns moves facts on: until the last is inside
        body, _ = _ask_at_end(tokenizer, _hide_facts(tokenizer, turns, facts, span))
        encoded = tokenizer(body, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if len(encoded.input_ids) < room:
            raise TooShortError(length)
        kept = body[: encoded.offset_mapping[room - 1][1]]
        if all(fact.strip() in kept for fact in facts):
            return [*begin, *encoded.input_ids[:room], *end]
        span = span * 19 // 20
    raise InputError(
        "the tokenizer's chat template leaves parts of a conversation out, so needles cannot be hidden in it: "
        "use --no-hide-needles, or text without conversations"
    )


def _hide_facts(tokenizer: Any, turns: Sequence[Turn], facts: Sequence[str], span: int) -> list[Turn]:
    """Return the turns with facts spread evenly over their first `span` tokens."""
    waiting = list(zip(spread(len(facts), 0, span), facts, strict=True))
    written = []
    position = 0
    for role, content in turns:
        tokens = _count_text(tokenizer, content)
        text, copied = "", 0
        while waiting and waiting[0][0] < position + tokens and role != "system":
            fact_position, fact = waiting.pop(0)
            character = max(copied, len(content) * (fact_position - position) // tokens)
            text += content[copied:character] + fact
            copied = character
            position += _count_text(tokenizer, fact)
        written.append((role, text + content[copied:]))
        position += tokens
    return written


def _ask_at_end(tokenizer: Any, turns: list[Turn]) -> tuple[str, str]:
    """Lay out a conversation whose last message asks for the needles, cut behind the last content before `ASK`."""
    content = turns[-1][1].strip()
    if turns[-1][0] == "user":
        text = _apply_template(tokenizer, [*turns[:-1], ("user", content + SEPARATOR + ASK)])
    else:
        text = _apply_template(tokenizer, [*turns, ("user", ASK)])
    asked = text.rfind(ASK)
    if asked < 0:
        raise InputError("the tokenizer's chat template leaves the last message out: use text without conversations")
    last_message = text.rfind(content, 0, asked)
    split = last_message + len(content) if content and last_message >= 0 else asked
    return text[:split], text[split:]


def _encode_layout_start(tokenizer: Any) -> list[int]:
    """Return the tokens before a conversation that is laid out: a chat template writes them itself."""
    return [] if getattr(tokenizer, "chat_template", None) else get_start_tokens(tokenizer)


def _apply_template(tokenizer: Any, turns: Sequence[Turn]) -> str:
    """Return a conversation as the model reads it, up to where the assistant answers."""
    if not getattr(tokenizer, "chat_template", None):
        return Document("", "", turns=tuple(turns)).as_text
    messages = [{"role": role, "content": content} for role, content in turns]
    dated = {"date_string": TODAY, "strftime_now": lambda _: TODAY}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **dated))
    except Exception as error:  # a template is a program of the tokenizer's authors
        reason = " ".join(str(error).split())
        raise InputError(
            f"the tokenizer's chat template does not take a conversation ({reason}): use text without conversations "
            "(of the built-in text --domains code,prose)"
        ) from error
