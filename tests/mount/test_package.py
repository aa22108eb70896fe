# SPDX-License-Identifier: Apache-2.0
"""The package of the distribution, and the units in it."""
import os
import re
import shutil
import socket
import subprocess

import pytest

from daemon import BIN, is_mounted

BUILD = os.path.dirname(os.path.abspath(BIN))
SYSTEM = {
    './etc/ckptfs/README', './etc/default/ckptfs-daemon', './usr/lib/systemd/system/ckptfs-daemon.service',
    './usr/lib/systemd/system/ckptfs@.service', './usr/lib/tmpfiles.d/ckptfs.conf', './usr/sbin/mount.ckptfs',
    './usr/bin/ckptfs', './usr/share/man/man1/ckptfs.1.gz', './usr/share/zsh/vendor-completions/_ckptfs',
    './usr/share/doc/ckptfs/copyright', './usr/share/doc/ckptfs/changelog.gz'}


@pytest.fixture(scope='module')
def package(tmp_path_factory):
    """The package, unpacked, its scripts in DEBIAN/."""
    if any(shutil.which(tool) is None for tool in ('cpack', 'dpkg-deb', 'dpkg-shlibdeps')):
        pytest.skip('no cpack, or not a Debian')
    folder = tmp_path_factory.mktemp('deb')
    done = subprocess.run(['cpack', '-G', 'DEB', '-B', folder], cwd=BUILD, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    package, = folder.glob('*.deb')
    subprocess.run(['dpkg-deb', '-R', package, folder / 'root'], check=True)
    return folder / 'root'


def test_it_has_the_files_of_the_system(package):
    found = {f'./{path.relative_to(package)}' for path in package.rglob('*') if not path.is_dir()}
    assert SYSTEM <= found
    conffiles = (package / 'DEBIAN/conffiles').read_text().split()
    assert set(conffiles) == {path[1:] for path in found if path.startswith('./etc/')}
    assert os.readlink(package / 'usr/sbin/mount.ckptfs') == '../bin/ckptfs'


def test_its_scripts_and_what_it_depends_on(package):
    for script in 'postinst', 'prerm', 'postrm':
        subprocess.run(['sh', '-n', package / 'DEBIAN' / script], check=True)
    control = (package / 'DEBIAN/control').read_text()
    depends = re.search('^Depends: (.*)$', control, re.M)[1]
    assert {'fuse3', 'libc6', 'libtbb12'} <= {word.split()[0] for word in depends.split(', ')}
    program = (package / 'usr/bin/ckptfs').read_bytes()
    assert b'/.cache/libfuse' not in subprocess.run(['readelf', '-d', package / 'usr/bin/ckptfs'], check=True,
                                                    capture_output=True).stdout and program[:4] == b'\x7fELF'


def test_systemd_takes_the_units(package, tmp_path):
    if shutil.which('systemd-analyze') is None:
        pytest.skip('no systemd-analyze')
    # It wants the program where the unit says.
    for unit in (package / 'usr/lib/systemd/system').iterdir():
        text = unit.read_text().replace('/usr/bin/ckptfs', os.path.abspath(BIN))
        (tmp_path / unit.name.replace('@', '@run7')).write_text(text)
    units = sorted(tmp_path.iterdir())
    done = subprocess.run(['systemd-analyze', 'verify', '--man=no', '--recursive-errors=no', *units], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize('what', ['mount', 'daemon'])
def test_a_service_manager_hears_that_it_is_up(ckptfs, what):
    """Type=notify: what is ordered after the unit finds the mount there."""
    path = os.path.join(ckptfs.folder, 'notify')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(30)
        mnt = ckptfs.mountpoint()
        words = ['mount', '--foreground', '--store', ckptfs.store, mnt]
        if what == 'daemon':
            words = ['daemon', '--foreground', '--store', ckptfs.store]
        with subprocess.Popen([BIN, *words], env={**os.environ, 'NOTIFY_SOCKET': path},
                              stderr=subprocess.DEVNULL) as process:
            try:
                assert b'READY=1' in manager.recv(4096)
                assert what == 'daemon' or is_mounted(mnt)
                assert process.poll() is None
            finally:
                process.terminate()
                assert process.wait(30) == 0
