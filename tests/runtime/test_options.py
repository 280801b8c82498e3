"""Rules and options: a value is read and refused alike as text, YAML and Python, and docs say what the code does."""

import argparse
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.evaluation import plan
from calibrate.options import add_flags, collect_options, format_value, read_options
from calibrate.recipe import GROUPS, OPTIONS, Recipe
from s2o_runtime.command_line import Parser
from s2o_runtime.errors import ConfigError
from s2o_runtime.fields import Rule, parse_duration
from support.options import JUNK, values_beyond, values_of
from support.pages import ROOT

LENGTHS = Rule(int, low=1, many=True)
COMMANDS = pytest.mark.parametrize("options", [OPTIONS, plan.OPTIONS], ids=["calibrate", "eval"])
ALL = st.sampled_from([*OPTIONS.values(), *plan.OPTIONS.values()])
EXAMPLES = settings(max_examples=200, deadline=None)


def parser_of(*options):
    parser = Parser(argument_default=argparse.SUPPRESS)
    add_flags(parser, options)
    return parser


@EXAMPLES
@given(st.data())
def test_a_value_is_the_same_as_flag_text_yaml_and_python(data):
    option = data.draw(ALL)
    value = data.draw(values_of(option.rule, written=True))
    assert option.rule.accepts(value)
    option.check(value)
    text = format_value(value)
    for given_value in (value, text, yaml.safe_load(yaml.safe_dump(text))):
        (read,) = read_options({option.name: option}, {option.name: given_value}, "test").values()
        assert (read, type(read)) == (value, type(value))
    if isinstance(value, tuple) and option.rule.type is not Path:
        assert option.read(yaml.safe_load(yaml.safe_dump(list(value)))) == value
    texts, expected = (map(format_value, value), list(value)) if option.repeatable else ([text], value)
    flags = parser_of(option).parse_args([f"{option.flag}={part}" for part in texts])
    assert vars(flags).get(option.name, []) == expected


@EXAMPLES
@given(st.data())
def test_a_value_out_of_range_is_one_sentence_with_the_options_name(data):
    option = data.draw(ALL.filter(lambda option: values_beyond(option.rule)))
    value = data.draw(st.one_of(values_beyond(option.rule)))
    assert not option.rule.accepts(value)
    for refuse in (lambda: option.check(value), lambda: option.rule.checked(value, option.name)):
        with pytest.raises(ConfigError) as raised:
            refuse()
        assert str(raised.value).startswith(f"{option.name} is ")
        assert f": expected {option.rule}" in str(raised.value)


@EXAMPLES
@given(ALL, JUNK)
def test_what_is_no_value_at_all_is_refused_in_one_short_sentence(option, junk):
    try:
        value, sentence = option.rule.checked(junk, "it"), "it is "
    except ConfigError as error:
        value, sentence = None, str(error)
    assert value is None or option.rule.accepts(value)
    assert sentence.startswith("it is ")
    assert (len(sentence) < 500, "\n" in sentence) == (True, False)


@pytest.mark.parametrize(
    ("rule", "words", "good", "bad"),
    [
        (Rule(int), "a whole number", {"16": 16}, ["1.5", 1.0, True, "8k", None]),
        (Rule(int, low=1), "a whole number of at least 1", {"1": 1}, ["0"]),
        (Rule(float), "a number", {1: 1.0, "1e-4": 1e-4}, ["little", None, 10**400, "nan", float("inf")]),
        (Rule(float, -1, 1, optional=True), "a number from -1 to 1 or none", {"none": None}, ["2"]),
        (Rule(float, 0, 1, True, unit="share"), "a share above 0 and at most 1", {"1": 1.0}, [0.0]),
        (Rule(float, unit="seconds"), "a number of seconds", {"1.5h": 5400.0}, ["5d"]),
        (Rule(bool), "true or false", {"on": True, "false": False}, [1, "maybe"]),
        (Rule(str), "a name", {"16": "16"}, [7, ""]),
        (Rule(str, optional=True), "a name or none", {"none": "none"}, [7]),
        (Rule(Path, optional=True), "a file name or none", {"~/p": Path.home() / "p", None: None}, [7, ""]),
        (Rule(int, low=1, unit="tokens", many=True, empty=True),
         "a list, each a whole number of tokens of at least 1, or none",
         {"32k,8192,8k": (8192, 32768), "none": ()}, ["k", "8.5k", "8kk", "8m"]),
        (Rule(int, 64, 256, multiple=64, many=True), "a list, each a multiple of 64 from 64 to 256",
         {"128,64": (64, 128)}, ["100"]),
        (LENGTHS, "a list, each a whole number of at least 1", {"2048,1024, 2048": (1024, 2048), (1024,): (1024,)},
         [1024, "1024,,2048", [[1024]], "none", None, (), (0, 1)]),
        (Rule(str, allowed=("a", "b"), many=True), "a list, each one of a, b", {"b, a,": ("b", "a")}, ["c"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_people_write(rule, words, good, bad):
    assert str(rule) == words
    for value, expected in good.items():
        assert (rule.checked(value, "x"), type(rule.read(value))) == (expected, type(expected))
    for value in bad:
        with pytest.raises(ConfigError, match=r"^x is .*: expected "):
            rule.checked(value, "x")


def test_numbers_of_a_tuple_ascend_and_durations_have_units():
    assert not any(LENGTHS.accepts(value) for value in ((2, 1), (1, 1), [1, 2]))
    assert ", not ascending: expected" in LENGTHS.error_message((2, 1), "lengths")
    assert [parse_duration(text) for text in ("90", "90s", " 5m", "1.5h", "0")] == [90, 90, 300, 5400, 0]
    for text in ("", "m", "-5", "5d", "1h30m", "nan", "1e3", "5 m", "s5"):
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(text)


def test_every_field_of_a_command_is_an_option_that_means_the_same_in_both():
    for options, settings_type in ((OPTIONS, Recipe), (plan.OPTIONS, plan.EvaluationPlan)):
        assert {option.field for option in options.values()} == set(settings_type.__dataclass_fields__)
        for option in options.values():
            assert option.required or option.default is None or option.rule.accepts(option.default)
            if option.rule.type in (int, float):  # what nobody lives to see is refused before hours of work
                assert option.rule.allowed or math.isfinite(option.rule.high)
    assert collect_options(Recipe, GROUPS) == OPTIONS
    for name in OPTIONS.keys() & plan.OPTIONS.keys():  # where the help differs, it is about what the command does
        first, second = ((option.rule.type, option.rule.many, option.rule.unit, option.placeholder)
                         for option in (OPTIONS[name], plan.OPTIONS[name]))  # fmt: skip
        assert first == second
    assert "needles" not in OPTIONS.keys() | plan.OPTIONS.keys()  # a share in one and a count in the other


@COMMANDS
def test_a_switch_has_one_grammar(options):
    parser = parser_of(*options.values())
    for option in filter(lambda option: option.is_switch, options.values()):
        off = f"--no-{option.flag[2:]}"
        for words in ([option.flag], [option.flag, "on"], [f"{option.flag}=True"], [off, "false"]):
            assert vars(parser.parse_args(words)) == {option.name: True}
        for words in ([off], [option.flag, "off"], [f"{option.flag}=false"], [option.flag, off]):
            assert vars(parser.parse_args([*words, "--lengths", "1k"])) == {option.name: False, "lengths": (1024,)}
        row = f"| `{option.flag}`, `{off}` | true or false |"
        assert row in (ROOT / "docs" / "options.md").read_text()
