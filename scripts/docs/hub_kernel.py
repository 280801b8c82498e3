#!/usr/bin/env python3
"""Build S2O as a kernel of the Hub, for transformers' `attn_implementation="ORG/s2o"`.

    python -m scripts.docs.hub_kernel --repo ORG/s2o

writes a folder in the layout of the `kernels` package, which docs/hub-kernel.md says how to publish: the runtime, which
imports itself relatively, without its servers and commands; the profiles, by model and GPU; and metadata.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from base64 import b64encode
from pathlib import Path

from calibrate.machine import check_output
from s2o_runtime.command_line import OK, Parser, call_command
from s2o_runtime.errors import InputError
from s2o_runtime.profile import load_profile
from scripts.docs.raw import ROOT

VARIANT = "build/torch-cuda"  # of every torch and CUDA, because nothing is compiled before it runs
LEFT_OUT = (  # servers and commands, and the catalogue, which is `profiles`
    "catalogue", "doctor", "huggingface/sdpa.py", "huggingface/site", "serving/attend.py", "serving/batch.py",
    "serving/server.py", "serving/sources.py", "sglang", "vllm",
)  # fmt: skip


def main() -> int:
    """Build the folder; return an exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", default="ORG/s2o", help="the repository on the Hub; default: %(default)s")
    parser.add_argument("--profiles", type=Path, default=ROOT / "profiles", metavar="FOLDER", help="default: profiles")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub-kernel", metavar="FOLDER")
    args = parser.parse_args()

    def run() -> int:
        build(args.out, args.repo, args.profiles)
        print(f"wrote {args.out}")
        return OK

    return call_command("scripts.docs.hub_kernel", run)


def build(out: Path, repo: str, profiles: Path) -> Path:
    """Write the repository and return the folder of its one variant, which is a package and written anew.

    Raises InputError for what is no name of a repository, and where there is no profile; ProfileError for another file
    of that kind, such as a model's weights; and what `check_output` does for the README, before anything is replaced.
    """
    if not re.fullmatch(r"[\w.-]+/[a-z][a-z0-9-]*", repo):
        raise InputError(
            f"the repository is {repo!r}: expected ORG/NAME, the name in small letters, digits and hyphens"
        )
    found = sorted(profiles.rglob("*.safetensors"))
    if not found:
        raise InputError(f"{profiles} holds no profile: name a folder of s2o-calibrate's files")
    list(map(load_profile, found))  # published to everybody, so no other file, such as a model's weights, may be there
    check_output("--out", out / "README.md")
    runtime = ROOT / "s2o_runtime"
    left_out = {runtime / name for name in LEFT_OUT}
    sources = [path for path in sorted(runtime.rglob("*.py")) if left_out.isdisjoint((path, *path.parents))]
    files = {path.relative_to(runtime): path for path in sources}
    files |= {"catalogue" / path.relative_to(profiles): path for path in found}
    variant = out / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    for to, path in files.items():
        (variant / to).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, variant / to)
    digests = {to.as_posix(): hashlib.sha256(path.read_bytes()).digest() for to, path in files.items()}
    name, contents = repo.partition("/")[2], hashlib.sha256(b"".join(digests.values())).hexdigest()
    metadata = {
        "name": name,
        "id": f"_{name.replace('-', '_')}_cuda_{contents[:7]}",  # the name that it is imported under
        "version": 1,  # transformers asks for this one where a model names no revision
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
        "digest": {"algorithm": "sha256", "files": {to: b64encode(digest).decode() for to, digest in digests.items()}},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    card = Path(__file__).with_name("hub_kernel_card.md").read_text("utf-8")
    (out / "README.md").write_text(card.replace("ORG/s2o", repo), "utf-8")
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")
    return variant


if __name__ == "__main__":
    sys.exit(main())
