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

from calibrate.prompts.documents import SEPARATOR, Document, Origins, TooShortError, Turn, join_documents
from calibrate.prompts.prompt import Prompt
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
from s2o_runtime.errors import InputError

ASK = "List the secret codes that are hidden in the text above."
TODAY = "26 Jul 2024"  # for chat templates that state the date: prompts do not depend on the day
_ATTEMPTS = 40


def assemble_prompt(
    tokenizer: Any,
    documents: Iterator[Document],
    length: int,
    rng: random.Random,
    *,
    needles: bool,
    isolated: bool = False,
) -> Prompt:
    """Make a prompt of the first `length` tokens of documents, one after another.

    A tokenizer's own first tokens stand before plain text. A conversation is laid out by the tokenizer's chat template,
    which writes them itself; without a template as "User: ... Assistant: ...". The first document decides which of
    the two a prompt is: further conversations are text in plain text, and further texts are the user's in a
    conversation. The prompt's domain and group are those of most of its tokens.

    Args:
        tokenizer: the model's tokenizer.
        documents: texts or conversations; as many are taken as are needed.
        length: in tokens.
        rng: draws the needles.
        needles: hide facts in the text and ask for them at its end: after plain text, or as the answer of a
            conversation's last turn. A quarter of the prompt at most are these questions.
        isolated: ask in plain text each question by itself, spread over its second half, not at its end.

    Raises:
        InputError: The documents are too short, or the chat template does not take the conversation.
    """
    # the order of draws is a part of what a seed means: needles, documents, the order of questions
    asked = make_needles(count_needles(length) if needles else 0, rng)
    first = next(documents, None)
    if first is None:
        raise TooShortError(length)
    documents = chain([first], documents)
    if isolated and not first.turns:
        text, origins = join_documents(tokenizer, documents, length)
        ids, answers = hide_and_ask_within(tokenizer, text, asked, rng, len(get_start_tokens(tokenizer)))
    else:
        retrieval = Retrieval.from_needles(tokenizer, asked, rng).cap_questions(length // 4)
        length -= len(retrieval.questions)
        if first.turns:
            turns, origins = _join_turns(tokenizer, documents, length)
            ids, answers = retrieval.ask_after(_lay_out(tokenizer, turns, [needle.fact for needle in asked], length))
        else:
            text, origins = join_documents(tokenizer, documents, length)
            ids, answers = retrieval.hide_in(text, len(get_start_tokens(tokenizer)))
    return Prompt(torch.frombuffer(array("q", ids), dtype=torch.int64), answers, *origins.most_common(1)[0][0])


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
    """Tokenize a document as it is served: after the tokenizer's first tokens, a conversation by the chat template.

    Raises:
        InputError: The chat template does not take the conversation.
    """
    if document.turns:
        return _encode_layout_start(tokenizer) + encode(tokenizer, _apply_template(tokenizer, document.turns))
    return get_start_tokens(tokenizer) + encode(tokenizer, document.text)


def count_tokens(tokenizer: Any, document: Document) -> int:
    """Return the number of tokens that a document brings to a prompt, without what a layout of turns adds."""
    contents = [content for _, content in document.turns] if document.turns else [document.text]
    return sum(map(len, encode_all(tokenizer, contents)))


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
    for _ in range(_ATTEMPTS):  # what the layout adds between turns moves facts on: until the last is inside
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
