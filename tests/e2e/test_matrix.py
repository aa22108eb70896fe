# SPDX-License-Identifier: Apache-2.0
"""The matrix itself: what its sample has, and that its page loses nothing (matrix.py)."""
import dataclasses
import json
import re
import types

import pytest

import cells
import matrix
import matrix_page
from cells import Target
from matrix_results import Results, read_page


@pytest.fixture(scope='module')
def parts():
    """Returns the parts of the whole matrix."""
    return matrix.imported()


def lacking(parts, sample):
    """Returns what no pair of a sample stands for: parts, columns, sources, or kinds of sources
    where making one is long."""
    pairs = {name: [pair for part, pair in sample if part == name] for name in parts}
    out = [name for name, chosen in pairs.items() if not chosen]
    out += sorted(set(cells.COLUMNS) - {pair.column for _, pair in sample})
    for name, part in parts.items():
        kinds = getattr(part, 'kind_of', lambda source: {source})
        wanted = set().union(*(kinds(source) for source in getattr(part, 'SOURCES', ())))
        out += sorted(wanted - set().union(*(kinds(pair.source) for pair in pairs[name])))
    return out


def test_the_sample_has_every_part_column_and_kind_of_source(parts):
    sample = matrix.sample(parts)
    assert lacking(parts, sample) == []
    assert all(pair in parts[name].pairs() for name, pair in sample)
    # And each of them would be missed.
    for name in parts:
        assert name in lacking(parts, [(part, pair) for part, pair in sample if part != name])
    for column in cells.COLUMNS:
        assert column in lacking(parts, [(part, pair) for part, pair in sample if pair.column != column])
    for kind in ('lightning', 'fsdp', 'moe_stage0', 'dcp_titan', 'qwen2_autotp2'):
        kept = [(name, pair) for name, pair in sample
                if kind not in getattr(parts[name], 'kind_of', lambda source: {source})(pair.source)]
        assert kind in lacking(parts, kept)


def unfinished(page, parts):
    """Returns what a page has no word of that stands: rows and columns of sources, cells that were
    run in part, or not at all, or do not hold; and rows of no source."""
    cell = lambda source, column: page.cells.get((source, column), 'no cell')
    sources = [source for part in parts.values() for source in getattr(part, 'SOURCES', ())]
    out = [f'{source} | {column}: {cell(source, column)}' for source in sources for column in cells.COLUMNS
           if not cell(source, column).startswith(('exact', 'refused [', 'n/a ['))
           or re.search(r'\d+ of \d+ run', cell(source, column))]
    return out + sorted(f'{row}: a row of no source' for row in {row for row, _ in page.cells} - set(sources))


def test_the_page_has_every_source_and_column(parts):
    page = read_page(matrix.PAGE)
    assert unfinished(page, parts) == []
    # And each of these would be seen.
    for changed in 'not run', '', '**FAILS** 1 of 3', 'exact, 1 of 3 run':
        broken = dataclasses.replace(page, cells={**page.cells, ('dcp_fsdp2', 'fsdp3'): changed})
        assert unfinished(broken, parts) == [f'dcp_fsdp2 | fsdp3: {changed}']
    gone = {key: text for key, text in page.cells.items() if key[0] != 'zero2'}
    assert len(unfinished(dataclasses.replace(page, cells=gone), parts)) == len(cells.COLUMNS)
    more = {**page.cells, ('zero9', 'zero1'): 'exact'}
    assert unfinished(dataclasses.replace(page, cells=more), parts) == ['zero9: a row of no source']


# ---- the page, of a matrix with two sources -----------------------------------------------------


def small_part():
    """Two sources and one column of three pairs, one of one pair, and one that has none."""
    pairs = [Target(source, cells.RANKS, layout) for source in ('first', 'second') for layout in ('tp1', 'tp2', 'dp2')]
    pairs += [Target(source, 'zero1', 'zero1') for source in ('first', 'second')]
    return types.SimpleNamespace(TITLE='Small', SOURCES=('first', 'second'), ADOPTED='`--replicated X`',
                                 pairs=lambda: pairs, why_not=lambda source, column: f'no {column}')


class Written:
    """A page below a directory, and the results that it is made of."""

    def __init__(self, folder):
        self.parts = {'small': small_part()}
        self.file, self.path = str(folder / 'page.md'), str(folder / 'results.json')

    def results(self, program=None):
        """As a run finds them."""
        made = Results(self.path, read_page(self.file))
        made.program = program or made.program
        return made

    def write(self, records, program=None):
        """The page after a run that ended with {pair: record}."""
        results = self.results(program)
        for pair, record in records.items():
            results.keep(pair.key, {'source': pair.source, 'column': pair.column, 'target': str(pair.target),
                                    'ok': True, 'state': 'exact', **record})
        matrix_page.write(self.file, self.parts, results)
        return self.row('first')

    def row(self, source):
        """{column: text} of a row that was written."""
        page = read_page(self.file)
        return {column: text for (row, column), text in page.cells.items() if row == source}

    def whole(self):
        """Records of all pairs; of one the program says something."""
        records = {pair: {} for pair in self.parts['small'].pairs()}
        records[Target('first', cells.RANKS, 'tp2')] = {'state': 'refused', 'why': "'a.b': no rule; 'c.d': no rule"}
        return records

    def lose_records(self):
        """As in a fresh checkout."""
        with open(self.path, 'w', encoding='utf-8') as f:
            json.dump({}, f)


@pytest.fixture
def written(tmp_path):
    """Nothing yet."""
    return Written(tmp_path)


def reason(written, text):
    """Returns what the number in a cell stands for."""
    return read_page(written.file).notes[text.partition('[')[2].partition(']')[0]]


def test_a_page_without_records_is_what_it_was(written):
    row = written.write(written.whole())
    assert row['zero1'] == 'exact' and row['zero2'].startswith('n/a [')
    assert row[cells.RANKS].startswith('exact (2), refused [')
    assert reason(written, row[cells.RANKS]) == "'a.b': no rule; other parameters alike"
    assert reason(written, row['zero2']) == 'no zero2'
    with open(written.file, encoding='utf-8') as f:
        before = f.read()
    assert '8 of the 8 pairs' in before
    written.lose_records()
    assert written.write({}) == row
    with open(written.file, encoding='utf-8') as f:
        assert f.read() == before


def test_a_page_of_an_earlier_program_is_marked_until_it_is_run_again(written):
    row = written.write(written.whole(), 'earlier')
    written.lose_records()
    marked = written.write({})
    assert marked['zero1'] == "exact'" and marked[cells.RANKS] == row[cells.RANKS] + "'"
    assert written.write({}) == marked
    assert len(matrix_page.earlier(written.parts, written.results())) == 4
    again = written.write({Target('first', 'zero1', 'zero1'): {}})
    assert again == {**marked, 'zero1': 'exact'}
    with open(written.file, encoding='utf-8') as f:
        text = f.read()
    assert '1 of the 1 pairs' in text and "3 cells with a '" in text


def test_a_failure_is_on_the_page_though_not_all_of_its_cell_was_run(written):
    written.write(written.whole())
    written.lose_records()
    row = written.write({Target('first', cells.RANKS, 'dp2'): {'ok': False, 'state': 'FAILS', 'errors': ['bytes']}})
    assert row[cells.RANKS] == '**FAILS** 1 of 1'
    with open(written.file, encoding='utf-8') as f:
        assert "- fails: first -> dp2: ['bytes']" in f.read()


def test_some_pairs_of_a_cell_that_has_no_more(written):
    row = written.write({Target('first', cells.RANKS, 'dp2'): {}})
    assert row[cells.RANKS] == 'exact, 1 of 3 run' and row['zero1'] == 'not run'


def test_without_records_and_page_nothing_is_written(written, tmp_path):
    with pytest.raises(SystemExit, match='nothing is written'):
        written.write({})
    assert list(tmp_path.glob('page*')) == []
    (tmp_path / 'page.md').write_text('# Another file\n')
    with pytest.raises(ValueError, match='not overwritten'):
        written.write({})


def chosen(written, program=None, **asked):
    """[key] of what a command line runs."""
    args = types.SimpleNamespace(**{**dict.fromkeys(('all', 'part', 'source', 'column', 'missing', 'refused', 'table')),
                                    **asked})
    return [pair.key for _, pair in matrix.chosen_pairs(args, written.parts, written.results(program))]


def test_refusals_are_run_again_and_what_is_missing(written):
    written.write(written.whole())
    assert chosen(written, refused=True) == ['first | rank<N> | tp2']
    assert chosen(written, missing=True) == []
    written.lose_records()  # the page says it of the cell
    assert chosen(written, refused=True) == [f'first | rank<N> | {layout}' for layout in ('tp1', 'tp2', 'dp2')]
    assert chosen(written, missing=True) == []
    assert len(chosen(written, 'another', missing=True)) == 8


def test_what_the_program_says_of_one_format():
    said = 'tp2: no format can show layout tp2; rank, deepspeed: a: b; dcp; trainer: not saved by it; lightning: else'
    assert cells.cause_of(said, 'deepspeed') == 'a: b; dcp'
    assert cells.cause_of(said, 'trainer') == 'not saved by it'
    assert cells.cause_of(said, 'huggingface') == 'a: b; dcp'
    assert cells.cause_of('another', 'rank') == 'another'
