"""The hash of the kernel sources in gpu_tests.json is the documented one."""

import hashlib

import gpu_results


def test_csrc_sha256_is_over_paths_and_bytes_in_posix_order(tmp_path):
    # "a-b/x" sorts before "a/x" as a string ('-' < '/') but after it as a sequence of parts.
    files = {"csrc/a-b/x.h": b"1", "csrc/a/x.h": b"2\n", "csrc/plan.h": b""}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "setup.py").write_bytes(b"not under csrc")
    expected = b"csrc/a-b/x.h\x001\x00" b"csrc/a/x.h\x002\n\x00" b"csrc/plan.h\x00\x00"
    assert gpu_results.csrc_sha256(tmp_path) == hashlib.sha256(expected).hexdigest()
