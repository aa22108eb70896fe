# SPDX-License-Identifier: Apache-2.0
"""Plans against numpy and torch: how frameworks cut tensors, done with slicing and
concatenation here and described with pieces and fragments to the plan reader."""

import json
import os
import subprocess

import numpy as np
import pytest
import torch

TORCH = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIDTH = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
GATHER, REPLICAS, AVERAGE, CAST, INLINE = 0, 1, 2, 3, 6


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def strides_of(shape):
    strides, now = [], 1
    for dim in reversed(shape):
        strides.insert(0, now)
        now *= max(dim, 1)
    return strides


def piece(begin, shape, offset, strides, scale=1.0):
    return {"shape": list(shape), "atom_begin": list(begin), "local_offset": offset,
            "local_strides": list(strides), "scale": scale}


def whole(shape):
    return {"shape": list(shape), "pieces": [piece([0] * len(shape), shape, 0, strides_of(shape))]}


def sharded(shape, dim, parts, rank, degree, scale=1.0):
    """Rank's slice of every part of a dim, one after another, and its pieces."""
    local_shape = list(shape)
    local_shape[dim] = sum(parts) // degree
    strides = strides_of(local_shape)
    pieces, at, local_at = [], 0, 0
    for part in parts:
        mine = part // degree
        begin = [0] * len(shape)
        begin[dim] = at + rank * mine
        box = list(shape)
        box[dim] = mine
        pieces.append(piece(begin, box, local_at * strides[dim], strides, scale))
        at, local_at = at + part, local_at + mine
    return {"shape": local_shape, "pieces": pieces}


def cut(tensor, dim, parts, rank, degree):
    pieces = [p.chunk(degree, dim)[rank] for p in tensor.split(parts, dim)]
    return torch.cat(pieces, dim)


class Case:
    def __init__(self, directory, seed, header=37):
        self.directory = directory
        self.random = np.random.default_rng(seed)
        self.blobs = {}
        self.atoms, self.plan, self.expected = [], [], b"H" * header
        self.header = header

    def tensor(self, shape, dtype="fp32"):
        bits = self.random.integers(0, 1 << 32, int(np.prod(shape, dtype=np.int64)), dtype=np.uint32)
        values = torch.from_numpy(bits.view(np.float32).copy())
        values = torch.where(torch.isnan(values), torch.ones_like(values), values)
        return values.to(TORCH[dtype]).reshape(shape)

    def store(self, blob, data):
        """Appends bytes to a file after some rubbish; returns their offset."""
        now = self.blobs.setdefault(blob, bytearray())
        now += bytes(self.random.integers(0, 256, int(self.random.integers(0, 70)), dtype=np.uint8))
        offset = len(now)
        now += data
        return offset

    def fragments(self, local, tensor, dtype, cuts=(), blobs=("a", "b", "c")):
        """Stores a local tensor's flat data in pieces ending at `cuts`."""
        flat, series, begin = tensor.contiguous().reshape(-1), [], 0
        for number, end in enumerate([*sorted(cuts), flat.numel()]):
            if end == begin:
                continue
            blob = blobs[number % len(blobs)]
            offset = self.store(blob, raw(flat[begin:end]))
            series.append({"local": local, "flat_begin": begin, "elements": end - begin,
                           "blob": sorted("abc").index(blob), "offset": offset, "dtype": dtype})
            begin = end
        return series

    def atom(self, shape, dtype, gathers, kind=GATHER, **more):
        self.atoms.append({"dtype": dtype, "shape": list(shape), "kind": kind, "gathers": gathers, **more})
        return len(self.atoms) - 1

    def show(self, atom, local, flat, dtype, begin=0, end=None):
        """`flat` is what the local tensor must hold, before the cast to `dtype`."""
        end = flat.numel() if end is None else end
        self.plan.append({"atom": atom, "local": local, "begin": begin, "end": end, "dtype": dtype})
        values = flat.reshape(-1)[begin:end].to(TORCH[dtype])
        padding = torch.zeros(end - begin - values.numel(), dtype=TORCH[dtype])
        self.expected += raw(torch.cat([values, padding]))

    def check(self):
        for name in "abc":
            with open(os.path.join(self.directory, name), "wb") as file:
                file.write(self.blobs.get(name, b""))
        size = len(self.expected)
        reads = [[0, size + 100]]
        for _ in range(40):
            offset = int(self.random.integers(0, size + 1))
            reads.append([offset, int(self.random.integers(0, min(size - offset, 5000) + 1))])
        answer = run({"root": str(self.directory), "blobs": list("abc"), "header": self.header,
                      "atoms": self.atoms, "plan": self.plan, "reads": reads})
        assert answer.returncode == 0, answer.stderr
        wanted = b"".join(self.expected[o:o + n] for o, n in reads)
        assert answer.stdout == wanted


def run(case):
    return subprocess.run([os.environ["CKPTFS_PLAN_TOOL"]], input=json.dumps(case).encode(), capture_output=True)


def random_cuts(case, numel, count):
    return sorted({int(case.random.integers(0, numel + 1)) for _ in range(count)})


@pytest.mark.parametrize("seed", range(12))
def test_fused_parts_change_tensor_parallel_degree(tmp_path, seed):
    """GQA's fused QKV (parts of differing sizes) and gate/up, along dim 0 or 1, any dtype."""
    case = Case(tmp_path, seed)
    dtype, shown = case.random.choice(["fp32", "bf16", "fp16"], 2)
    parts = [48, 12, 12] if seed % 2 else [24, 24]
    dim = int(case.random.integers(0, 2))
    shape = [sum(parts), 10] if dim == 0 else [10, sum(parts)]
    full = case.tensor(shape, dtype)
    source_tp, target_tp = (int(x) for x in case.random.choice([1, 2, 3, 4, 6], 2))
    gather = {"locals": [], "series": []}
    for rank in range(source_tp):
        gather["locals"].append(sharded(shape, dim, parts, rank, source_tp))
        local = cut(full, dim, parts, rank, source_tp)
        gather["series"] += case.fragments(rank, local, dtype, random_cuts(case, local.numel(), 2))
    atom = case.atom(shape, dtype, [gather])
    for rank in range(target_tp):
        local = sharded(shape, dim, parts, rank, target_tp)
        case.show(atom, local, cut(full, dim, parts, rank, target_tp), shown)
    case.check()


@pytest.mark.parametrize("seed", range(8))
def test_zero_partitions_of_a_padded_vocabulary(tmp_path, seed):
    """TP x ZeRO source; target of another TP, padded to its multiple, cut by another dp,
    with ranks beyond the end."""
    case = Case(tmp_path, seed)
    vocab, hidden = int(case.random.integers(5, 60)), 7
    full = case.tensor([vocab, hidden])

    def padded(tp, multiple):
        rows = -(-vocab // (tp * multiple)) * tp * multiple
        return torch.cat([full, torch.zeros(rows - vocab, hidden)]), rows // tp

    def local_of(rank, rows):
        begin = min(rank * rows, vocab)
        mine = min(rows, vocab - begin)
        return {"shape": [rows, hidden], "pieces": [piece([begin, 0], [mine, hidden], 0, [hidden, 1])] if mine else []}

    source_tp, source_dp = (int(x) for x in case.random.integers(1, 5, 2))
    data, rows = padded(source_tp, 1 + seed % 4)
    data[vocab:] = 123  # padding of a source is unspecified
    gather = {"locals": [], "series": []}
    for rank in range(source_tp):
        gather["locals"].append(local_of(rank, rows))
        local = data[rank * rows:(rank + 1) * rows]
        step = -(-local.numel() // source_dp)
        gather["series"] += case.fragments(rank, local, "fp32", [min(step * i, local.numel()) for i in range(1, source_dp)])
    atom = case.atom([vocab, hidden], "fp32", [gather])
    target_tp, target_dp = int(case.random.integers(1, 5)), int(case.random.integers(1, 9))
    data, rows = padded(target_tp, 8)
    for rank in range(target_tp):
        flat = data[rank * rows:(rank + 1) * rows].reshape(-1)
        step = -(-flat.numel() // target_dp)
        for dp in range(target_dp + 1):  # the last one begins at or beyond the end
            case.show(atom, local_of(rank, rows), flat, "bf16", dp * step, (dp + 1) * step)
    case.check()


@pytest.mark.parametrize("seed", range(6))
def test_views_of_storages(tmp_path, seed):
    """Transposed, sliced and expanded torch views as sources; transposed targets."""
    case = Case(tmp_path, seed)
    storage = case.tensor([6, 5, 8])
    view = [storage.permute(2, 0, 1), storage[1:5, :, ::2], storage.transpose(0, 1),
            storage[:, 2:3, :].expand(6, 4, 8), storage.permute(1, 2, 0)[1:, ::3], storage[0, 0]][seed]
    shape = list(view.shape)
    local = {"shape": [storage.numel()],
             "pieces": [piece([0] * len(shape), shape, view.storage_offset(), view.stride())]}
    gather = {"locals": [local], "series": case.fragments(0, storage, "fp32", random_cuts(case, storage.numel(), 4))}
    atom = case.atom(shape, "fp32", [gather])
    case.show(atom, whole(shape), view, "fp32")
    case.show(atom, whole(shape), view, "fp16")
    reverse = list(reversed(range(len(shape))))
    turned = view.permute(reverse).contiguous()
    target_strides = [strides_of(list(turned.shape))[reverse.index(d)] for d in range(len(shape))]
    target = {"shape": list(turned.shape), "pieces": [piece([0] * len(shape), shape, 0, target_strides)]}
    case.show(atom, target, turned, "bf16")
    case.check()


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_average_is_the_fp32_mean_in_rank_order(tmp_path, slices):
    case = Case(tmp_path, slices)
    shape = [3, 3001]
    tensors = [torch.from_numpy(case.random.standard_normal(shape, dtype=np.float32)) for _ in range(slices)]
    tensors[0][0, 0] = -0.0
    gathers = []
    for tensor in tensors:
        gathers.append({"locals": [whole(shape)], "series": case.fragments(0, tensor, "fp32", random_cuts(case, tensor.numel(), 2))})
    atom = case.atom(shape, "fp32", gathers, AVERAGE)
    mean = sum(tensors) / len(tensors)  # ds_to_universal.py
    case.show(atom, whole(shape), mean, "fp32")
    case.show(atom, sharded(shape, 0, [3], 1, 3), mean[1:2], "bf16")
    case.check()


def test_replicas_show_the_first(tmp_path):
    case = Case(tmp_path, 1)
    tensor = case.tensor([50])
    gathers = [{"locals": [whole([50])], "series": case.fragments(0, t, "fp32")} for t in (tensor, tensor)]
    case.show(case.atom([50], "fp32", gathers, REPLICAS), whole([50]), tensor, "fp32")
    case.check()


@pytest.mark.parametrize("shown", ["fp32", "bf16", "fp16", "fp64"])
def test_a_derived_weight_is_rounded_to_its_own_dtype_first(tmp_path, shown):
    case = Case(tmp_path, 5)
    master = case.tensor([999])
    gather = {"locals": [whole([999])], "series": case.fragments(0, master, "fp32")}
    of = case.atom([999], "fp32", [gather])
    derived = case.atom([999], "bf16", [], CAST, of=of)
    case.show(derived, whole([999]), master.to(torch.bfloat16), shown)
    case.check()


@pytest.mark.parametrize("source_tp,target_tp", [(1, 3), (3, 1), (2, 4), (4, 3), (3, 6), (2, 2)])
def test_scaled_biases(tmp_path, source_tp, target_tp):
    """AutoTP stores row-parallel biases divided by the degree."""
    case = Case(tmp_path, 9)
    bias = torch.from_numpy(case.random.standard_normal(400, dtype=np.float32))
    stored = bias / source_tp
    local = {"shape": [400], "pieces": [piece([0], [400], 0, [1], 1 / source_tp)]}
    atom = case.atom([400], "fp32", [{"locals": [local], "series": case.fragments(0, stored, "fp32")}])
    target = {"shape": [400], "pieces": [piece([0], [400], 0, [1], 1 / target_tp)]}
    if source_tp == target_tp:
        shown = stored
    elif target_tp % source_tp == 0:
        shown = stored / (target_tp // source_tp)
    else:
        shown = stored * np.float32((1 / target_tp) / (1 / source_tp))
    case.show(atom, target, shown, "fp32")
    case.check()


@pytest.mark.parametrize("shape", [[], [0], [3, 0, 2], [1], [1, 1, 1]])
def test_scalars_and_empty_tensors(tmp_path, shape):
    case = Case(tmp_path, 3)
    tensor = case.tensor(shape)
    atom = case.atom(shape, "fp32", [{"locals": [whole(shape)], "series": case.fragments(0, tensor, "fp32")}])
    case.show(atom, whole(shape), tensor, "bf16")
    inline = case.atom(shape, "fp32", [], INLINE, inline=list(raw(tensor)))
    case.show(inline, whole(shape), tensor, "fp32")
    case.show(inline, whole(shape), tensor, "fp32", 0, 5)
    case.check()


def test_stacked_experts(tmp_path):
    """A fused [experts, out, in] tensor out of one file per expert, shown per ep rank."""
    case = Case(tmp_path, 4)
    full = case.tensor([8, 6, 5], "bf16")
    gather = {"locals": [], "series": []}
    for expert in range(8):
        gather["locals"].append({"shape": [6, 5], "pieces": [piece([expert, 0, 0], [1, 6, 5], 0, [0, 5, 1])]})
        gather["series"] += case.fragments(expert, full[expert], "bf16", [], blobs="abc"[expert % 3])
    atom = case.atom([8, 6, 5], "bf16", [gather])
    for rank in range(4):
        local = {"shape": [2, 6, 5], "pieces": [piece([2 * rank, 0, 0], [2, 6, 5], 0, [30, 5, 1])]}
        case.show(atom, local, full[2 * rank:2 * rank + 2], "bf16")
    case.check()


def test_series_over_ranks(tmp_path):
    """One arithmetic series over many files stands for a fragment per rank."""
    case = Case(tmp_path, 6)
    tensor = case.tensor([3 * 40 + 7])
    offset = 24
    for number, name in enumerate("abc"):
        part = tensor[number * 40:(number + 1) * 40]
        case.blobs[name] = bytearray(b"\xee" * (offset + 8 * number) + raw(part) + b"\xee" * 5)
    last = case.store("a", raw(tensor[120:]))
    series = [{"local": 0, "count": 3, "flat_begin": 0, "flat_step": 40, "elements": 40, "blob": 0,
               "blob_step": 1, "offset": offset, "offset_step": 8, "dtype": "fp32"},
              {"local": 0, "flat_begin": 120, "elements": 7, "blob": 0, "offset": last, "dtype": "fp32"}]
    atom = case.atom([127], "fp32", [{"locals": [whole([127])], "series": series}])
    case.show(atom, whole([127]), tensor, "fp32")
    case.show(atom, whole([127]), tensor, "bf16", 30, 130)
    case.check()


def test_offsets_beyond_four_gib(tmp_path):
    """A sparse file: values at 5 and 9 GiB, zeros between, a window deep inside."""
    gib = 1 << 30
    path = tmp_path / "sparse"
    values = torch.arange(1, 1001, dtype=torch.float32)
    with open(path, "wb") as file:
        for at in (5 * gib, 9 * gib):
            file.seek(at)
            file.write(raw(values))
        file.truncate(10 * gib)
    elements = 10 * gib // 4
    rows = elements // 1024
    series = [{"local": 0, "flat_begin": 0, "elements": elements, "blob": 0, "offset": 0, "dtype": "fp32"}]
    atoms = [{"dtype": "fp32", "shape": [rows, 1024], "kind": GATHER,
              "gathers": [{"locals": [whole([rows, 1024])], "series": series}]}]
    column = {"shape": [rows, 2], "pieces": [piece([0, 8], [rows, 2], 0, [2, 1])]}
    plan = [{"atom": 0, "local": whole([rows, 1024]), "begin": 0, "end": elements, "dtype": "fp32"},
            {"atom": 0, "local": column, "begin": 0, "end": rows * 2, "dtype": "bf16"}]
    second = elements * 4
    reads = [[5 * gib - 8, 4016], [9 * gib + 400, 80], [10 * gib - 4, 4],
             [second + 9 * gib // 4096 * 4, 4]]
    answer = run({"root": str(tmp_path), "blobs": ["sparse"], "header": 0, "atoms": atoms,
                  "plan": plan, "reads": reads})
    assert answer.returncode == 0, answer.stderr
    around = b"\0" * 8 + raw(values) + b"\0" * 8
    assert answer.stdout == around + raw(values[100:120]) + b"\0" * 4 + raw(values[8:10].to(torch.bfloat16))


def test_parallel_reads_are_the_same_bytes(tmp_path):
    case = Case(tmp_path, 8, header=4097)
    tensor = case.tensor([3000, 2000])
    case.store("a", b"")
    gather = {"locals": [whole([3000, 2000])], "series": case.fragments(0, tensor, "fp32", random_cuts(case, 6000000, 5))}
    atom = case.atom([3000, 2000], "fp32", [gather])
    case.show(atom, sharded([3000, 2000], 1, [2000], 1, 4), tensor[:, 500:1000], "fp32")
    case.show(atom, whole([3000, 2000]), tensor, "bf16")
    for name in "abc":
        (tmp_path / name).write_bytes(case.blobs.get(name, b""))
    reads = [[0, len(case.expected)], [4095, len(case.expected) - 5000]]
    answer = run({"root": str(tmp_path), "blobs": list("abc"), "header": 4097, "atoms": case.atoms,
                  "plan": case.plan, "reads": reads, "parallel": True})
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == b"".join(case.expected[o:o + n] for o, n in reads)


@pytest.mark.parametrize("dtype,shown", [("int32", "fp32"), ("fp8_e4m3", "bf16"), ("bool", "uint8")])
def test_other_types_are_never_cast(tmp_path, dtype, shown):
    (tmp_path / "a").write_bytes(b"\0" * 64)
    series = [{"local": 0, "flat_begin": 0, "elements": 4, "blob": 0, "offset": 0, "dtype": dtype}]
    case = {"root": str(tmp_path), "blobs": ["a"], "header": 0, "reads": [[0, 16]],
            "atoms": [{"dtype": dtype, "shape": [4], "kind": GATHER,
                       "gathers": [{"locals": [whole([4])], "series": series}]}],
            "plan": [{"atom": 0, "local": whole([4]), "begin": 0, "end": 4, "dtype": shown}]}
    answer = run(case)
    assert answer.returncode == 1
    assert dtype in answer.stderr.decode()


def test_a_hole_in_the_source_is_an_error_not_zeros(tmp_path):
    (tmp_path / "a").write_bytes(b"\1" * 64)
    series = [{"local": 0, "flat_begin": 0, "elements": 3, "blob": 0, "offset": 0, "dtype": "fp32"}]
    case = {"root": str(tmp_path), "blobs": ["a"], "header": 0, "reads": [[0, 12]],
            "atoms": [{"dtype": "fp32", "shape": [4], "kind": GATHER,
                       "gathers": [{"locals": [whole([4])], "series": series}]}],
            "plan": [{"atom": 0, "local": whole([4]), "begin": 0, "end": 4, "dtype": "fp32"}]}
    assert run(case).stdout == b"\1" * 12
    case["reads"] = [[8, 8]]
    answer = run(case)
    assert answer.returncode == 1 and b"not stored anywhere" in answer.stderr
