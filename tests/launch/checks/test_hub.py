"""A model that is named by its hub id gets the checks of one in a directory; its weights are not fetched for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from async_rl.config.loading import load_config
from benchmarks.memory_table import MODELS
from tests.generator.tiny_model import write_model

COMMIT = "a" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A hub on loopback with the models ``lab/NAME`` of the directory ``hub``."""
    root = tmp_path / "hub"

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:3] == ["api", "models", "lab"]:
                names = [file.name for file in (root / parts[3]).iterdir()]
                files = [{"type": "file", "path": name, "size": 1, "oid": COMMIT, "rfilename": name} for name in names]
                model = {"id": f"lab/{parts[3]}", "sha": COMMIT, "siblings": files}
                self.answer(json.dumps(files if parts[4] == "tree" else model).encode())
            elif parts[0] == "lab":
                self.answer((root / parts[1] / parts[-1]).read_bytes())
            else:
                self.send_error(404)

        do_HEAD = do_GET  # noqa: N815 - the name that is called

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_model_of_the_hub_is_checked_by_its_files_and_its_weights_are_not_fetched(tmp_path: Path, hub: str):
    write_model(tmp_path / "hub" / "whole")
    write_model(tmp_path / "hub" / "pickled")
    (tmp_path / "hub" / "pickled" / "model.safetensors").rename(tmp_path / "hub" / "pickled" / "pytorch_model.bin")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "gt_answer": "2"}\n')
    settings = ["--set", "data.train=rows.jsonl", "--set", "learner.steps=1", "--set", "sampling.max_new_tokens=8"]
    settings += ["--set", "sampling.max_prompt_tokens=100"]
    (tmp_path / "run.toml").write_text('[run]\ndir = "run"\n')

    def problems(model: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "async_rl", "launch", "run.toml", "--dry-run", "--json", *settings]
        done = subprocess.run(
            [*command, "--set", f"model.path={model}"], capture_output=True, text=True, timeout=240, cwd=tmp_path,
            env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    code, text = problems("lab/whole")
    assert (code, "not predicted" in text) == (0, False), text
    assert "expected *.safetensors in lab/pickled, got none" in problems("lab/pickled")[1]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


PLANS = """
import sys
from async_rl.cli.main import main
for model in sys.argv[1:]:
    options = ["--model", f"lab/{model}", "--data", "rows.jsonl", "--gpus", "8xH100"]
    for words in (["init", f"{model}.toml", *options], ["doctor", f"{model}.toml", "--on", "8xH100"]):
        try:
            main(words)
        except SystemExit as leaving:
            assert not leaving.code, words
"""


def test_a_model_of_the_hub_is_planned_for_a_node_that_is_not_here_by_its_config_alone(tmp_path: Path, hub: str):
    models = ("0.5B", "7B", "32B")
    for model in models:
        (tmp_path / "hub" / model).mkdir(parents=True)
        (tmp_path / "hub" / model / "config.json").write_text(json.dumps(MODELS[f"Qwen2.5 {model}"]))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "gt_answer": "2"}\n')
    done = subprocess.run(
        [sys.executable, "-c", PLANS, *models], capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no check failed\n") == 3, done.stdout
    said = [load_config(tmp_path / f"{model}.toml").model.gradient_checkpointing for model in models]
    assert said == ["none", "attention", "full"]
