# SPDX-License-Identifier: Apache-2.0
"""Patterns out of checkpoints match what Python's re matches, or are refused.

CKPTFS_PATTERN_TOOL answers for the patterns of a JSON array.
"""
import json
import os
import random
import re
import subprocess
import warnings

TOOL = os.environ['CKPTFS_PATTERN_TOOL']

# Patterns as DeepSpeed's integrations and re.escape write them.
USUAL = [
    r'model\.layers\.\d+\.mlp\.(gate|up)_proj\.weight',
    r'^transformer.layers.\d+.self_attention.query_key_value.weight$',
    r'\d+.word_embeddings.weight', r'tied_modules.embed.word_embeddings.weight',
    r'.*\.q_proj\.weight', r'[^.]+\.w', r'^(?:a|b)*?c?$', r'a{2,3}b', r'a{,2}b', r'a{2}', r'x{}', r'x{,}y',
    r'x{a}', r'x{1', r'[]x]+', r'[^]x]+', r'[a\]b-]+', r'[-a]b', r'[\w.-]+', r'\Amodel\Z', r'\S+\s?', '', '|a', '()*b',
    r'\bmodel', re.escape('model.a-b_c/d e#1~\x7f'),
]
# Patterns that the two languages read differently, or only one of them knows.
ODD = [r'[[:alpha:]]', r'\Qa.b\E', r'\pL', r'\Ca', r'a++', r'a**', r'a{2}{3}', r'^*', r'(?i)a', r'(?P<n>a)',
       r'(?<=a)b', r'(a)\1', r'[\n]', r'[\b]', r'\x61', r'\z', r'[z-a]', r'[a-\d]', r'[\d-z]', r'(', r')', r'[',
       'a\\', '*a', '(|*)', 'a{3,2}', 'a{1001}', 'é+', r'\é', '[à-é]', r'[a--b]', r'[a&&b]', r'[a||b]', r'[a~~b]']
PIECES = ['a', 'b', '.', r'\.', r'\d', r'\w', '[ab]', '[^a]', '[a-c.]', '(', ')', '(?:', '|', '*', '+', '?', '{2}', '{1,}',
          '{,2}', '{', '}', ',', '^', '$', '-', ']', '[', '\\', '0', r'\_', r'\-', r'\W', ' ', '/']
NAMES = ['', 'a', 'b', 'ab', 'aab', 'aaab', 'a.b', 'abc.0', '0', 'a-b', 'a_b', 'a/b b', 'x{}', 'x{a}', 'x{1', 'xxy',
         'model', 'model.layers.12.mlp.up_proj.weight', 'model.layers.x.mlp.up_proj.weight', '3.word_embeddings.weight',
         'transformer.layers.3.self_attention.query_key_value.weight', 'model.a-b_c/d e#1~\x7f', ']x', 'a]b-', '{', '}',
         'b{', 'tied_modules.embed.word_embeddings.weight', 'a\nb', '[', '\\']


def answers(patterns):
    run = subprocess.run([TOOL], input=json.dumps([[p, NAMES] for p in patterns]), capture_output=True, text=True,
                         check=True, timeout=120)
    return json.loads(run.stdout)


def python(pattern):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            compiled = re.compile(pattern)
    except re.error:
        return None
    return [[bool(compiled.match(n)), bool(compiled.fullmatch(n))] for n in NAMES]


def test_usual_patterns_match_as_in_python():
    refused = []
    for pattern, ours in zip(USUAL, answers(USUAL)):
        if isinstance(ours, str):
            refused.append(pattern)
        else:
            assert ours == python(pattern), pattern
    assert refused == [r'\bmodel']


def test_odd_patterns_are_refused_or_match_as_in_python():
    for pattern, ours in zip(ODD, answers(ODD)):
        assert isinstance(ours, str) or ours == python(pattern), pattern


def test_random_patterns_are_refused_or_match_as_in_python():
    draw = random.Random(7)
    patterns = [''.join(draw.choices(PIECES, k=draw.randint(1, 8))) for _ in range(20000)]
    accepted = 0
    for pattern, ours in zip(patterns, answers(patterns)):
        theirs = python(pattern)
        if isinstance(ours, str):
            continue
        assert ours == theirs, (pattern, list(zip(NAMES, ours, theirs or NAMES)))
        accepted += 1
    assert accepted > 2000
