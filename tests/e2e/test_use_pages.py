# SPDX-License-Identifier: Apache-2.0
"""docs/use: the `sh` blocks of each page, typed in order beside a tiny checkpoint `run7`.

recipes.md has a test of its own; building.md and kubernetes.md have no such block.
"""
import os
import re
import shutil

import pytest

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
