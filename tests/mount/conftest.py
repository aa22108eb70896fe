# SPDX-License-Identifier: Apache-2.0
"""Mounts of the tiny real checkpoint; needs nothing but Python and FUSE."""
import os
import shutil
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'e2e'))

from daemon import Ckptfs, fail_on_reports  # noqa: E402

GOLDEN = os.path.join(HERE, '..', 'golden', 'deepspeed_tiny', 'ckpt')


def pytest_addoption(parser):
    parser.addoption('--part', default='1/1', help='N/M: the N-th of M parts; every test is in one of them')


def pytest_collection_modifyitems(config, items):
    """Tests of one function stay together, functions take turns."""
    part, parts = map(int, config.getoption('--part').split('/'))
    turn = {name: number for number, name in enumerate(dict.fromkeys((one.path, one.function) for one in items))}
    mine = [turn[one.path, one.function] % parts == part - 1 for one in items]
    config.hook.pytest_deselected(items=[one for one, kept in zip(items, mine) if not kept])
    items[:] = [one for one, kept in zip(items, mine) if kept]


@pytest.fixture(autouse=True)
def no_sanitizer_reports():
    """No sanitizer may complain in a process that a test starts."""
    yield
    fail_on_reports()


@pytest.fixture
def ckptfs(tmp_path):
    """A store of one's own; what is still mounted at the end is unmounted."""
    if not os.access('/dev/fuse', os.R_OK | os.W_OK):
        pytest.skip('no /dev/fuse')
    c = Ckptfs(str(tmp_path))
    yield c
    c.close()


@pytest.fixture
def store(ckptfs):
    """The option that names it."""
    return ['--store', ckptfs.store]


@pytest.fixture
def source(tmp_path):
    """A checkpoint of one's own."""
    return shutil.copytree(GOLDEN, tmp_path / 'run7')
