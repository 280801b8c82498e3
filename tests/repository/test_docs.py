"""README and the pages of docs/: their commands, Python, links and tables are what there is."""

import re
import subprocess
import sys

import pytest

from calibrate.commands import calibrate, evaluate, profile
from s2o_runtime.doctor import command as doctor
from s2o_runtime.huggingface import run
from scripts.docs import architectures, tables
from support.pages import FENCE, PAGES, ROOT, blocks, commands, commands_of, name_of

PARSERS = {
    "s2o-calibrate": calibrate.parser,
    "s2o-eval": evaluate.parser,
    "s2o-profile": profile.parser,
    "s2o-run": run.parser,
    "s2o-doctor": doctor.parser,
}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


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


def test_readme_shows_output_that_there_was():
    (shown,) = [block for block in blocks(ROOT / "README.md", "text") if "16384 checked" in block]
    raw = (ROOT / "docs" / "results" / "calibrate-qwen2.5-coder-1.5b-h100.txt").read_text(encoding="utf-8").splitlines()
    assert set(shown.splitlines()) <= {line.rstrip() for line in raw}


@pytest.mark.parametrize("page", tables.BLOCKS)
def test_tables_are_of_the_raw_data_and_of_the_fields(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.current(page, text) == text


@pytest.mark.exhaustive(reason="collects tests in a process of its own")
def test_the_table_of_architectures_is_of_the_tests():
    """Collected as they are now, in a process of their own: what `make architectures` ran may be older."""
    command = [sys.executable, "-m", "scripts.docs.architectures", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-500:]
    shown = architectures.shown((ROOT / "docs" / "results" / "architectures.md").read_text(encoding="utf-8"))
    capabilities = {cell for (_, column), cell in shown.items() if column != architectures.OTHERS}
    assert architectures.PASSED in capabilities <= {architectures.PASSED, architectures.SKIPPED}
