# SPDX-License-Identifier: Apache-2.0
"""Results for the matrix's pairs: records in a file that no repository has, and the page.

A record is of one pair; the page says the states of a cell's pairs together, and of which program they are.
Where there is no record, the page's word stands.
"""
import datetime
import fcntl
import hashlib
import json
import os
import re
from dataclasses import dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MARK = "'"  # a cell of an earlier program
NOT_RUN = 'not run'


def program():
    """Returns what the bytes of a view follow from: a digest of the program's sources."""
    out = hashlib.sha256()
    for folder in ('core', 'formats', 'fs', 'mount'):
        for base, folders, names in os.walk(os.path.join(ROOT, folder)):
            folders.sort()
            for name in sorted(n for n in names if n.endswith(('.h', '.cc', '.fbs', '.toml'))):
                out.update(name.encode())
                with open(os.path.join(base, name), 'rb') as f:
                    out.update(f.read())
    return out.hexdigest()[:8]


@dataclass
class Page:
    """A page as it was written."""
    cells: dict = field(default_factory=dict)  # {(row, column): text}
    notes: dict = field(default_factory=dict)  # {number: reason}
    program: str = ''
    date: str = ''
    exact_losses: int = 0

    def text(self, source, column):
        """Returns a cell's text without its mark; empty if there is none or nobody ran it."""
        text = self.cells.get((source, column), '').removesuffix(MARK)
        return '' if text == NOT_RUN else text

    def fresh(self, source, column, of):
        """True if a cell is a program's."""
        return (self.program == of and bool(self.text(source, column))
                and not self.cells[source, column].endswith(MARK))


def read_page(path):
    """The page at a path; an empty one where there is no file.  ValueError where it is another file."""
    if not os.path.exists(path):
        return Page()
    with open(path, encoding='utf-8') as f:
        text = f.read()
    page, columns = Page(), []
    for line in text.splitlines():
        words = [word.strip() for word in line.strip().strip('|').split(' | ')]
        note = re.match(r'- \[(\w+)\] (.*)', line)
        if note:
            page.notes[note[1]] = note[2]
        elif line.startswith('| source |'):
            columns = words[1:]
        elif line.startswith('| ') and columns and '---' not in line:
            page.cells.update({(words[0], column): text for column, text in zip(columns, words[1:])})
    if not page.cells:
        raise ValueError(f'{path} has no table of the matrix, and is not overwritten')
    found = lambda pattern: (re.search(pattern, text) or ('', ''))[1]
    page.date, page.program = found(r' on (\d{4}-\d\d-\d\d)'), found(r'program `(\w+)`')
    page.exact_losses = int(found(r'; in (\d+)\s+of them losses') or 0)
    return page


class Results:
    """The file in which records are kept, and the page."""

    def __init__(self, path, page):
        self.path, self.page, self.program = path, page, program()
        self.today = datetime.date.today().isoformat()
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.records = self.read()

    def read(self):
        """Returns what is in the file."""
        if not os.path.exists(self.path):
            return {}
        with open(self.path, encoding='utf-8') as f:
            return json.load(f)

    def keep(self, key, record):
        """Written at once, since a run takes hours; others may run other pairs meanwhile."""
        with open(f'{self.path}.lock', 'w', encoding='utf-8') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.records = {**self.read(), key: {**record, 'program': self.program,
                                                 'date': self.today}}
            with open(f'{self.path}.new', 'w', encoding='utf-8') as f:
                json.dump(self.records, f, indent=0)
            os.replace(f'{self.path}.new', self.path)

    def has(self, pair):
        """True if there is a good result of it of this program."""
        record = self.records.get(pair.key)
        if record is not None and record['program'] == self.program:
            return record['ok']
        return (self.page.fresh(pair.source, pair.column, self.program)
                and 'FAILS' not in self.page.text(pair.source, pair.column))

    def refused(self, pair):
        """True if what is known of it, by whatever program, is a refusal or that there is nothing
        to compare."""
        record = self.records.get(pair.key)
        if record is not None:
            return record['state'] in ('refused', 'n/a')
        return bool(re.search(r'refused|n/a', self.page.text(pair.source, pair.column)))
