# SPDX-License-Identifier: Apache-2.0
"""Headers that we render are read by the safetensors package, and the other way round."""
import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from same import raw
from samples import DTYPES, of_dtype


def test_package_reads_ours(tool, tmp_path):
    path = tmp_path / "ours.safetensors"
    tool("header", path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "a\\b\t": '"\x01'}
        names = list(file.keys())
    loaded = load_file(path)
    assert set(loaded) == set(names) and len(names) % 3 == 0
    for name, tensor in loaded.items():
        want = {"t": (2, 3), "s": (), "n": (0, 5)}[name[0]]
        assert tuple(tensor.shape) == want
        assert raw(tensor) == b"\1" * (tensor.numel() * tensor.element_size())
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + length) % 4096 == 0


def test_we_read_the_packages(tool, tmp_path):
    tensors = {f"{d}": of_dtype(d, (3, 5), i) for i, d in enumerate(DTYPES) if d not in (
        torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)}
    tensors |= {"scalar": torch.tensor(1.5), "none": torch.empty(0, 3), "é\"\\": torch.ones(2)}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt", "é": "\n"})
    found = json.loads(tool("safetensors", tmp_path / "theirs.safetensors"))
    assert found["metadata"] == {"format": "pt", "é": "\n"}
    data = (tmp_path / "theirs.safetensors").read_bytes()
    assert set(found["entries"]) == set(tensors)
    for name, tensor in tensors.items():
        at = found["entries"][name]
        assert tuple(at["shape"]) == tuple(tensor.shape)
        assert data[at["at"]:at["end"]] == raw(tensor), name


def test_truncated_files_are_refused(tool, tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    for length in (0, 7, 8, 20, len(data) - 1):
        (tmp_path / "b.safetensors").write_bytes(data[:length])
        assert "safetensors" in tool("safetensors", tmp_path / "b.safetensors", fails=True)
