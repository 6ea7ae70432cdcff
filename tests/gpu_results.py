"""benchmark/results/gpu_tests.json: which GPU passed the GPU tests, and on which kernel sources."""

import datetime
import hashlib
import json
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PATH = ROOT / "benchmark" / "results" / "gpu_tests.json"


def csrc_sha256(root: Path = ROOT) -> str:
    """sha256 over every file under csrc/, in the order of its posix path from the repository root.

    Each file is hashed as path, NUL, bytes, NUL.
    """
    digest = hashlib.sha256()
    files = [p.relative_to(root) for p in (root / "csrc").rglob("*") if p.is_file()]
    for path in sorted(files, key=lambda p: p.as_posix()):
        digest.update(path.as_posix().encode() + b"\0" + (root / path).read_bytes() + b"\0")
    return digest.hexdigest()


def write(path: Path, passed: int, failed: int, skipped: int) -> None:
    """The counts are those of the tests marked ``gpu``."""
    results = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "csrc_sha256": csrc_sha256(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
