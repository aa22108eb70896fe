# SPDX-License-Identifier: Apache-2.0
"""docs/use: the `sh` blocks of each page, typed in order beside a tiny checkpoint `run7`.

recipes.md has a test of its own, and building.md has no such block.
"""
import os
import re
import shutil

import pytest

from test_recipes import typed  # noqa: F401 (a fixture)

HERE = os.path.dirname(os.path.abspath(__file__))
PAGES = os.path.join(HERE, '..', '..', 'docs', 'use')
TINY = os.path.join(HERE, '..', 'golden', 'deepspeed_tiny', 'ckpt')
OTHERS = {'recipes.md', 'building.md'}


def blocks(page):
    with open(os.path.join(PAGES, page), encoding='utf-8') as f:
        return re.findall(r'^```sh\n(.*?)^```$', f.read(), flags=re.M | re.S)


@pytest.mark.parametrize('page', sorted(set(os.listdir(PAGES)) - OTHERS))
def test_a_page_begins_with_commands_and_they_run(typed, page):  # noqa: F811
    with open(os.path.join(PAGES, page), encoding='utf-8') as f:
        assert re.match(r'# .*\n\n(```sh\n|    \S)', f.read()), page
    shutil.copytree(TINY, typed.work / 'run7')
    assert blocks(page)
    variables = ''
    for block in blocks(page):
        typed(variables + block)
        variables += ''.join(re.findall(r'^\w+=.*\n', block, flags=re.M))
