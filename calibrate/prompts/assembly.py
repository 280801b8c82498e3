"""One prompt of an exact length from documents: plain text or a conversation, with needles."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from calibrate.prompts.documents import SEPARATOR, Document, Turn
from calibrate.prompts.prompt import Prompt
from calibrate.prompts.retrieval import (
    Retrieval,
    encode,
    encode_all,
    isolated_in,
    make_needles,
    needles_in,
    spread,
    start_of,
)
from s2o_runtime.errors import InputError

ASK = "List the secret codes that are hidden in the text above."
TODAY = "26 Jul 2024"  # for chat templates that state the date: prompts do not depend on the day
Origins = Counter[tuple[str, str]]  # tokens of each domain and group
_ATTEMPTS = 40
_CHARACTERS = 8  # of a token, hardly more


class TooShortError(InputError):
    """Documents end before a prompt is full."""


def assembled(
    tokenizer: Any,
    documents: Iterator[Document],
    length: int,
    rng: random.Random,
    *,
    needles: bool,
    isolated: bool = False,
) -> Prompt:
    """A prompt of the first `length` tokens of documents, one after another.

    A tokenizer's own first tokens stand before plain text. A conversation is laid out by the tokenizer's chat template,
    which writes them itself; without a template as "User: ... Assistant: ...". The first document says which of
    the two a prompt is: further conversations are text in plain text, and further texts are the user's in a
    conversation. The prompt's domain and group are those of most of its tokens.

    Args:
        tokenizer: the model's tokenizer.
        documents: texts or conversations; as many are taken as are needed.
        length: in tokens.
        rng: what draws the needles.
        needles: whether facts are hidden in the text and asked for at its end: after plain text, or as the answer of a
            conversation's last turn. A quarter of the prompt at most are these questions.
        isolated: whether plain text has the questions each by itself, spread over its second half, not at its end.

    Raises:
        InputError: The documents are too short, or the chat template does not take the conversation.
    """
    asked = make_needles(needles_in(length) if needles else 0, rng)
    first = next(documents, None)
    if first is None:
        raise _too_short(length)
    if isolated and not first.turns:
        text, tokens = _plain(tokenizer, first, documents, length)
        ids, answers = isolated_in(tokenizer, text, asked, rng, len(start_of(tokenizer)))
    else:
        retrieval = Retrieval.of(tokenizer, asked, rng).within(length // 4)
        length -= len(retrieval.questions)
        if first.turns:
            turns, tokens = _joined_turns(tokenizer, first, documents, length)
            text = _conversation(tokenizer, turns, [needle.fact for needle in asked], length)
            ids, answers = retrieval.asked_after(text)
        else:
            text, tokens = _plain(tokenizer, first, documents, length)
            ids, answers = retrieval.hidden_in(text, len(start_of(tokenizer)))
    return Prompt(torch.frombuffer(array("q", ids), dtype=torch.int64), answers, *tokens.most_common(1)[0][0])


def in_equal_parts(tokenizer: Any, kinds: Sequence[Iterator[Document]], length: int) -> Iterator[Document]:
    """Documents of several kinds for one prompt: of each its share of the tokens, and of the last all that come."""
    for documents in kinds[:-1]:
        missing = length // len(kinds)
        for document in documents:
            tokens = size_of(tokenizer, document)
            yield document if tokens <= missing else document.beginning(missing / tokens)
            missing -= tokens
            if missing <= 0:
                break
    yield from kinds[-1]


def encode_served(tokenizer: Any, document: Document) -> list[int]:
    """Tokenize a document as it is served: after the tokenizer's first tokens, a conversation by the chat template.

    Raises:
        InputError: The chat template does not take the conversation.
    """
    if document.turns:
        return _layout_start(tokenizer) + encode(tokenizer, _laid_out(tokenizer, document.turns))
    return start_of(tokenizer) + encode(tokenizer, document.text)


def size_of(tokenizer: Any, document: Document) -> int:
    """How many tokens a document brings to a prompt, without what a layout of turns adds."""
    contents = [content for _, content in document.turns] if document.turns else [document.text]
    return sum(map(len, encode_all(tokenizer, contents)))


@lru_cache(maxsize=1 << 16)
def _count(tokenizer: Any, text: str) -> int:
    return len(encode(tokenizer, text))


def _plain(tokenizer: Any, first: Document, others: Iterator[Document], length: int) -> tuple[list[int], Origins]:
    """The first tokens of documents, and what they are of."""
    ids, separator = start_of(tokenizer), encode(tokenizer, SEPARATOR)
    tokens: Origins = Counter()
    documents = chain([first], others)
    while needed := list(_needed(documents, length - len(ids))):
        most = _CHARACTERS * (length - len(ids))  # long files are not read to their end for a few tokens
        texts = [document.as_text for document in needed]
        for document, text, text_ids in zip(
            needed, texts, encode_all(tokenizer, [text[:most] for text in texts]), strict=True
        ):
            before = len(ids)
            ids += separator if tokens else []
            cut_short = len(text) > most and len(text_ids) <= length - len(ids)
            ids += encode(tokenizer, text) if cut_short else text_ids
            tokens[document.domain, document.group] += min(len(ids), length) - before
            if len(ids) >= length:
                return ids[:length], tokens
    raise _too_short(length)


def _needed(documents: Iterator[Document], missing: int) -> Iterator[Document]:
    """The next documents, as many as so many tokens take at least: a text has no more tokens than bytes."""
    while missing > 0 and (document := next(documents, None)) is not None:
        yield document
        missing -= len(document.as_text.encode("utf-8", "surrogatepass"))


def _joined_turns(
    tokenizer: Any, first: Document, others: Iterator[Document], length: int
) -> tuple[list[Turn], Origins]:
    """Enough conversations as one, and what its tokens are of. Roles take turns; the first has the system message."""
    turns: list[Turn] = []
    tokens: Origins = Counter()
    for document in chain([first], others):
        tokens[document.domain, document.group] += min(size_of(tokenizer, document), length - tokens.total())
        for role, content in document.turns or (("user", document.text),):
            if turns and role == turns[-1][0]:
                turns[-1] = role, turns[-1][1] + SEPARATOR + content
            elif not turns or role != "system":
                turns.append((role, content))
        if tokens.total() >= length:
            return turns, tokens
    raise _too_short(length)


def _conversation(tokenizer: Any, turns: list[Turn], facts: list[str], length: int) -> list[int]:
    """The first tokens of a conversation; if there are facts, these in it, and its end asks for them."""
    begin = _layout_start(tokenizer)
    if not facts:
        ids = begin + encode(tokenizer, _laid_out(tokenizer, turns))
        if len(ids) < length:
            raise _too_short(length)
        return ids[:length]
    end = encode(tokenizer, _body_and_end(tokenizer, turns)[1])
    room = length - len(begin) - len(end)
    if room < 1:
        raise InputError(f"length {length} is too short for a conversation with needles: use a longer one")
    span = room
    for _ in range(_ATTEMPTS):  # what the layout adds between turns moves facts on: until the last is inside
        body, _ = _body_and_end(tokenizer, _with_facts(tokenizer, turns, facts, span))
        encoded = tokenizer(body, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if len(encoded.input_ids) < room:
            raise _too_short(length)
        kept = body[: encoded.offset_mapping[room - 1][1]]
        if all(fact.strip() in kept for fact in facts):
            return [*begin, *encoded.input_ids[:room], *end]
        span = span * 19 // 20
    raise InputError(
        "the tokenizer's chat template leaves parts of a conversation out, so needles cannot be hidden in it: "
        "use --no-hide-needles, or text without conversations"
    )


def _with_facts(tokenizer: Any, turns: Sequence[Turn], facts: Sequence[str], span: int) -> list[Turn]:
    """The turns with facts spread evenly over their first `span` tokens."""
    waiting = list(zip(spread(len(facts), 0, span), facts, strict=True))
    written = []
    position = 0
    for role, content in turns:
        tokens = _count(tokenizer, content)
        text, copied = "", 0
        while waiting and waiting[0][0] < position + tokens and role != "system":
            fact_position, fact = waiting.pop(0)
            character = max(copied, len(content) * (fact_position - position) // tokens)
            text += content[copied:character] + fact
            copied = character
            position += _count(tokenizer, fact)
        written.append((role, text + content[copied:]))
        position += tokens
    return written


def _body_and_end(tokenizer: Any, turns: list[Turn]) -> tuple[str, str]:
    """A conversation whose last message asks for the needles: up to that message, and from the end of what was said."""
    content = turns[-1][1].strip()
    if turns[-1][0] == "user":
        text = _laid_out(tokenizer, [*turns[:-1], ("user", content + SEPARATOR + ASK)])
    else:
        text = _laid_out(tokenizer, [*turns, ("user", ASK)])
    asked = text.rfind(ASK)
    last_message = text.rfind(content, 0, max(asked, 0))
    if asked < 0:
        raise InputError("the tokenizer's chat template leaves the last message out: use text without conversations")
    split = last_message + len(content) if content and last_message >= 0 else asked
    return text[:split], text[split:]


def _layout_start(tokenizer: Any) -> list[int]:
    """The tokens before a conversation that is laid out: a chat template writes them itself."""
    return [] if getattr(tokenizer, "chat_template", None) else start_of(tokenizer)


def _laid_out(tokenizer: Any, turns: Sequence[Turn]) -> str:
    """A conversation as the model reads it, up to where the assistant answers."""
    if not getattr(tokenizer, "chat_template", None):
        return Document("", "", turns=tuple(turns)).as_text
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                date_string=TODAY,
                strftime_now=lambda _: TODAY,
            )
        )
    except Exception as error:  # a template is a program of the tokenizer's authors
        reason = " ".join(str(error).split())
        raise InputError(
            f"the tokenizer's chat template does not take a conversation ({reason}): use text without conversations "
            "(of the built-in text --domains code,prose)"
        ) from error


def _too_short(length: int) -> TooShortError:
    return TooShortError(f"the documents are too short for a prompt of {length} tokens: give longer ones")
