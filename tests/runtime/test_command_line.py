"""Tests of what all commands share: examples in the help, logs as JSON, progress in a log file, colours."""

import io
import json
import logging
import re
import shlex
import signal
from contextlib import redirect_stderr
from pathlib import Path
from typing import get_args

import pytest

from calibrate import tables
from calibrate.commands import calibrate, evaluate, profile
from calibrate.commands.common import run_command as run
from calibrate.progress import PhaseClock, ProgressLines, show_progress
from calibrate.recipe import Recipe
from s2o_runtime import logs
from s2o_runtime.command_line import BAD_INPUT, NO_RESOURCE, report_failure
from s2o_runtime.doctor import command as doctor
from s2o_runtime.errors import ConfigError, ResourceError
from s2o_runtime.huggingface import run as launcher
from s2o_runtime.huggingface.layers import LongPromptPolicy
from s2o_runtime.monitor.drift import DriftChoice

COMMANDS = [calibrate, profile, evaluate, doctor, launcher]
IDS = [command.PROGRAM for command in COMMANDS]


@pytest.fixture(autouse=True)
def _logs(monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "")
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)  # loggers remember what they log until a level is set


def without_pytests_handlers(monkeypatch):
    """The root logger as a command finds it."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger().setLevel(logging.WARNING)


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_the_help_has_an_example_for_each_task_and_each_is_understood(command, capsys):
    parser = command.build_parser()
    text = parser.format_help()
    assert parser.examples
    for task, arguments in parser.examples:
        assert f"\n  {task}:\n    {f'{parser.prog} {arguments}'.strip()}\n" in text
        if arguments != "doctor":  # a command of its own
            parser.parse_args(shlex.split(arguments))
    assert capsys.readouterr().err == ""


def test_examples_of_calibrations_are_legal_recipes():
    for _, arguments in calibrate.EXAMPLES:
        if arguments != "doctor":
            flags = vars(calibrate.build_parser().parse_args(shlex.split(arguments)))
            options = {name: value for name, value in flags.items() if name in calibrate.OPTIONS}
            options.pop("target_gpu", None)  # of a plan
            Recipe.from_options({"lengths": (8192,), "out": Path("p")} | options)


def test_errors_are_lines_of_json_on_request(monkeypatch, capsys):
    monkeypatch.setenv(logs.VARIABLE, "json")
    assert report_failure("s2o-x", BAD_INPUT, "two\n lines") == BAD_INPUT
    with pytest.raises(SystemExit):
        doctor.build_parser().parse_args(["--none"])
    first, second = lines_of(capsys.readouterr().err)
    assert (first["level"], first["logger"], first["message"]) == ("error", "s2o-x", "s2o-x: two lines")
    assert first["exit_code"] == second["exit_code"] == BAD_INPUT
    assert first["time"].endswith("+00:00")


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_commands_whole_log_is_json(by, capsys, monkeypatch):
    without_pytests_handlers(monkeypatch)
    if by == "variable":
        monkeypatch.setenv(logs.VARIABLE, "json")

    def command(flags):
        logging.getLogger("calibrate").info("a %s", "décision")
        logging.getLogger("calibrate").debug("not shown")
        try:
            raise ValueError("seen")
        except ValueError:
            logging.getLogger("other").exception("failed")
        tables.print_fields({"model": "demo", "lengths": 8192}, tables.open_console(stderr=True))
        raise ResourceError("no room: free some")

    terminate = signal.getsignal(signal.SIGTERM)
    flags = {"verbose": True} | ({"log_json": True} if by == "flag" else {})
    assert run("s2o-x", flags, command) == NO_RESOURCE
    signal.signal(signal.SIGTERM, terminate)
    output = capsys.readouterr()
    decision, bug, model, lengths, error = lines_of(output.err)
    assert (decision["level"], decision["logger"], decision["message"]) == ("info", "calibrate", "a décision")
    assert bug["exception"].endswith("ValueError: seen")
    assert (model["message"], lengths["message"]) == ("model    demo", "lengths  8192")
    assert (error["level"], error["exit_code"]) == ("error", NO_RESOURCE)
    assert output.out == ""


@pytest.mark.parametrize(("program", "beginning"), [({}, "calibrate"), ({"program": "s2o-x"}, "s2o-x")])
def test_logs_are_text_by_default(program, beginning, capsys, monkeypatch):
    without_pytests_handlers(monkeypatch)
    logs.set_up(logging.INFO, as_json=False, **program)
    logging.getLogger("calibrate").info("a decision")
    logs.emit_line("x", "a line", {"not": "shown"})
    assert capsys.readouterr().err == f"{beginning}: a decision\na line\n"
    monkeypatch.setenv(logs.VARIABLE, "xml")
    with pytest.raises(ConfigError, match=r"S2O_LOG 'xml' is not known: use one of \('text', 'json'\)"):
        logs.set_up(logging.INFO, as_json=False)


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds

    def steps(self, lines, seconds, count):
        """So many steps that take so many seconds each."""
        for _ in range(count):
            self.seconds += seconds
            lines.step()


@pytest.mark.parametrize(("total", "seconds", "count", "first", "last", "lines"), [
    (40, 3, 40, "10% (4 of 40 layers), 108 s left", "100% (40 of 40 layers), took 2 min", 10),  # one for each tenth
    (1000, 10, 9, "0% (3 of 1000 layers), 2 h 46 min left", "1% (9 of 1000 layers), 2 h 45 min left", 3),  # or 30 s
])  # fmt: skip
def test_progress_in_a_log_file_is_seldom_and_never_silent_for_long(total, seconds, count, first, last, lines, capsys):
    clock = Clock()
    clock.steps(ProgressLines("proving", total, "layer", clock), seconds, count)
    text = capsys.readouterr().err
    printed = text.splitlines()
    assert (printed[0], printed[-1], len(printed)) == (f"proving: {first}", f"proving: {last}", lines)
    assert not {"\r", "\x1b"} & {*text}


def test_what_was_done_before_is_said_and_no_part_of_the_rate(capsys):
    clock = Clock()
    lines = ProgressLines("measuring", 12, "layer", clock)
    lines.step("are in d.sqlite", 6, known=True)
    clock.seconds += 10
    lines.step(steps=2)
    assert capsys.readouterr().err.splitlines() == [
        "measuring: continuing: 6 of 12 layers are in d.sqlite",
        "measuring: 67% (8 of 12 layers), 20 s left",
    ]
    with redirect_stderr(Terminal()) as stream, show_progress("measuring", 12, "layer", shown=True) as step:
        step("are in d.sqlite", 6, known=True)
        step(steps=6)
    assert "measuring: continuing: 6 of 12 layers are in d.sqlite\n" in stream.getvalue()
    assert all(part in stream.getvalue() for part in ("\r", "measuring: 100%", "12/12"))  # a bar


def test_progress_says_what_is_left_of_the_run(capsys):
    """Later phases are nearly as much slower than expected as what went before."""
    clock = Clock()
    phases = PhaseClock(expected={"measuring": 40.0, "searching": 30.0, "proving": 50.0}, clock=clock)
    with phases.time_phase("measuring"):
        clock.steps(ProgressLines("measuring", 10, "layer", clock), 8, 10)
    with phases.time_phase("searching"):
        lines = ProgressLines("searching", None, "trial", clock)
        clock.steps(lines, 40, 1)
    with phases.time_phase("a phase that nobody foresaw"):
        clock.steps(lines, 40, 1)
    assert phases.estimate_left(0.0) is None
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "measuring: 10% (1 of 10 layers), 72 s left, 4 min until the end"  # 72 + 1.94 * (30 + 50)
    assert said[9] == "measuring: 100% (10 of 10 layers), took 80 s, 3 min until the end"
    assert said[10] == "searching: 1 trial, 40 s so far, 115 s until the end"  # 1.94 * (30 + 50) - 40
    assert said[11] == "searching: 2 trials, 80 s so far"
    with phases.time_phase("proving"):  # a part of it breaks the silence, and knows no more than the plan
        clock.steps(ProgressLines("answers", 20, "prompt", clock, part=True), 4, 20)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "answers: 40% (8 of 20 prompts), 48 s left, 53 s until the end"
    assert len(said) == 2


@pytest.mark.parametrize(("pace", "continues"), [(0.75, False), (1.0, False), (1.0, True), (2.5, True)])
def test_what_is_said_to_be_left_is_right_within_a_quarter_from_a_tenth_of_the_run_on(pace, continues):
    """On a machine of any pace; of a run that goes on from a journal, whose curves take no time."""
    clock, expected = Clock(), {"measuring": 40.0, "searching": 30.0, "certifying": 90.0, "proving": 40.0}
    phases, said = PhaseClock(expected, clock), []
    phases.continues = continues
    for name, seconds in expected.items():
        step = 0.05 * pace * seconds * (name != "measuring" or not continues)
        with phases.time_phase(name):
            for left in range(20, 0, -1):
                said.append((clock.seconds, phases.estimate_left(None if name == "certifying" else step * left)))
                clock.seconds += step
    late = [(clock.seconds - at, left) for at, left in said if at >= 0.1 * clock.seconds]
    assert len(late) >= 49
    assert all(left == pytest.approx(true, rel=0.25) for true, left in late)


def test_progress_of_unknown_length_and_as_json(capsys, monkeypatch):
    for shown, text in ((True, "searching: 3 trials, 0 s so far\n"), (False, "")):
        with show_progress("searching", None, "trial", shown=shown) as step:
            step("ignored in a log")
            step(steps=2)
        assert capsys.readouterr().err == text
    monkeypatch.setenv(logs.VARIABLE, "json")
    with show_progress("proving", 2, "layer", shown=True) as step:
        step(), step()
    first, last = lines_of(capsys.readouterr().err)
    assert (first["phase"], first["done"], first["total"], first["percent"]) == ("proving", 1, 2, 50)
    assert ("seconds_left" in first, last["percent"]) == (True, 100)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("command", "arguments", "sentence"),
    [
        (calibrate, "--model demo --lenghts 1024", "--lenghts 1024: did you mean --lengths?"),
        (calibrate, "--random-wieghts=on", "--random-wieghts=on: did you mean --random-weights?"),
        (profile, "show p.safetensors --haed 1.2", "--haed 1.2: did you mean --head?"),
        (evaluate, "--zzz", "--zzz: --help-all lists what there is"),
        (calibrate, "--mse 1e-4", "--mse 1e-4: did you mean --budget-mse or --budget-rel-mse?"),
        (calibrate, "doctr", "doctr: did you mean doctor?"),
        (calibrate, "--lengths=8192 32768 65536", "32768 65536: --lengths takes commas between values"),
        (evaluate, "--seed 1 2", "2: --seed takes one value"),
        (calibrate, "--hide-needles maybe", "maybe: --hide-needles takes true or false"),
        (calibrate, "--no-hide-needles=maybe", "maybe: --no-hide-needles takes true or false"),
        (profile, "verify p.safetensors --trust-remote-code no", "no: --trust-remote-code takes true or false"),
        (evaluate, "--json yes", "yes: --json takes no value"),
        (profile, "shw p.safetensors", "argument COMMAND: .*: did you mean show?"),
        (profile, "zzz", "argument COMMAND: .*: --help lists what there is"),
        (launcher, "--beyond dens python", "argument --beyond: .*: did you mean dense?"),
    ],
)
def test_what_no_parser_knows_blames_the_flag_or_the_command_and_names_the_nearest(
    command, arguments, sentence, capsys
):
    with pytest.raises(SystemExit) as end:
        command.build_parser().parse_args(arguments.split())
    (line,) = capsys.readouterr().err.splitlines()
    beginning = "" if sentence.startswith("argument") else "unrecognized arguments: "
    assert re.fullmatch(f"{command.PROGRAM}: {beginning}{sentence.replace('?', '[?]')}", line)
    assert end.value.code == BAD_INPUT


def test_what_stands_behind_flags_is_left_alone():
    flags = profile.build_parser().parse_args(["verify", "--trust-remote-code", "p.safetensors", "--model", "demo"])
    assert (flags.trust_remote_code, flags.profile) == (True, Path("p.safetensors"))
    own = ["x.py", "--budget", "-1e-4", "--drift", "false"]
    assert launcher.build_parser().parse_args(["--drift", "off", "python", *own]).arguments == own
    choices = {action.dest: action.choices for action in launcher.build_parser()._actions}
    assert (choices["beyond"], choices["drift"]) == (get_args(LongPromptPolicy), get_args(DriftChoice))
