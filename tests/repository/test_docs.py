"""README and the pages of docs/: their commands, Python, links and numbers are what there is."""

import re

import pytest

from calibrate.commands import calibrate, evaluate, profile
from s2o_runtime.doctor import command as doctor
from s2o_runtime.huggingface import run
from scripts.docs import how_it_works, tables
from scripts.docs.results_data import S2O_CALIBRATED, benches, newest, read_sources
from support.pages import FENCE, PAGES, ROOT, blocks, commands, commands_of, name_of

PARSERS = {
    "s2o-calibrate": calibrate.parser,
    "s2o-eval": evaluate.parser,
    "s2o-profile": profile.parser,
    "s2o-run": run.parser,
    "s2o-doctor": doctor.parser,
}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# results.md has the commands as they were typed, with the options of their day
OLDER = "python -m scripts.docs.results"


def understood(program, arguments):
    """Whether the program's parser takes the arguments; also if it then prints something and ends."""
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    if program == "s2o-calibrate" and arguments[:1] == [calibrate.DOCTOR]:
        program, arguments = "s2o-doctor", arguments[1:]
    try:
        PARSERS[program]().parse_args(arguments)
    except SystemExit as end:
        return end.code == 0
    return True


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_are_understood(path):
    """What is typed is what the program's parser takes, a target of the Makefile, or a file that exists."""
    if path.name == "results.md":
        assert OLDER in path.read_text(encoding="utf-8")
        return
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for (program, *arguments), _ in commands_of(path):
        if program in PARSERS:
            assert understood(program, arguments), arguments
        elif program == "make":
            assert arguments[0] in targets
        elif program == "python" and arguments[0] == "-m":
            assert (ROOT / arguments[1].replace(".", "/")).with_suffix(".py").is_file(), arguments[1]
        elif program == "python":
            assert (ROOT / arguments[0]).is_file(), arguments[0]
        else:
            assert not program.startswith("s2o"), program  # another project's program


def test_an_unknown_option_is_no_command_of_a_page():
    assert not understood("s2o-profile", ["show", "p.safetensors", "--heads", "4.1"])
    assert understood("s2o-profile", ["show", "p.safetensors", "--head", "4.1"])
    assert list(commands("A=1 s2o-run --x \\\n  y # no\n\n# nothing")) == [(("s2o-run", "--x", "y"), None)]


def test_what_a_command_needs_is_read():
    text = "a # here; needs a GPU\n# needs vLLM\nb\nc # needs bokeh\n# anywhere\nd"
    assert [needs for _, needs in commands(text)] == ["a GPU", "vLLM", "bokeh", None]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_python_compiles(path):
    for block in blocks(path, "python"):
        compile(block, path.name, "exec")


def headings(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", LINK.sub("", title).lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    for link in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        target, _, heading = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), link
        if heading and page.suffix == ".md":
            assert heading in headings(page), link


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert set(re.findall(r"[\w-]+\.md", text)) == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_readme_is_short_and_shows_output_that_there_was():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    (shown,) = [block for block in blocks(ROOT / "README.md", "text") if "checked only" in block]
    raw = (ROOT / "docs" / "results" / "calibrate-smollm2-h200.txt").read_text(encoding="utf-8").splitlines()
    lines = shown.splitlines()
    assert len(lines) == 7
    assert set(lines) <= {line.rstrip() for line in raw}


@pytest.mark.parametrize("page", tables.BLOCKS)
def test_tables_are_of_the_raw_data(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.current(read_sources(ROOT / "docs" / "results"), page, text) == text


def test_the_comparison_is_the_bench_at_one_error():
    """Between two settings that are worked out here by hand, log-log, S2O's time is where README has it."""
    sources = read_sources(ROOT / "docs" / "results")
    bench = next(bench for bench in newest(benches(sources)) if bench.length == 131072)
    settings = {row.setting.removesuffix(", proven"): row for row in bench.of(S2O_CALIBRATED)}
    exact, fast = settings["rel_mse 0.001"], settings["rel_mse 0.003"]
    (row,) = [line for line in tables.comparison(sources).splitlines() if "S2O, calibrated" in line]
    shown = float(row.split("|")[4].strip(" *"))
    assert fast.seconds / bench.dense < shown < exact.seconds / bench.dense


def test_a_page_without_marks_is_refused():
    start, end = tables.marks("x")
    assert tables.with_table(f"a\n{start}\nold\n{end}\nb", "x", "| new |") == f"a\n{start}\n\n| new |\n\n{end}\nb"
    with pytest.raises(ValueError, match="put them where the table belongs"):
        tables.with_table("nothing", "x", "")


def test_the_picture_is_what_the_stop_rule_says():
    assert how_it_works.main(["--check"]) == 0
    visited = how_it_works.stop()
    gains = how_it_works.gains()
    left = [gain * (len(gains) - number) for number, gain in enumerate(gains, 1)]
    assert left[visited - 1] < how_it_works.TAU <= min(left[: visited - 1])
    assert 0 < visited < len(gains)
