# SPDX-License-Identifier: Apache-2.0
"""docs/use/recipes.md, typed: every block of a section is run, in order, by the real tools."""
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from daemon import BIN, is_mounted

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'docs', 'use', 'recipes.md')


def sections():
    """Name of a section -> its blocks (language, text)."""
    with open(PAGE, encoding='utf-8') as f:
        parts = re.split(r'^## (.*)\n', f.read(), flags=re.M)
    return {name: re.findall(r'^```(\w+)\n(.*?)^```$', text, flags=re.M | re.S)
            for name, text in zip(parts[1::2], parts[2::2])}


# DeepSpeed would compile its shared-memory collective before the first of ours; gloo is enough.
QUIET_ENGINES = '''
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == 'deepspeed.comm.torch':
            sys.meta_path.remove(self)
            from deepspeed.git_version_info import compatible_ops
            compatible_ops['deepspeed_shm_comm'] = False

sys.meta_path.insert(0, Finder())
'''


def matches(said, expected):
    """A line of `...` is any lines, one in a line the rest of it."""
    lines = (r'(?:.*\n)*' if line == '...' else re.escape(line).replace(r'\.\.\.', '.*') + r'\n'
             for line in expected.splitlines())
    return re.fullmatch(''.join(lines), said)


@pytest.fixture
def typed(tmp_path):
    """Runs a shell block in an empty directory."""
    programs = tmp_path / 'bin'
    programs.mkdir()
    os.symlink(os.path.abspath(BIN), programs / 'ckptfs')
    for name in ('python', 'python3'):  # a link would lose the virtual environment
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / 'torchrun').write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run --rdzv-backend c10d '
                                       '--rdzv-endpoint 127.0.0.1:0 "$@"\n')
    (programs / 'torchrun').chmod(0o755)
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 'sitecustomize.py').write_text(QUIET_ENGINES)
    work = tmp_path / 'work'
    work.mkdir()
    env = {**os.environ, 'PATH': f"{programs}:{os.environ['PATH']}", 'CKPTFS_STORE': str(tmp_path / 'store'),
           'PYTHONPATH': str(tmp_path / 'site'), 'DS_ACCELERATOR': 'cpu', 'ACCELERATE_TORCH_DEVICE': 'cpu',
           'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'agg', 'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false'}

    def run(block):
        done = subprocess.run(['bash', '-euo', 'pipefail', '-c', block], cwd=work, env=env, capture_output=True,
                              text=True, timeout=300)
        assert done.returncode == 0, f'{block}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}'
        return done.stdout
    run.work = work
    yield run
    if is_mounted(str(work / 'mnt')):
        subprocess.run([BIN, 'umount', '--lazy', str(work / 'mnt')], check=False)
    told = subprocess.run([BIN, 'status', '--json'], env=env, capture_output=True, text=True)
    for daemon in json.loads(told.stdout or '[]'):
        if 'pid' in daemon:
            os.kill(daemon['pid'], signal.SIGTERM)


def test_the_page_has_a_recipe_for_each_tool():
    assert list(sections()) == ['DeepSpeed', 'Trainer', 'accelerate', 'Lightning', 'FSDP', 'Megatron']
    for name, blocks in sections().items():
        assert {language for language, _ in blocks} == {'python', 'sh', 'text'}, name


def test_a_text_is_what_a_block_prints():
    assert matches('a\nb 1\nc\n', '...\nb ...\n...\nc\n') and matches('b 1\n', '...\nb ...\n...\n')
    assert not matches('a\nb\nc\n', '...\nd\n...\n') and not matches('a\nb\n', 'a\n')
    assert not matches('a\nb\n', 'a...\n')


@pytest.mark.parametrize('name', list(sections()))
def test_every_block_runs(typed, name):
    said = None
    for language, block in sections()[name]:
        if language == 'python':
            first, text = block.split('\n', 1)
            (typed.work / re.fullmatch(r'# (\w+\.py)', first)[1]).write_text(text)
        elif language == 'sh':
            said = typed(block)
        else:
            assert matches(said, block), f'{block}\nis not\n{said}'
    if name == 'DeepSpeed':
        assert (typed.work / 'map.png').stat().st_size > 500
    if name == 'accelerate':  # the trained model goes on
        losses = [float(x) for x in re.findall(r'loss (\S+)', said)]
        assert len(losses) == 6 and all(b < a for a, b in zip(losses, losses[1:])), losses
    if name == 'Megatron':  # the model that was saved is the one that was loaded
        sums = re.findall(r'sum of squares (\S+)', said)
        assert len(sums) == 2 and sums[0] == sums[1], sums
