# SPDX-License-Identifier: Apache-2.0
"""Objects that torch.save can write, by name."""
import argparse
import collections
import datetime
import pathlib
from functools import partial

import numpy
import torch

from pickled_classes import (Annotated, Colour, DictOf, Keyword, ListOf, Outer, Plain, Slots, Stage,
                             Weights)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]


def of_dtype(dtype, shape, seed=0):
    """Deterministic bytes; bool only 0 and 1."""
    width = torch.empty((), dtype=dtype).element_size()
    count = int(numpy.prod(shape, dtype=numpy.int64)) * width
    data = numpy.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count, dtype=numpy.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def dtypes():
    return {f"{d}": of_dtype(d, (3, 5), i) for i, d in enumerate(DTYPES)} | {
        f"{d}/scalar": of_dtype(d, (), i) for i, d in enumerate(DTYPES)} | {
        f"{d}/none": of_dtype(d, (0, 4)) for d in DTYPES}


def views():
    base = torch.arange(1000, dtype=torch.float32)
    half = torch.arange(64, dtype=torch.bfloat16)
    return {
        "base": base, "row": base[100:200].view(10, 10), "column": base.view(10, 100).t(),
        "step": base[3::7], "again": base, "expand": base[5:6].expand(4, 6),
        "empty": base[1000:], "half": half[1:33:2], "half2": half.view(8, 8)[2:4, 3:5],
        "list": [base[1:2], (half[60:],)],
    }


def containers():
    shared = [1, 2]
    cycle = {"self": None}
    cycle["self"] = cycle
    ring = [1]
    ring.append(({"ring": ring}, ring))
    return {
        "none": None, "true": True, "false": False, 5: "five", -7: "minus",
        (1, "a"): frozenset({1, 2}), 2.5: {1, 2, 3}, b"bytes": bytearray(b"\x00\xff\x80abc"),
        "ints": [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -2**31, 2**31, 2**40, -2**40,
                 2**63 - 1, -2**63, 2**63, -2**63 - 1, 2**64, -2**100, 10**50, 2**2000, -2**2031],
        "floats": [0.0, -0.0, 1.5, float("inf"), float("-inf"), 1e-320, 3.141592653589793],
        "text": ["", "é", "日本", "\U0001f600", "a\nb\\u0041'\"", "\x00", "x" * 300, "\udc80"],
        "bytes": [b"", b"\n\x00\xff" * 200, bytes(range(256))],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((((),),),)],
        "shared": [shared, shared, {"again": shared}], "cycle": cycle, "ring": ring,
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {"k": [1]}), "counter": collections.Counter("abca"),
        "size": torch.Size([2, 3, 4]), "noshape": torch.Size([]), "complex": 1 + 2j,
        "range": range(3), "slice": slice(1, 2), "long_list": list(range(3000)),
        "long_dict": {f"k{i}": i for i in range(2500)}, "set": {frozenset({(1, 2)})},
        "emptyset": set(), "emptyfrozen": frozenset(), "emptyarray": bytearray(),
    }


def classes():
    inner = Plain(x=1, y=[1, 2])
    inner.itself = inner
    return {
        "namespace": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), nested=argparse.Namespace(a=1)),
        "enum": [Stage.ONE, Stage.TWO, Stage.TWO, Colour.RED], "plain": Plain(t=torch.ones(2)),
        "slots": Slots(1, "b"), "nested": Outer.Inner(q=2), "itself": inner,
        "list": ListOf([1, 2]), "dict": DictOf(a=1), "keyword": Keyword(1, b=2),
        "dtype": torch.float32, "fp8": torch.float8_e4m3fn, "device": torch.device("cpu"),
        "layout": torch.strided, "numpy": numpy.arange(6).reshape(2, 3), "scalar": numpy.float64(0.5),
        "date": datetime.datetime(2024, 1, 2), "path": pathlib.PurePosixPath("/a/b"),
        "partial": partial(int, base=2), "function": len,
        "class": Outer.Inner,
    }


def tensors():
    parameter = torch.nn.Parameter(torch.arange(6.0))
    stateful = torch.nn.Parameter(torch.ones(3))
    stateful.partition = 3
    marked = torch.ones(4)
    marked.tensor_model_parallel = True
    data = torch.arange(4.0)
    return {
        "parameter": parameter, "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "stateful": stateful, "marked": marked, "subclass": Weights(torch.ones(2)),
        "annotated": torch.arange(3.0).as_subclass(Annotated), "grad": torch.ones(2, requires_grad=True),
        "twice": [parameter, parameter, parameter.data], "shared": [torch.nn.Parameter(data), data[1:]],
        "bf16p": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "fp8p": torch.nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False),
    }


def opaque():
    return {
        "sparse": torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8),
        "channels": torch.quantize_per_channel(torch.ones(2, 3), torch.tensor([0.1, 0.2]),
                                               torch.tensor([0, 0]), 0, torch.quint8),
        "meta": torch.empty(3, 4, device="meta"), "conj": torch.tensor([1 + 2j, 3j]).conj(),
        "neg": torch.tensor([1 + 2j, 3j]).conj().imag,
        "storage": torch.arange(5.0).untyped_storage(), "plain": torch.ones(3),
    }


SAMPLES = {f.__name__: f for f in (dtypes, views, containers, classes, tensors, opaque)}
