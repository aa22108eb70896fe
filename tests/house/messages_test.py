# SPDX-License-Identifier: Apache-2.0
"""docs/use/troubleshooting.md has a row for every message, and messages.py finds them."""
import unittest

import messages


class MessagesTest(unittest.TestCase):
    def test_a_call_is_read_as_the_text_that_it_makes(self):
        code = 'Fail(ErrorCode::kStale, StrCat(name, ": is (not) ", n, " bytes"\n   " long"))'
        self.assertEqual(messages.spelled(messages.argument(code, 4).split(',', 1)[1]), '...: is (not) ... bytes long')
        self.assertEqual(messages.spelled('"a" "b"'), 'ab')
        self.assertEqual(messages.core('...; or give --this ... x'), 'or give --this')

    def test_all_are_found(self):
        found = messages.refusals()
        self.assertGreater(len(found), 1000)
        self.assertIn(('core/store', 'exists'), {(room, code) for room, code, _ in found})
        self.assertTrue(any('was replaced by another step meanwhile' in text for _, _, text in found))
        self.assertGreater(len(messages.remedies()), 50)

    def test_the_page_has_all_and_is_short(self):
        self.assertEqual(messages.lacking(), [])
        with open(messages.PAGE, encoding='utf-8') as f:
            self.assertLessEqual(len(f.readlines()), 150)

    def test_a_row_that_is_gone_is_missed(self):
        whole = messages.page
        text, rows = whole()
        try:
            messages.page = lambda: (text.replace('choose an empty directory', ''), rows[1:])
            said = messages.lacking()
        finally:
            messages.page = whole
        self.assertIn('no hint: choose an empty directory', said)
        self.assertTrue(any(line.startswith('no row for') for line in said))


if __name__ == '__main__':
    unittest.main()
