# SPDX-License-Identifier: Apache-2.0
"""docs/use: the `sh` blocks of each page, typed in order beside a tiny checkpoint `run7`.

recipes.md has a test of its own; building.md and kubernetes.md have no such block.
"""
import os
import re
import shutil

import pytest

from daemon import FIXTURES
from test_recipes import typed  # noqa: F401 (a fixture)

HERE = os.path.dirname(os.path.abspath(__file__))
PAGES = os.path.join(HERE, '..', '..', 'docs', 'use')
TINY = os.path.join(HERE, '..', 'golden', 'deepspeed_tiny', 'ckpt')
OTHERS = {'recipes.md', 'building.md', 'kubernetes.md'}


def blocks(page):
    with open(os.path.join(PAGES, page), encoding='utf-8') as f:
        return re.findall(r'^```sh\n(.*?)^```$', f.read(), flags=re.M | re.S)


def between_nodes(work):
    """The same checkpoint as run8, each file on one of two nodes."""
    files = sorted(path for path in (work / 'run7').rglob('*') if path.is_file())
    for number, path in enumerate(files):
        to = work / f'node{number % 2}' / 'run8' / path.relative_to(work / 'run7')
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)


@pytest.mark.parametrize('page', sorted({page for page in os.listdir(PAGES) if page.endswith('.md')} - OTHERS))
def test_a_page_begins_with_commands_and_they_run(typed, page):  # noqa: F811
    with open(os.path.join(PAGES, page), encoding='utf-8') as f:
        assert re.match(r'# .*\n\n(```sh\n|    \S)', f.read()), page
    shutil.copytree(TINY, typed.work / 'run7')
    between_nodes(typed.work)
    assert blocks(page)
    variables = ''
    for block in blocks(page):
        typed(variables + block)
        variables += ''.join(re.findall(r'^\w+=.*\n', block, flags=re.M))


# Words of a row of instead-of.md -> what its DIR or FILE is.
CONVERTED = {
    'zero_to_fp32': TINY, 'ds_to_universal': TINY,
    'dcp_to_torch_save': f'{FIXTURES}/dcp/fsdp2/ckpt', 'the same': f'{FIXTURES}/dcp/fsdp2/ckpt',
    'torch_save_to_dcp': 'model.pt',
    'merge-weights': f'{FIXTURES}/dcp/accelerate/ckpt',
    'verl.model_merger': os.path.join(HERE, '..', 'golden', 'rank_shards', 'torch_2_13'),
    'Megatron': f'{FIXTURES}/megatron/llama', 'other degrees, weights alone': f'{FIXTURES}/megatron/llama',
    'a resume that only': f'{FIXTURES}/megatron/llama',
}


def rows():
    """(words of the tool, what is written instead) of each row of instead-of.md."""
    with open(os.path.join(PAGES, 'instead-of.md'), encoding='utf-8') as f:
        cells = [line.strip('| \n').split(' | ') for line in f if line.startswith('|')]
    return [(row[0], command) for row in cells for command in re.findall(r'`(ckptfs export [^`]*)`', row[-1])]


def test_each_tool_has_a_line_that_was_tried():
    assert all(any(words in tool for words in CONVERTED) for tool, _ in rows())
    assert all(any(words in tool for tool, _ in rows()) for words in CONVERTED)


@pytest.mark.parametrize('tool', CONVERTED)
def test_a_line_in_place_of_a_tool_writes_files(typed, tool):  # noqa: F811
    (command,) = [command for words, command in rows() if tool in words]
    source = os.path.abspath(CONVERTED[tool]) if os.path.exists(CONVERTED[tool]) else CONVERTED[tool]
    typed('python -c \'import torch; torch.save({"a.weight": torch.ones(4, 4)}, "model.pt")\'\n'
          + re.sub(r'\b(DIR|FILE)\b', source, command) + '\n')
    assert any(files for _, _, files in os.walk(typed.work / 'OUT'))
