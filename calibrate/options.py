"""Options of a command, each stated once: in the metadata of the dataclass field that holds it.

From an `Option` come the command's flag with its help, the key of a recipe file, the argument of the Python call, the
reading and the check of a value, the line in the printed plan, and the row in docs/options.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from s2o_runtime.errors import ConfigError
from s2o_runtime.fields import DURATION, NONE, Rule, did_you_mean, short_repr

_KEY = "options"  # of a field's metadata
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE", bool: "on|off"}


@dataclass(frozen=True)
class Option:
    """One option: the rule of its value, and the words for it.

    Args:
        rule: of the value.
        help: what it is, for --help and docs/options.md.
        group: the heading under which --help and docs/options.md list it.
        name: with underscores, as in a recipe file; the flag has dashes. By default the field's name.
        metavar: what stands for the value in --help; by default what its type suggests.
        default_text: the default in words, where it is not the field's own.
        example: a value for messages; by default the default.
        label: the name of its line in the plan; by default its name with spaces.
        plan_text: its value in the plan: a format of the value, such as "{:.0%}", or a function of the whole dataclass;
            by default the value itself.
        unset: in the plan in place of a value that is None, 0 or off.
        repeatable: the flag gives one of several values and may be given again.
        field, default, required: of the dataclass, filled in by `collect_options`.
    """

    rule: Rule
    help: str
    group: str
    name: str = ""
    metavar: str = ""
    default_text: str = ""
    example: str = ""
    label: str = ""
    plan_text: str | Callable[[Any], str] = ""
    unset: str = ""
    repeatable: bool = False
    field: str = ""
    default: Any = None
    required: bool = False

    @property
    def flag(self) -> str:
        return format_flag(self.name)

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value, and has a second form that begins with --no-."""
        return self.rule.type is bool and not self.rule.many

    @property
    def shown_default(self) -> str:
        """The default in words, empty if a value must be given."""
        return self.default_text or ("" if self.required else format_value(self.default))

    @property
    def placeholder(self) -> str:
        """The word that stands for the value in --help."""
        single = "|".join(map(str, self.rule.allowed)) if self.rule.type is str and self.rule.allowed else ""
        single = single or ("TIME" if self.rule.unit == DURATION else _METAVARS[self.rule.type])
        return self.metavar or (f"{single},{single}" if self.rule.many and not self.repeatable else single)

    @property
    def description(self) -> str:
        """The help with the default."""
        default = "" if self.rule.type is bool and self.default is False else self.shown_default
        return f"{self.help} (default {default})" if default else self.help

    def read(self, value: object, where: str = "") -> Any:
        """Convert a text or a plain value to the option's type, without checking its range.

        Raises ConfigError, a sentence that begins with `where`, if the value stands for none of this type.
        """
        try:
            return self.rule.read(value)
        except ValueError:
            raise ConfigError(where + self.rule.error_message(value, self.name, self._example)) from None

    def check(self, value: object) -> None:
        """Raise ConfigError, one sentence, for a value out of the rule's range."""
        if not self.rule.accepts(value):
            raise ConfigError(self.rule.error_message(value, self.name, self._example))

    def line(self, settings: Any) -> str:
        """Return the value's line in the plan of a dataclass that holds it."""
        if callable(self.plan_text):
            return self.plan_text(settings)
        value = getattr(settings, self.field)
        if self.unset and not value:
            return self.unset
        return self.plan_text.format(value) if self.plan_text else format_value(value, ", ")

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Add the flag to a parser or a group of one."""
        arguments: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if not self.is_switch:
            arguments = {"type": self._from_text, "metavar": self.placeholder}
            arguments |= {"action": "append"} if self.repeatable else {}
        # argparse formats help with %
        group.add_argument(self.flag, dest=self.name, help=self.description.replace("%", "%%"), **arguments)

    @property
    def _example(self) -> str:
        return self.example or ("" if self.default in (None, ()) else format_value(self.default))

    def _from_text(self, value: str) -> Any:
        return _read_flag(value, self.rule.single if self.repeatable else self.rule, self._example)


def _read_flag(value: str, rule: Rule, example: str = "") -> Any:
    """Return what a flag's text stands for. Raises ArgumentTypeError, with an example if there is one."""
    try:
        return rule.read(value)
    except ValueError:
        example = f", such as {example}" if example else ""
        raise argparse.ArgumentTypeError(f"{value!r}: expected {rule}{example}") from None


def read_path(text: str) -> Path:
    """Return the file name that a flag gives, with ~ expanded. Raises ArgumentTypeError for an empty one."""
    return Path(_read_flag(text, Rule(Path)))


def option(rule: Rule, help: str, group: str, *, default: Any = MISSING, **more: Any) -> Any:
    """Return a dataclass field that one `Option` gives a value; without a default one must be given."""
    return field(default=default, metadata={_KEY: (Option(rule, help, group, **more),)})


def shared(option: Option, *, default: Any = MISSING, **changes: Any) -> Any:
    """Return a dataclass field with another dataclass's option, changed where the two differ."""
    return field(default=default, metadata={_KEY: (replace(option, **changes),)})


def either(*options: Option) -> Any:
    """Return a dataclass field without a default that one of several options gives a value."""
    return field(metadata={_KEY: options})


def collect_options(settings: type, groups: Iterable[str]) -> dict[str, Option]:
    """Return the options of a dataclass by name, in the order of the groups and, in a group, of the fields."""
    all_options = [
        replace(
            option,
            name=(name := option.name or holder.name),
            label=option.label or name.replace("_", " "),
            field=holder.name,
            default=None if holder.default is MISSING else holder.default,
            required=holder.default is MISSING,
        )
        for holder in fields(settings)
        for option in holder.metadata.get(_KEY, ())
    ]
    return {option.name: option for group in groups for option in all_options if option.group == group}


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option]) -> dict[str, argparse._ArgumentGroup]:
    """Add a flag for every option, under the headings of their groups; return these by title."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        option.add_to(groups[option.group])
    return groups


def read_options(options: Mapping[str, Option], values: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Convert values, by the names of their options, to the types of their fields.

    Raises ConfigError, which says `where` they are given ("recipe mine.yaml"), for an unknown name or another type.
    """
    check_names(options, values, where)
    return {name: options[name].read(value, f"{where}: ") for name, value in values.items()}


def check_names(options: Mapping[str, Option], names: Iterable[Any], where: str) -> None:
    """Raise ConfigError for a name that is no option's, with the nearest that is."""
    for name in names:
        if name not in options:
            hint = did_you_mean(str(name), options, "docs/options.md lists them")
            raise ConfigError(f"{where} has {short_repr(name)}, which is no option: {hint}")


def format_flag(name: str) -> str:
    """Return the flag of an option's name."""
    return f"--{name.replace('_', '-')}"


def format_value(value: Any, separator: str = ",") -> str:
    """Format a value as it is written on a command line."""
    if isinstance(value, tuple):
        return separator.join(map(format_value, value)) or NONE
    if isinstance(value, bool):
        return "on" if value else "off"
    return NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)
