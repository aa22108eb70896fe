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
