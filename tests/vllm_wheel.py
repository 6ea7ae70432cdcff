"""Two files of vLLM's wheel that tests need: FlashMLA's Python interface as vLLM vendors it, and FlashMLA's library.

They come from PyPI once and stay in ``.cache/vllm-0.33.0/`` (4 MB of the wheel's 340), which git ignores. Where there
is no network, copy that folder there, or let FLASH_MLA_VLLM_WHEEL_DIR name a folder with the wheel, packed or unpacked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

VERSION = "0.33.0"
INTERFACE = "vllm/third_party/flashmla/flash_mla_interface.py"
LIBRARY = "vllm/_flashmla_C.abi3.so"
FILES = (INTERFACE, LIBRARY)

CACHE = Path(__file__).resolve().parent.parent / ".cache" / f"vllm-{VERSION}"


def fetch() -> Path:
    """The folder in which FILES lie.

    Skips the calling test where they cannot be had. With FLASH_MLA_REQUIRE_VLLM set, as in CI, that is a failure.
    """
    given = os.environ.get("FLASH_MLA_VLLM_WHEEL_DIR")
    folder = Path(given) if given else CACHE
    if _is_complete(folder):
        return folder
    if given:
        wheels = sorted(folder.glob(f"vllm-{VERSION}-*.whl"))
        if not wheels:
            pytest.fail(f"FLASH_MLA_VLLM_WHEEL_DIR: {given} holds neither vllm-{VERSION}-*.whl nor {', '.join(FILES)}")
        _extract(wheels[0])
        return CACHE
    _download()
    return CACHE


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _download() -> None:
    CACHE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        # vLLM asks for a newer Python than this project; the two files are the same for all.
        command += ["--ignore-requires-python", "--disable-pip-version-check", "--dest", folder, f"vllm=={VERSION}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            said = (done.stdout.strip().splitlines() or ["no output"])[-1]
            reason = f"vLLM {VERSION}'s wheel could not be fetched: {said}"
            if os.environ.get("FLASH_MLA_REQUIRE_VLLM"):
                pytest.fail(reason)
            pytest.skip(reason)
        _extract(next(Path(folder).glob("*.whl")))


def _extract(wheel: Path) -> None:
    """Into the cache. A file appears there whole or not at all."""
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            destination = CACHE / name
            destination.parent.mkdir(parents=True, exist_ok=True)
            temporary = destination.with_name(f"{destination.name}.new")
            temporary.write_bytes(archive.read(name))
            temporary.replace(destination)
