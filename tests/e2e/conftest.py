# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests."""
import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'deepspeed'))

import daemon  # noqa: E402


@pytest.fixture(autouse=True)
def no_sanitizer_reports():
    """No sanitizer may complain in a process that a test starts."""
    yield
    daemon.fail_on_reports()


@pytest.fixture
def ckptfs(tmp_path):
    """A Ckptfs with a store of its own; nothing stays mounted after it."""
    assert os.path.exists('/dev/fuse'), 'these tests need /dev/fuse'
    program = daemon.Ckptfs(str(tmp_path))
    yield program
    program.close()


@pytest.fixture(scope='module')
def mount(tmp_path_factory):
    """All variants in one mount."""
    from variants import VARIANTS  # needs torch, which not every test does
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('all')))
    for variant in VARIANTS:
        program.adopt_variant(variant)
    yield program.mount()
    program.close()
