"""scripts/bench/serving.py against a server that answers at once."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from scripts.bench import serving as bench
from scripts.bench.schema import read


def run(tmp_path, *arguments):
    out = tmp_path / "s.json"
    code = bench.main([*arguments, "--out", str(out)])
    return code, read(bench.ServingFile, json.loads(out.read_text())) if out.exists() else None


class _Server(BaseHTTPRequestHandler):
    seen: ClassVar[list] = []
    keys: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _Server.seen.append((self.path, body))
        _Server.keys.append(self.headers["Authorization"])
        words = len(body["prompt"].split())
        self.send_response(400 if words > 200 else 200)
        self.end_headers()
        if words > 200:
            self.wfile.write(b'{"error": {"message": "the context has 200 tokens"}}')
        elif words > 150:
            self.wfile.write(b'data: {"error": {"message": "the engine is dead"}}\n\ndata: [DONE]\n\n')
        else:
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    _Server.seen, _Server.keys = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_server_is_sent_prompts_with_a_shared_beginning(tmp_path, url, capsys):
    arguments = ["--url", url, "--model", "m", "--lengths", "100", "--hits", "0,0.5", "--concurrency", "1,2"]
    code, file = run(tmp_path, *arguments, "--prompts", "2")
    assert code == 0
    assert [(row.cached, row.concurrency) for row in file.served] == [(0.0, 1), (0.0, 2), (0.5, 1), (0.5, 2)]
    assert all(row.first_token_seconds > 0 and row.tokens_per_second > 0 for row in file.served)
    path, body = _Server.seen[-1]
    assert (path, body["model"], body["stream"], len(body["prompt"].split())) == ("/v1/completions", "m", True, 100)
    lengths = [len(body["prompt"].split()) for _, body in _Server.seen]
    assert lengths == [100] * 6 + [50, 100, 100, 100] * 2  # the first of each kind fill the cache and are not timed
    beginnings = {tuple(body["prompt"].split()[:50]) for _, body in _Server.seen[-4:]}
    assert len(beginnings) == 1
    assert len({body["prompt"] for _, body in _Server.seen}) == len(_Server.seen)
    assert "first token, ms" in capsys.readouterr().out


def test_a_server_has_no_prompt_of_an_earlier_run_in_its_cache(tmp_path, url):
    arguments = ["--url", url, "--model", "m", "--lengths", "100", "--hits", "0,0.5", "--concurrency", "1"]
    prompts = []
    for _ in range(2):
        _Server.seen.clear()
        run(tmp_path, *arguments, "--prompts", "1")
        prompts.append([body["prompt"].split() for _, body in _Server.seen])
    first, again = prompts
    assert len(first) == len(again)
    assert all(a[: bench.FRESH] != b[: bench.FRESH] for a, b in zip(first, again, strict=True))
    assert first[0][bench.FRESH :] == again[0][bench.FRESH :]  # what follows is of the seed


@pytest.mark.parametrize("length", ["160", "300"], ids=["an error for an answer", "a refusal"])
def test_what_a_server_refuses_loses_nothing_else(length, tmp_path, url, capsys):
    arguments = ["--url", url, "--model", "m", "--lengths", f"100,{length},120", "--hits", "0", "--concurrency", "1"]
    code, file = run(tmp_path, *arguments, "--prompts", "1")
    assert code == 2
    assert [row.length for row in file.served] == [100, 120]
    shown = capsys.readouterr()
    assert "the engine is dead" in shown.err or "the context has 200 tokens" in shown.err
    assert "1 kinds of prompts failed" in shown.err
    assert "first token, ms" in shown.out


def test_finished_rows_are_in_the_file_while_the_next_are_measured(tmp_path, url, monkeypatch):
    """So that a bench that is killed loses one kind of prompt."""
    out, seen = tmp_path / "s.json", []
    sent = bench.first_token_seconds

    def sends(args, prompt):
        seen.append(len(read(bench.ServingFile, json.loads(out.read_text())).served) if out.exists() else 0)
        return sent(args, prompt)

    monkeypatch.setattr(bench, "first_token_seconds", sends)
    arguments = ["--url", url, "--model", "m", "--lengths", "100,120", "--hits", "0", "--concurrency", "1"]
    run(tmp_path, *arguments, "--prompts", "1")
    assert seen == [0, 0, 1, 1]  # one of each is not timed


def test_a_server_gets_its_key_and_the_file_does_not(tmp_path, url, monkeypatch):
    arguments = ["--url", url, "--model", "m", "--lengths", "100", "--hits", "0", "--concurrency", "1"]
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-the-variable")
    assert run(tmp_path, *arguments, "--prompts", "1")[0] == 0
    assert run(tmp_path, *arguments, "--prompts", "1", "--api-key", "secret-of-the-flag")[0] == 0
    monkeypatch.delenv("OPENAI_API_KEY")
    assert run(tmp_path, *arguments, "--prompts", "1")[0] == 0
    keys = ["Bearer secret-of-the-variable", "Bearer secret-of-the-flag", None]
    assert _Server.keys == [key for key in keys for _ in range(2)]  # of each run, one prompt is not timed
    assert "secret" not in (tmp_path / "s.json").read_text()


def test_a_server_that_is_not_there_is_one_sentence(tmp_path, capsys):
    code, _ = run(tmp_path, "--url", "http://127.0.0.1:9/v1", "--model", "m", "--lengths", "100")
    assert code == 2
    assert "did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--prompts 0", "use at least 1"),
        ("--prompts 2", "4 at a time"),
        ("--concurrency 0", "at least 1"),
        ("--lengths 0,100", "at least 1"),
        ("--hits 0,1.5", "from 0 to 1"),
        ("--hits=-0.5", "from 0 to 1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_before_a_prompt_is_sent(wrong, said, tmp_path, url, capsys):
    assert run(tmp_path, "--url", url, "--model", "m", "--lengths", "100", *wrong.split()) == (2, None)
    assert said in capsys.readouterr().err
    assert not _Server.seen
