# SPDX-License-Identifier: Apache-2.0
"""A sample of the forms of optimizers (run_forms.py): torch's and transformers'."""
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def test_each_form_comes_back(tmp_path):
    done = subprocess.run([sys.executable, os.path.join(HERE, 'run_forms.py'), tmp_path, '--sample'],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('exact') > 20
