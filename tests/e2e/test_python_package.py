# SPDX-License-Identifier: Apache-2.0
"""The package installs by itself and needs nothing that a trainer's machine lacks.

The program is left out: tests/install/try_wheel uses a whole wheel in a bare system."""
import os
import re
import shutil
import subprocess
import sys

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'snapshot',
                      'python')


LET_GO = """
import torch, ckptfs
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
snap = ckptfs.Snapshotter(model, optimizer, run='job', store='/nowhere')
assert snap.save(0) is False
del snap
model(torch.ones(512)).sum().backward()
optimizer.step()
"""


def pip(*words):
    """As somebody would, without an index."""
    subprocess.run([sys.executable, '-m', 'pip', words[0], '-q', '--no-deps', '--no-index', *map(str, words[1:])], check=True)


def newest_symbol(path):
    """The newest version of glibc's symbols that it asks for: (2, 28)."""
    text = subprocess.run(['objdump', '-T', path], check=True, capture_output=True, text=True).stdout
    return max((int(major), int(minor)) for major, minor in re.findall(r'GLIBC_(\d+)\.(\d+)', text))


def test_it_installs_and_links_no_daemon(tmp_path):
    env = dict(os.environ)
    wheels = tmp_path / 'wheels'
    pip('wheel', '--no-build-isolation', '-C', 'cmake.define.CKPTFS_PROGRAM=OFF', '-w', wheels, SOURCE)
    wheel, = os.listdir(wheels)
    assert max(map(int, re.findall(r'manylinux_2_(\d+)_x86_64', wheel))) <= 28, wheel
    tmp_path = tmp_path / 'installed'
    pip('install', '--target', tmp_path, wheels / wheel)
    found = subprocess.run(
        [sys.executable, '-c', 'import ckptfs; print(ckptfs._native.__file__)'],
        check=True, capture_output=True, text=True, env={**env, 'PYTHONPATH': str(tmp_path)})
    module = found.stdout.strip()
    assert module.startswith(str(tmp_path))
    linked = subprocess.run(['ldd', module], check=True, capture_output=True, text=True).stdout
    for library in ('tbb', 'sqlite', 'fuse', 'torch', 'fmt'):
        assert library not in linked, linked
    assert newest_symbol(module) <= (2, 28)
    assert os.path.exists(os.path.join(tmp_path, 'ckptfs', 'py.typed'))
    same = "import ckptfs, importlib.metadata as m; assert ckptfs.__version__ == m.version('ckptfs')"
    subprocess.run([sys.executable, '-c', same], check=True, timeout=120,
                   env={**env, 'PYTHONPATH': str(tmp_path)})
    protocol = "import fsspec; assert fsspec.get_filesystem_class('ckptfs').protocol == 'ckptfs'"
    subprocess.run([sys.executable, '-c', protocol], check=True, timeout=120,
                   env={**env, 'PYTHONPATH': str(tmp_path)})
    for name in ('ckptfs.pth', '_ckptfs_hook.py'):  # where interpreters look at their start
        assert os.path.exists(os.path.join(tmp_path, name))
    subprocess.run([sys.executable, '-c', LET_GO], check=True, timeout=120,
                   env={**env, 'PYTHONPATH': str(tmp_path)})
    assert not os.path.exists(os.path.join(tmp_path, 'datastates'))  # somebody else's name


def test_the_name_datastates_is_asked_for(tmp_path):
    source = tmp_path / 'source'  # setuptools builds beside it
    shutil.copytree(os.path.join(SOURCE, 'datastates'), source)
    pip('install', '--no-build-isolation', '--target', tmp_path / 'target', source)
    assert os.path.exists(tmp_path / 'target' / 'datastates' / '__init__.py')
