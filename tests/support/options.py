"""Strategies of values that a rule accepts, and of values beyond it, made without asking the rule itself."""

import math
from pathlib import Path

from hypothesis import strategies as st

WORDS = st.from_regex(r"[a-z][a-z0-9.:/-]{0,9}", fullmatch=True).filter(lambda word: word != "none")
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=2),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=2), parts, max_size=2),
    max_leaves=4,
)


def values_of(rule, written=False):
    """Values that the rule accepts; `written`: those that a text on the command line can stand for."""
    if rule.many:
        parts = st.lists(values_of(rule.single), min_size=not rule.empty, max_size=4, unique=True)
        values = parts.map(tuple if rule.type in (str, Path) else lambda parts: tuple(sorted(parts)))
    elif rule.allowed:
        values = st.sampled_from(rule.allowed)
    elif rule.type is bool:
        values = st.booleans()
    elif rule.type is int:
        steps = st.integers(-(-max(rule.low, -(10**9)) // rule.multiple), min(rule.high, 1 << 40) // rule.multiple)
        values = steps.map(lambda step: int(step * rule.multiple))
    elif rule.type is float:
        low, high = max(rule.low, 0.001 if rule.above else -1e4), min(rule.high, 99_999)
        values = (
            st.floats(low, high).map(lambda value: float(f"{value:.4g}")).filter(lambda value: low <= value <= high)
        )
    else:
        values = WORDS.map(rule.type)
    none_is_another = written and (rule.many or rule.type in (str, Path))  # the text "none" is a name, or no values
    return values | st.none() if rule.optional and not none_is_another else values


def values_beyond(rule):
    """A list of strategies: values of the rule's type that it does not accept, by what is wrong with them."""
    beyond, steps = [], st.integers(1, 10**6)
    if rule.allowed:
        others = st.sampled_from([3, 7]) if rule.type is int else WORDS.filter(lambda word: word not in rule.allowed)
        beyond.append(others)
    elif rule.type in (int, float):
        beyond += [steps.map(lambda step: rule.type(rule.low - step))] * math.isfinite(rule.low)
        beyond += [steps.map(lambda step: rule.type(rule.high + step))] * math.isfinite(rule.high)
        beyond += [st.just(rule.type(rule.low))] * rule.above
        beyond += [st.sampled_from([math.nan, math.inf, -math.inf])] * (rule.type is float)
        beyond += [st.integers(1, 63).map(lambda rest: int(rule.multiple * 9 + rest))] * (rule.multiple > 1)
    if rule.many:
        beyond = [values.map(lambda value: (value,)) for values in beyond] + [st.just(())] * (not rule.empty)
    return beyond
