# SPDX-License-Identifier: Apache-2.0
"""A test fails if a sanitizer speaks inside the background daemon."""
import os

import pytest

SANITIZE = os.environ.get('CKPTFS_SANITIZE', '')


@pytest.mark.parametrize('sanitizer, key, talk, words', [
    ('address', 'LSAN_OPTIONS', 'log_threads=1', 'Processing thread'),
    ('thread', 'TSAN_OPTIONS', 'verbosity=1', 'Running under ThreadSanitizer')])
def test_words_of_a_sanitizer_are_found(ckptfs, source, monkeypatch, sanitizer,
                                        key, talk, words):
    """The options make it talk without a fault; asan's are its leak check, the
    daemon's last act."""
    if sanitizer not in SANITIZE:
        pytest.skip(f'not a build with {sanitizer}')
    ckptfs.adopt(source)
    monkeypatch.setenv(key, f'{os.environ[key]}:{talk}')
    mount = ckptfs.mount()
    pid, = ckptfs.running()
    ckptfs.umount(mount)
    with pytest.raises(AssertionError, match=words) as found:
        ckptfs.close()
    if sanitizer == 'address':
        assert f'.{pid}\n' in str(found.value)
