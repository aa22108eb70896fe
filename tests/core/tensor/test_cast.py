# SPDX-License-Identifier: Apache-2.0
"""Every cast gives torch's bits: all 16-bit patterns, random and special wider ones."""

import os
import subprocess

import numpy as np
import pytest
import torch

TORCH = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BITS = {"fp64": np.uint64, "fp32": np.uint32, "fp16": np.uint16, "bf16": np.uint16}
SIGNED = {8: torch.int64, 4: torch.int32, 2: torch.int16}
PAIRS = [(a, b) for a in TORCH for b in TORCH if a != b]

# torch's vector code decides what NaNs become; without it there is another answer.
VECTOR_TORCH = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def patterns(name):
    """Bit patterns of a type: all of them if 16 bits wide, else special and random ones."""
    kind = BITS[name]
    if np.dtype(kind).itemsize == 2:
        return np.arange(1 << 16, dtype=kind)
    generator = np.random.default_rng(20260521)
    if name == "fp64":
        single = patterns("fp32").view(np.float32)
        with np.errstate(invalid="ignore"):
            exact = single.astype(np.float64)
        near = np.concatenate([np.nextafter(exact, np.inf), np.nextafter(exact, -np.inf)])
        return np.concatenate([exact, near]).view(kind)
    every_high_half = np.arange(1 << 16, dtype=np.uint32) << 16
    low_halves = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    special = (every_high_half[:, None] | low_halves[None, :]).reshape(-1)
    return np.concatenate([special, generator.integers(0, 1 << 32, 1 << 19, dtype=np.uint32)])


def by_torch(bits, source, target):
    tensor = torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).view(TORCH[source])
    # A multiple of 64 elements, so that torch's vector code sees all of them.
    assert tensor.numel() % 64 == 0
    width = np.dtype(BITS[target]).itemsize
    return tensor.to(TORCH[target]).view(SIGNED[width]).numpy().view(BITS[target])


@pytest.mark.parametrize("level", [0, 1, 2], ids=["scalar", "avx2", "avx512"])
@pytest.mark.parametrize("source,target", PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_cast_equals_torch(source, target, level):
    bits = patterns(source)
    bits = bits[: len(bits) // 64 * 64]
    tool = os.environ["CKPTFS_CAST_TOOL"]
    done = subprocess.run([tool, source, target, str(level)], input=bits.tobytes(), capture_output=True)
    if done.returncode == 77:
        pytest.skip("this processor does not have the instruction set")
    assert done.returncode == 0
    ours = np.frombuffer(done.stdout, BITS[target])
    theirs = by_torch(bits, source, target)
    differ = ours != theirs
    if not VECTOR_TORCH:
        differ &= ~np.isnan(bits.view({2: np.float16, 4: np.float32, 8: np.float64}[bits.itemsize]))
    index = np.flatnonzero(differ)
    assert index.size == 0, [
        (hex(bits[i]), "ours", hex(ours[i]), "torch", hex(theirs[i])) for i in index[:8]
    ]
