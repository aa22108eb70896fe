# SPDX-License-Identifier: Apache-2.0
"""Files that torch writes are read, located and printed back bit for bit."""
import io
import os
import pickle
import pickletools
import warnings
import zipfile

import pytest
import torch
from torch.utils.serialization import config

from same import assert_same, raw, tensors_of
from samples import SAMPLES

warnings.filterwarnings("ignore")

# Zip files with every protocol that torch.save can be told, and the legacy container.
FORMS = {f"zip{p}": {"pickle_protocol": p} for p in (2, 3, 4, 5)} | {
    f"legacy{p}": {"pickle_protocol": p, "_use_new_zipfile_serialization": False} for p in (2, 4)}
WEIGHTS_ONLY_OPCODES = set(
    "PROTO GLOBAL NEWOBJ REDUCE BUILD APPEND APPENDS SETITEM SETITEMS MARK TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "NONE NEWTRUE NEWFALSE EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET BININT BININT1 BININT2 BINFLOAT "
    "BINUNICODE SHORT_BINSTRING BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT LONG1 STOP".split())


def saved(value, path, **form):
    if not form.get("_use_new_zipfile_serialization", True):  # torch cannot load these from the legacy container
        untyped = ("float8", "uint16", "uint32", "uint64", "fp8p", "storage")
        value = {k: v for k, v in value.items() if not any(name in str(k) for name in untyped)}
    torch.save(value, path, **form)
    return path


def load(path, **options):
    return torch.load(path, weights_only=False, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_repacked(tool, tmp_path, sample, form):
    """The tree printed back, in an archive of our own, loads as what torch loads from its file."""
    original = saved(SAMPLES[sample](), tmp_path / "a.pt", **FORMS[form])
    want = load(original)
    repacked = tmp_path / "b.pt"
    tool("repack", original, repacked)
    assert_same_or_cyclic(want, load(repacked))
    assert_same_or_cyclic(want, load(repacked, mmap=True))
    if sample != "opaque":  # quantised and sparse tensors have no meta form
        load(repacked, map_location="meta")
    with config.patch({"load.calculate_storage_offsets": True}):
        assert_same_or_cyclic(want, load(repacked))
    with open(repacked, "rb") as file:
        assert_same_or_cyclic(want, load(io.BytesIO(file.read())))


def assert_same_or_cyclic(a, b):
    if isinstance(a, dict) and "cycle" in a:  # compared by hand, cycles never end
        assert b["cycle"]["self"] is b["cycle"] and b["ring"][1][1] is b["ring"]
        assert b["ring"][1][0]["ring"] is b["ring"]
        assert b["shared"][0] is b["shared"][1] and b["shared"][2]["again"] is b["shared"][0]
        a = {k: v for k, v in a.items() if k not in ("cycle", "ring")}
        b = {k: v for k, v in b.items() if k not in ("cycle", "ring")}
    if isinstance(a, dict) and "itself" in a:
        assert b["itself"].itself is b["itself"] and b["itself"].y == a["itself"].y
        a = {k: v for k, v in a.items() if k != "itself"}
        b = {k: v for k, v in b.items() if k != "itself"}
    assert_same(a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sample", ["dtypes", "views", "tensors"])
def test_located(tool, tmp_path, sample, form):
    """The bytes at the located offsets, read with the located strides, are the tensor."""
    path = saved(SAMPLES[sample](), tmp_path / "a.pt", **FORMS[form])
    found = tool.dump(path)["tensors"]
    data = path.read_bytes()
    want = dict(tensors_of(load(path)))
    assert set(found) == set(want)
    for name, tensor in want.items():
        at = found[name]
        assert tuple(at["shape"]) == tuple(tensor.shape) and at["dtype"] == str(tensor.dtype)[6:]
        assert "error" not in at, name
        storage = torch.frombuffer(bytearray(data[at["storage_at"]:at["storage_at"] + at["storage_bytes"]] + b"\0" * 16),
                                   dtype=tensor.dtype)
        view = torch.as_strided(storage, at["shape"], at["strides"], at["offset"])
        assert raw(view) == raw(tensor), name
        assert at["at"] == at["storage_at"] + at["offset"] * tensor.element_size()


def test_offsets_are_torchs(tool, tmp_path):
    path = saved(SAMPLES["views"](), tmp_path / "a.pt")
    reader = torch._C.PyTorchFileReader(str(path))
    for at in tool.dump(path)["tensors"].values():
        assert reader.get_record_offset(f"data/{at['key']}") == at["storage_at"]


@pytest.mark.parametrize("sample", ["dtypes", "views", "tensors", "opaque"])
@pytest.mark.parametrize("form", ["zip2", "legacy2"])
def test_documents(tool, tmp_path, sample, form):
    """By way of a document tensors become contiguous and nothing else changes."""
    path = saved(SAMPLES[sample](), tmp_path / "a.pt", **FORMS[form])
    tool("document", path, tmp_path / "b.pt")
    assert_same(load(path), load(tmp_path / "b.pt"))


def test_weights_only(tool, tmp_path):
    value = {"dtypes": SAMPLES["dtypes"](), "views": SAMPLES["views"](), "size": torch.Size([1, 2]),
             "set": {1, 2}, "bytes": b"\x00\xff", "array": bytearray(b"ab"), "big": 2**100,
             "ordered": SAMPLES["containers"]()["ordered"], "complex": 2j, "int64": 2**40}
    for protocol in (2, 4, 5):
        path = saved(value, tmp_path / "a.pt", pickle_protocol=protocol)
        tool("repack", path, tmp_path / "b.pt")
        for options in ({}, {"mmap": True}, {"map_location": "meta"}):
            again = torch.load(tmp_path / "b.pt", weights_only=True, **options)
            if "map_location" not in options:
                assert_same(value, again)


@pytest.mark.parametrize("sample", SAMPLES)
def test_only_opcodes_of_weights_only(tool, tmp_path, sample):
    path = saved(SAMPLES[sample](), tmp_path / "a.pt", pickle_protocol=5)
    tool("print", path, tmp_path / "b.pkl")
    names = {op.name for op, _, _ in pickletools.genops((tmp_path / "b.pkl").read_bytes())}
    assert names <= WEIGHTS_ONLY_OPCODES, names - WEIGHTS_ONLY_OPCODES


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("sample", ["containers", "classes"])
def test_bare_pickles(tool, tmp_path, sample, protocol):
    value = SAMPLES[sample]()
    if sample == "classes":
        del value["plain"]
        if protocol < 2:
            del value["slots"], value["keyword"]
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(value, protocol))
    tool("pickle", tmp_path / "a.pkl", tmp_path / "b.pkl")
    assert_same_or_cyclic(pickle.loads((tmp_path / "a.pkl").read_bytes()),
                          pickle.loads((tmp_path / "b.pkl").read_bytes()))
    tool("pickle", tmp_path / "b.pkl", tmp_path / "c.pkl")
    tool("pickle", tmp_path / "c.pkl", tmp_path / "d.pkl")  # printing reaches a fixed point
    assert (tmp_path / "c.pkl").read_bytes() == (tmp_path / "d.pkl").read_bytes()


@pytest.mark.parametrize("older", [b"\x80\x02U\x03abcq\x00.", b"S'it\\'s \\x41'\np0\n.", b"V\\u00e9 x\n.",
                                   b"(I1\nI00\nL-123456789012345678901234567890L\nF1.5e3\nl.",
                                   b"(lp0\nI5\naI6\na.", b"(dp0\nS'a'\nI1\ns.", b"}(K\x01K\x02u2.",
                                   b"(K\x01K\x021K\x03.", b"K\x01K\x020.", b"(i__builtin__\ncomplex\np0\n.",
                                   b"(c__builtin__\ncomplex\nK\x01o.", b"T\x03\x00\x00\x00abc."])
def test_old_spellings(tool, tmp_path, older):
    (tmp_path / "a.pkl").write_bytes(older)
    tool("pickle", tmp_path / "a.pkl", tmp_path / "b.pkl")
    assert pickle.loads(older, encoding="utf-8") == pickle.loads((tmp_path / "b.pkl").read_bytes())


def test_archive_is_listed_by_zipfile(tool, tmp_path):
    path = saved({"a": torch.arange(10.0), "none": torch.empty(0)}, tmp_path / "a.pt")
    tool("repack", path, tmp_path / "b.pt")
    listing = zipfile.ZipFile(tmp_path / "b.pt")
    assert listing.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/data/0",
                                  "archive/data/1", "archive/version"]
    reader = torch._C.PyTorchFileReader(str(tmp_path / "b.pt"))
    for record in ("data.pkl", "data/0", "data/1", "version"):
        assert reader.get_record_offset(record) % 64 == 0


@pytest.mark.parametrize("bytes_each", [2**32 - 1, 2**32, 2**32 + 8])
def test_beyond_four_gib(tool, tmp_path, bytes_each):
    """Records and offsets around and beyond 2^32, in a sparse file."""
    path = tmp_path / "big.pt"
    tool("big", path, bytes_each)
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded["t0"].numel() == loaded["t1"].numel() == bytes_each
    assert loaded["t2"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert torch.load(path, map_location="meta")["t1"].numel() == bytes_each
    assert [i.file_size for i in zipfile.ZipFile(path).infolist() if "data/" in i.filename] == [bytes_each] * 2 + [8]
    found = tool.dump(path)["tensors"]
    reader = torch._C.PyTorchFileReader(str(path))
    for i in range(3):
        assert found[f"/t{i}"]["storage_at"] == reader.get_record_offset(f"data/{i}")


def test_torch_zip64_is_read(tool, tmp_path):
    """A record > 4 GiB as torch itself lays it out (skip_data leaves holes)."""
    path = tmp_path / "a.pt"
    value = {"a": torch.empty(2**32 + 64, dtype=torch.uint8), "b": torch.empty(100)}
    with torch.serialization.skip_data():
        torch.save(value, path)
    found = tool.dump(path)["tensors"]
    reader = torch._C.PyTorchFileReader(str(path))
    assert [found["/a"]["storage_at"], found["/b"]["storage_at"]] == [
        reader.get_record_offset("data/0"), reader.get_record_offset("data/1")]


def test_other_writers_of_zips(tool, tmp_path):
    """Top folder of any name; records as Python's zipfile lays them out."""
    torch.save({"a": torch.arange(5)}, tmp_path / "a.pt")
    original = zipfile.ZipFile(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_STORED) as out:
        for info in original.infolist():
            out.writestr(info.filename.replace("a/", "Ünï cødé.x/", 1), original.read(info))
    assert torch.equal(load(tmp_path / "b.pt")["a"], torch.arange(5))
    at = tool.dump(tmp_path / "b.pt")["tensors"]["/a"]["at"]
    assert torch.frombuffer(bytearray((tmp_path / "b.pt").read_bytes()[at:at + 40]), dtype=torch.int64).tolist() == list(range(5))


def test_fixture_checkpoints(tool, tmp_path):
    """Real checkpoints, where CKPTFS_CHECKPOINTS names a directory of them."""
    root = os.environ.get("CKPTFS_CHECKPOINTS")
    if not root:
        pytest.skip("CKPTFS_CHECKPOINTS is not set")
    files = sorted(os.path.join(d, f) for d, _, fs in os.walk(root) for f in fs if f.endswith(".pt"))
    assert files
    for path in files:
        want = load(path, map_location="cpu")
        for verb in ("repack", "document"):
            tool(verb, path, tmp_path / "b.pt")
            assert_same(want, load(tmp_path / "b.pt"), path)
