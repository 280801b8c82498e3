"""README and the pages of docs/: their commands, Python, links and tables are what there is."""

import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from calibrate.commands import calibrate, evaluate, profile
from s2o_runtime.doctor import command as doctor
from s2o_runtime.huggingface import run
from s2o_runtime.profile import load_profile
from scripts.docs import tables
from scripts.docs.raw import Bench
from support.pages import FENCE, PAGES, ROOT, blocks, commands_of, name_of

PARSERS = {
    "s2o-calibrate": calibrate.build_parser,
    "s2o-eval": evaluate.build_parser,
    "s2o-profile": profile.build_parser,
    "s2o-run": run.build_parser,
    "s2o-doctor": doctor.build_parser,
}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def understood(program, arguments):
    """Return whether the program's parser takes the arguments; also if it then prints something and ends."""
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
    """Everything typed is taken by the program's parser, a target of the Makefile, or a file that exists."""
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


def test_readme_shows_what_was_certified_of_output_that_there_was():
    """Its tables have their titles and heads, every length, and the kind of text with the largest error."""
    (shown,) = [block.splitlines() for block in blocks(ROOT / "README.md", "text") if "certified" in block]
    raw = (ROOT / "docs" / "results" / "calibrate-qwen2.5-coder-1.5b-h100.txt").read_text(encoding="utf-8")
    lines = [line.rstrip() for line in raw.splitlines() if line.strip()]
    assert [line for line in lines if line in shown] == shown  # in the same order, and each of them once
    first, by_kind = lines.index("certified"), lines.index("by kind of text")
    end = next(number for number, line in enumerate(lines) if line.startswith("Certified on"))
    over_limit = {line: int(line.split()[5].rstrip("%")) for line in lines[by_kind + 4 : end]}
    worst = max(over_limit, key=over_limit.__getitem__)
    assert {*lines[first : by_kind + 4], worst} <= set(shown)
    above = Counter(line.split()[0] for line, share in over_limit.items() if share > 100)
    fewest, most = min(above.values()), max(above.values())
    assert f"{fewest} or {most} of the kinds alone are over it" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_counts_the_profiles_without_a_certificate():
    shipped = [load_profile(path) for path in (ROOT / "profiles").rglob("*.safetensors")]
    uncertified = sum("certificate" not in profile.record for profile in shipped)
    (stated,) = re.findall(r"\[(\d+ of \d+)\]\(profiles/README.md\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert stated == f"{uncertified} of {len(shipped)}"


def test_the_certificate_that_is_explained_is_on_a_card():
    (quote,) = re.findall(r"(?:^> .*\n)+", (ROOT / "docs" / "budgets.md").read_text(encoding="utf-8"), re.MULTILINE)
    certified = ROOT / "profiles" / "qwen2.5-coder-1.5b-dequantised-q4" / "nvidia-h100-80gb-hbm3" / "rel-mse-0.001.md"
    card = certified.read_text(encoding="utf-8")
    assert " ".join(quote.replace("> ", "").split()) in card


def test_every_raw_file_is_linked_from_a_page():
    linked = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    names = [path.name for path in (ROOT / "docs" / "results").iterdir()]
    assert [name for name in names if f"results/{name}" not in linked and name != "architectures.md"] == []


@pytest.mark.parametrize("page", tables.BLOCKS)
def test_tables_are_of_the_raw_data_and_of_the_fields(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.current(page, text) == text


def test_times_between_two_settings_are_on_a_power_law():
    """A setting that another beats, and one that computes everything, are no ends of a line."""
    errors = (1e-4, 4e-3, 1e-1)
    rows = [SimpleNamespace(method="x", density=0.5, rel_mse=error, seconds=error**-0.5) for error in errors]
    rows.append(SimpleNamespace(method="x", density=0.5, rel_mse=2e-3, seconds=1000.0))
    rows.append(SimpleNamespace(method="x", density=1.0, rel_mse=1e-5, seconds=1.0))
    dense = SimpleNamespace(method="dense (cuDNN)", density=1.0, rel_mse=0.0, seconds=100.0)
    bench = Bench("m", SimpleNamespace(length=8192, rows=[dense, *rows]))
    assert bench.faster_between("x", 1e-3) == f"{100 * 1e-3**0.5:.2f}x"
    assert [bench.faster_between("x", error) for error in (5e-5, 0.2)] == ["-", "-"]


@pytest.mark.exhaustive(reason="collects tests in a process of its own")
def test_the_table_of_architectures_is_of_the_tests():
    """Collected as they are now, in a process of their own: what `make architectures` ran may be older."""
    command = [sys.executable, "-m", "scripts.docs.architectures", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-500:]
