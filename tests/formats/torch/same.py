# SPDX-License-Identifier: Apache-2.0
"""Bitwise comparison of two loaded objects, types and sharing of storages included."""
import functools

import numpy
import torch


def raw(tensor):
    """The tensor's elements as bytes, in row-major order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 0:
        return b""
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def assert_same_tensor(a, b, path):
    assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad), path
    assert a.is_quantized == b.is_quantized and a.layout == b.layout, path
    if a.is_meta:
        assert b.is_meta, path
    elif a.layout != torch.strided:
        assert torch.equal(a.to_dense(), b.to_dense()), path
    elif a.is_quantized:
        assert torch.equal(a.dequantize(), b.dequantize()) and torch.equal(a.int_repr(), b.int_repr()), path
    else:
        assert raw(a) == raw(b), path


def assert_same(a, b, path=""):
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert_same_tensor(a, b, path)
    elif isinstance(a, (torch.UntypedStorage, torch.TypedStorage)):
        assert a.tolist() == b.tolist(), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, numpy.ndarray):
        assert a.dtype == b.dtype and numpy.array_equal(a, b), path
    elif isinstance(a, functools.partial):
        assert (a.func, a.args, a.keywords) == (b.func, b.args, b.keywords), path
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, float) and a != a:
        assert b != b, path
    elif hasattr(a, "__dict__") and type(a).__eq__ is object.__eq__ and not isinstance(a, type):
        assert_same(a.__dict__, b.__dict__, path + ".")
    else:
        assert a == b, path


def tensors_of(value, path=""):
    """(path, tensor) of every tensor in dicts, lists and tuples, as torch_tool names them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from tensors_of(child, f"{path}/{key if isinstance(key, str) else '#' + str(key)}")
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield from tensors_of(child, f"{path}/{i}")
