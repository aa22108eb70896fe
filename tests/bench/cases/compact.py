# SPDX-License-Identifier: Apache-2.0
"""`ckptfs compact` of an adopted step against the tools that make a copy of it in another form."""
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import daemon
from cases import dcp_view
from context import Row, disk_bytes, seconds, warm

INTERVAL = 0.05  # s between two looks


def family(pid):
    """A process and all below it."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        try:
            for task in os.listdir(f'/proc/{one}/task'):
                with open(f'/proc/{one}/task/{task}/children', encoding='ascii') as f:
                    todo += map(int, f.read().split())
        except OSError:
            pass
    return found


def own_memory(pid):
    """Anonymous and shared bytes of a family: not the files that it maps."""
    total = 0
    for one in family(pid):
        try:
            with open(f'/proc/{one}/status', encoding='ascii') as f:
                for line in f:
                    if line.startswith(('RssAnon', 'RssShmem')):
                        total += int(line.split()[1]) << 10
        except OSError:
            pass
    return total


def measure(commands, out):
    """(seconds, peak memory, peak bytes of the directory `out`) of commands, one after the other."""
    peak = {'memory': 0, 'disk': 0}
    begin = time.perf_counter()
    for words in commands:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = []
        reader = threading.Thread(target=lambda p=process, s=said: s.append(p.stderr.read()))
        reader.start()
        while process.poll() is None:
            peak['memory'] = max(peak['memory'], own_memory(process.pid))
            try:
                peak['disk'] = max(peak['disk'], disk_bytes(out))
            except OSError:
                pass  # something went while it was looked at
            time.sleep(INTERVAL)
        reader.join()
        if process.returncode != 0:
            raise RuntimeError(f'{words}: {said}')
    took = time.perf_counter() - begin
    return took, peak['memory'], max(peak['disk'], disk_bytes(out))


def against(context, what, source, extra, theirs):
    """Rows about one source: `theirs` makes the words of a tool from an output directory."""
    found = {'ours': [], 'theirs': []}
    for turn in range(2 * min(context.repeat, 3)):
        side = 'ours' if turn % 2 == 0 else 'theirs'
        folder = tempfile.mkdtemp(prefix='compact', dir=context.work)
        try:
            warm(source)
            store = os.path.join(folder, 'store')
            commands = [[daemon.BIN, 'adopt', source, '--store', store, '--name', 'run', *extra],
                        [daemon.BIN, 'compact', '--store', store, 'run/latest']]
            out = os.path.join(folder, 'out')
            os.mkdir(out)
            found[side].append(measure(commands, folder) if side == 'ours' else measure([theirs(out)], folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
    ours, other = ([statistics.median(x) for x in zip(*found[side])] for side in ('ours', 'theirs'))
    name = f'adopt + compact, against {what}'
    return [
        Row('compact', name, seconds(ours[0]), seconds(other[0]), f'{ours[0] / other[0]:.2f}x', '<= 1x',
            ours[0] <= other[0]),
        Row('compact', f'{name}: peak memory', f'{ours[1] / 1e6:.0f} MB', f'{other[1] / 1e6:.0f} MB',
            f'{ours[1] / other[1]:.3f}x', '<= 1x', ours[1] <= other[1]),
        Row('compact', f'{name}: peak disk', f'{ours[2] / 1e6:.0f} MB', f'{other[2] / 1e6:.0f} MB',
            f'{ours[2] / other[2]:.2f}x', '', True),
    ]


def run(context):
    """Rows for DeepSpeed's two tools and torch's."""
    source = context.checkpoint('zero2')
    tag = os.path.join(source, 'global_step1')
    extra = ('--family-set', 'head_dim=64')
    rows = against(context, 'ds_to_universal', source, extra, lambda out: [
        sys.executable, '-m', 'deepspeed.checkpoint.ds_to_universal', '--input_folder', tag, '--output_folder', f'{out}/u'])
    rows += against(context, 'zero_to_fp32 (weights alone)', source, extra, lambda out: [
        sys.executable, '-m', 'deepspeed.utils.zero_to_fp32', source, f'{out}/w', '--safe_serialization'])
    plain = context.path('dcp_plain', 'step-1')
    if not os.path.exists(os.path.join(plain, '.metadata')):
        shutil.rmtree(plain, ignore_errors=True)
        dcp_view.dcp_loads.run(plain, dcp_view.load_of(dcp_view.SAVED), dcp_view.save_worker, result=False)
    rows += against(context, 'dcp_to_torch', plain, (), lambda out: [
        sys.executable, '-m', 'torch.distributed.checkpoint.format_utils', 'dcp_to_torch', plain, f'{out}/all.pt'])
    return rows
