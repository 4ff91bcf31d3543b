"""Prints what the CPU build of vLLM needs of other packages, torch's apart: ``python requirements.py WHEEL``.

Its metadata also names torchvision, torchaudio and torchcodec, of which there are no CPU builds, and which generating
text does not need. ``make test-vllm`` installs these requirements, then the wheel by itself.
"""

from __future__ import annotations

import sys
import zipfile
from email.parser import BytesHeaderParser


def requirements(wheel: str) -> list[str]:
    """The wheel's ``Requires-Dist`` lines, but for extras and for torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        headers = BytesHeaderParser().parsebytes(archive.read(name))
    lines = headers.get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and not line.startswith("torch")]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
