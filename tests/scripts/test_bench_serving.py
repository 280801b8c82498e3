"""scripts/bench/serving.py against a server that answers at once."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from scripts.bench import serving as bench
from scripts.bench.schema import read


def run(tmp_path, url, *arguments):
    out = tmp_path / "s.json"
    code = bench.main(["--url", url, "--model", "m", *arguments, "--out", str(out)])
    return code, read(bench.ServingFile, json.loads(out.read_text())) if out.exists() else None


ONE_OF_EACH = ["--hits", "0", "--concurrency", "1", "--prompts", "1"]


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
    arguments = ["--lengths", "100", "--hits", "0,0.5", "--concurrency", "1,2", "--prompts", "2"]
    code, file = run(tmp_path, url, *arguments)
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


@pytest.mark.parametrize("length", ["160", "300"], ids=["an error for an answer", "a refusal"])
def test_what_a_server_refuses_loses_nothing_else(length, tmp_path, url, capsys):
    code, file = run(tmp_path, url, "--lengths", f"100,{length},120", *ONE_OF_EACH)
    assert code == 2
    assert [row.length for row in file.served] == [100, 120]
    shown = capsys.readouterr()
    assert "the engine is dead" in shown.err or "the context has 200 tokens" in shown.err
    assert "1 kinds of prompts failed" in shown.err
    assert "first token, ms" in shown.out


def test_a_server_gets_its_key_and_the_file_does_not(tmp_path, url, monkeypatch):
    arguments = [tmp_path, url, "--lengths", "100", *ONE_OF_EACH]
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-the-variable")
    assert run(*arguments)[0] == 0
    assert run(*arguments, "--api-key", "secret-of-the-flag")[0] == 0
    monkeypatch.delenv("OPENAI_API_KEY")
    assert run(*arguments)[0] == 0
    keys = ["Bearer secret-of-the-variable", "Bearer secret-of-the-flag", None]
    assert _Server.keys == [key for key in keys for _ in range(2)]  # of each run, one prompt is not timed
    assert "secret" not in (tmp_path / "s.json").read_text()
