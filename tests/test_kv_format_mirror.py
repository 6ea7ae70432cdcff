"""csrc/kv_format.h and flash_mla/kv_cache.py hold the same numbers.

A small program that includes the header prints every constant of every record; no CUDA needed.
"""

import re
from pathlib import Path

import host_cpp

from flash_mla.kv_cache import V4, V32

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc" / "kv_format.h"

STRUCTS = {"V4Record": V4, "V32Record": V32}
# C++ member -> attribute of the Python record; every member of a struct has to be here.
MEMBERS = {
    "kDimQK": "d_qk",
    "kDimV": "dim_v",
    "kBytesPerToken": "bytes_per_token",
    "kNopeDims": "nope_dims",
    "kRopeDims": "rope_dims",
    "kRopeOffset": "rope_offset",
    "kRowBytes": "row_bytes",
    "kScaleGroup": "scale_group",
    "kNumScales": "num_scales",
    "kScaleBytes": "scale_bytes",
    "kScaleOffset": "scale_offset",
    "kScalesAfterRows": "scales_after_rows",
    "kRopeInV": "rope_in_v",
    "kBlockAlign": "block_align",
}
PAGES = (1, 64, 576)


def test_header_has_no_record_and_no_member_that_is_not_compared():
    text = HEADER.read_text()
    assert set(re.findall(r"struct (\w+Record)\b", text)) == set(STRUCTS)
    for body in re.findall(r"struct \w+Record \{(.*?)\n\};", text, re.DOTALL):
        assert set(re.findall(r"static constexpr \w+ (\w+)", body)) == set(MEMBERS)


def test_every_constant_agrees(tmp_path):
    lines = []
    for struct in STRUCTS:
        record = f"flash_mla::{struct}"
        for member in MEMBERS:
            lines.append(f'std::printf("{struct} {member} %d\\n", int({record}::{member}));')
        for page in PAGES:
            lines.append(
                f'std::printf("{struct} {page} %lld\\n", flash_mla::block_bytes<{record}>({page}));'
            )
    printed = host_cpp.run(tmp_path, ["kv_format.h"], lines)

    expected = []
    for struct, record in STRUCTS.items():
        expected += [f"{struct} {m} {int(getattr(record, name))}" for m, name in MEMBERS.items()]
        expected += [f"{struct} {page} {record.block_bytes(page)}" for page in PAGES]
    assert printed == expected
