# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # classes that the pickles name


class Tool:
    """Runs torch_tool and returns what it printed."""

    def __init__(self, path):
        self.path = path

    def __call__(self, *args, fails=False):
        done = subprocess.run([self.path, *map(str, args)], capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 1), f"ended with {done.returncode}: {done.stderr}"  # no crash, no sanitizer
        assert (done.returncode != 0) == fails, done.stderr + done.stdout
        return done.stderr if fails else done.stdout

    def dump(self, path):
        return json.loads(self("dump", path))


@pytest.fixture(scope="session")
def tool():
    return Tool(os.environ["CKPTFS_TORCH_TOOL"])
