"""Rules and options: what a value may be, how it is read, and that the docs say what the code does."""

import argparse
from pathlib import Path

import pytest

from calibrate.evaluation import plan
from calibrate.options import add_flags, options_of, read_options, format_value
from calibrate.recipe import GROUPS, OPTIONS, Recipe
from s2o_runtime.command_line import Parser
from s2o_runtime.errors import ConfigError
from s2o_runtime.fields import Rule, parse_duration
from support.pages import ROOT

LENGTHS = Rule(int, low=1, many=True)


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        (Rule(int), "16", 16),
        (Rule(float), 1, 1.0),
        (Rule(float), "1e-4", 1e-4),
        (Rule(float, optional=True), "none", None),
        (Rule(float, unit="seconds"), "1.5h", 5400.0),
        (Rule(bool), "on", True),
        (Rule(bool), "false", False),
        (Rule(int, unit="tokens", many=True), "32k,8192,8k", (8192, 32768)),
        (Rule(Path), "~/p", Path.home() / "p"),
        (Rule(str), "16", "16"),
        (Rule(str, optional=True), "none", "none"),
        (Rule(Path), "a/b", Path("a/b")),
        (Rule(Path, optional=True), None, None),
        (LENGTHS, "2048,1024, 2048", (1024, 2048)),
        (LENGTHS, [2048, 1024], (1024, 2048)),
        (LENGTHS, (1024,), (1024,)),
        (Rule(bool, many=True), "on,off", (False, True)),
        (Rule(str, many=True), "b, a,", ("b", "a")),
        (Rule(int, many=True, empty=True), "none", ()),
    ],
    ids=str,
)
def test_what_a_value_stands_for(rule, value, expected):
    assert rule.read(value) == expected
    assert type(rule.read(value)) is type(expected)
    assert rule.accepts(expected)
    assert rule.read(expected) == expected


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (Rule(int), ["1.5", 1.0, True, "8k"]),
        (Rule(int, unit="tokens"), ["k", "8.5k", "8kk", "8m"]),
        (Rule(float), ["little", None, 10**400]),
        (Rule(bool), [1, "maybe"]),
        (Rule(str), [7, ""]),
        (Rule(Path), [7, ""]),
        (LENGTHS, [1024, "1024,,2048", [[1024]], "none", None]),
    ],
    ids=str,
)
def test_what_stands_for_no_value(rule, values):
    for value in values:
        with pytest.raises(ValueError):  # noqa: PT011  # of several kinds: each is for the option's own sentence
            rule.read(value)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (Rule(int, 1, 8), [9, 0, 2.0]),
        (Rule(float, low=0, above=True), [0.0]),
        (Rule(float), [float("nan"), float("inf")]),
        (Rule(int, multiple=64), [100]),
        (Rule(int, allowed=(1, 4)), [2]),
        (Rule(str, allowed=("a",)), ["b"]),
        (Rule(bool), [1]),
        (LENGTHS, [(), (2, 1), [1, 2], (0, 1), None]),
    ],
    ids=str,
)
def test_what_is_out_of_range(rule, values):
    assert not any(rule.accepts(value) for value in values)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule(bool), "true or false"),
        (Rule(int, low=1), "a whole number of at least 1"),
        (Rule(float, low=0, high=1, above=True, unit="share"), "a share above 0 and at most 1"),
        (Rule(float, -1, 1, optional=True), "a number from -1 to 1 or none"),
        (Rule(int, 64, 256, multiple=64, many=True), "a list, each a multiple of 64 from 64 to 256"),
        (Rule(int, low=1, unit="tokens", many=True, empty=True),
         "a list, each a whole number of tokens of at least 1, or none"),
        (Rule(str, allowed=("a", "b"), many=True), "a list, each one of a, b"),
        (Rule(Path), "a file name"),
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_in_words(rule, words):
    assert str(rule) == words


@pytest.mark.parametrize(("given", "value"), [("90", 90), ("90s", 90), (" 5m", 300), ("1.5h", 5400), ("0", 0)])
def test_durations(given, value):
    assert parse_duration(given) == value


@pytest.mark.parametrize("given", ["", "m", "-5", "5d", "1h30m", "nan", "1e3", "5 m", "s5"])
def test_what_is_no_duration(given):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(given)


def test_every_field_of_a_command_is_an_option():
    assert {option.field for option in OPTIONS.values()} == set(Recipe.__dataclass_fields__)
    assert {option.field for option in plan.OPTIONS.values()} == set(plan.EvaluationPlan.__dataclass_fields__)
    assert options_of(Recipe, GROUPS) == OPTIONS
    for option in (*OPTIONS.values(), *plan.OPTIONS.values()):
        assert option.required or option.default is None or option.rule.accepts(option.default)


def test_an_option_means_the_same_in_both_commands():
    """Same name, same kind of value; where the help differs, it is about what the command does with it."""
    for name in OPTIONS.keys() & plan.OPTIONS.keys():
        one, other = OPTIONS[name], plan.OPTIONS[name]
        assert (one.rule.type, one.rule.many, one.rule.unit) == (other.rule.type, other.rule.many, other.rule.unit)
        assert one.placeholder == other.placeholder
    assert "needles" not in OPTIONS.keys() | plan.OPTIONS.keys()  # a share in one and a count in the other


@pytest.mark.parametrize("options", [OPTIONS, plan.OPTIONS], ids=["calibrate", "eval"])
def test_a_default_survives_the_command_line(options):
    """What a flag is given as text is what the field holds."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_flags(parser, options.values())
    for option in options.values():
        if option.default in (None, ()) or (option.rule.type is bool and not option.rule.many):
            continue
        assert vars(parser.parse_args([option.flag, format_value(option.default)])) == {option.name: option.default}
        assert read_options(options, {option.name: format_value(option.default)}, "test") == {
            option.name: option.default
        }
    assert vars(parser.parse_args([])) == {}


def test_an_unknown_option_is_named_with_its_neighbour():
    with pytest.raises(ConfigError, match=r"calibrate\(\) has 'budget', which is no option: did you mean budget_"):
        read_options(OPTIONS, {"budget": 1}, "calibrate()")


@pytest.mark.parametrize("options", [OPTIONS, plan.OPTIONS], ids=["calibrate", "eval"])
def test_a_switch_has_one_grammar(options):
    parser = Parser(argument_default=argparse.SUPPRESS)
    add_flags(parser, options.values())
    switches = [option for option in options.values() if option.rule.type is bool and not option.rule.many]
    assert switches
    for option in switches:
        off = f"--no-{option.flag[2:]}"
        for words in ([option.flag], [option.flag, "on"], [f"{option.flag}=True"], [off, "false"]):
            assert vars(parser.parse_args(words)) == {option.name: True}
        for words in ([off], [option.flag, "off"], [f"{option.flag}=false"], [option.flag, off]):
            assert vars(parser.parse_args([*words, "--lengths", "1k"])) == {option.name: False, "lengths": (1024,)}
        row = f"| `{option.flag}`, `{off}` | true or false |"
        assert row in (ROOT / "docs" / "options.md").read_text()
