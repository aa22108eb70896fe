# SPDX-License-Identifier: Apache-2.0
"""Saves of an honest job beside clients of the daemon's socket that behave badly."""
import json
import os
import shutil
import statistics
import subprocess
import tempfile

import daemon
from cases.saves import python
from context import ratio_row

SAVES, ROUNDS = 15, 3
ATTACKS = {'silent': '1,100 connections that say nothing', 'hello_only': '40 that say hello alone',
           'descriptors': 'two descriptors with every hello', 'asks': 'questions without end',
           'unread': 'questions whose answers nobody reads', 'drops': 'saves that are given up',
           'leave': 'arenas of 512 MiB that nobody waits for',
           'world': '32 saves that wait for 2^20 ranks'}


def socket_of(process):
    """The daemon's snapshot socket."""
    inodes = set()
    for fd in os.listdir(f'/proc/{process.pid}/fd'):
        try:
            inodes.add(os.readlink(f'/proc/{process.pid}/fd/{fd}'))
        except OSError:
            pass  # closed meanwhile
    with open('/proc/net/unix', encoding='ascii') as file:
        rows = [line.split() for line in file]
    return next(row[7] for row in rows if len(row) > 7 and f'socket:[{row[6]}]' in inodes
                and row[7].endswith('.snapshots'))


def run(context):
    """Rows: until an honest save is durable, beside each attack and alone, by turns."""
    folder = tempfile.mkdtemp(prefix='attacks', dir=context.work)
    program = daemon.Ckptfs(folder)
    rows = []
    try:
        process = program.start('--keep-last', 5, '--snapshot-memory', '4G')[0]
        honest = python('snapshot_honest.py', program.store, str(SAVES), stdin=subprocess.PIPE)

        def save():
            honest.stdin.write('\n')
            honest.stdin.flush()
            return json.loads(honest.stdout.readline())

        save()
        for attack, said in ATTACKS.items():
            alone, beside = [], []
            for _ in range(ROUNDS):
                alone += save()
                attacker = python('snapshot_attacker.py', socket_of(process), attack, program.store)
                try:
                    attacker.stdout.readline()
                    beside += save()
                    assert attacker.poll() is None, f'{attack} has ended'
                finally:
                    attacker.kill()
                    attacker.wait()
            rows.append(ratio_row('attacks', f'until a save is durable, beside {said}, against alone',
                                  *map(statistics.median, (beside, alone)), 1.5))
        honest.stdin.close()
        honest.wait(60)
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)
    return rows
