# SPDX-License-Identifier: Apache-2.0
"""Metrics of daemons, read by Prometheus' own parser of the text format."""
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from daemon import BIN, wait_until

parser = pytest.importorskip('prometheus_client.parser', reason='prometheus_client is not installed')


def parse(text):
    """{name: {labels: value}}; the parser refuses what the format does not have."""
    samples = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.type != 'unknown', family.name
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            series = samples.setdefault(sample.name, {})
            assert labels not in series, (sample.name, labels)
            series[labels] = sample.value
    return samples


def counters(text):
    """{(name, labels): value} of all that may only grow."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type == 'counter' or sample.name.endswith(('_sum', '_count')):
                found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(samples, name, **labels):
    """The one sample of the name with these labels."""
    found = [v for k, v in samples[name].items() if labels.items() <= dict(k).items()]
    assert len(found) == 1, (name, labels, samples[name])
    return found[0]


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def scrape(port, path='/metrics'):
    with urllib.request.urlopen(f'http://127.0.0.1:{port}{path}', timeout=20) as answer:
        assert answer.headers['Content-Type'].startswith('text/plain; version=0.0.4')
        return answer.read().decode()


def test_a_scrape_is_what_status_says(ckptfs, source):
    port = free_port()
    mount = ckptfs.mount('--metrics-listen', str(port), adopt=[source])
    first = scrape(port)
    with open(f'{mount}/view/dp2_zero1/rank0/model.safetensors', 'rb') as f:
        read = len(f.read())
    with pytest.raises(OSError):
        os.listdir(f'{mount}/view/tp7_zero9/rank0')
    second = scrape(port)
    samples = parse(second)
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)[0]['status']
    where = {'store': ckptfs.store, 'mountpoint': mount}
    assert value(samples, 'ckptfs_up', **where) == 1
    assert sum(samples['ckptfs_opens_total'].values()) == sum(status['opens'].values()) == 1
    assert sum(samples['ckptfs_opened_bytes_total'].values()) == read
    assert value(samples, 'ckptfs_run_steps', run='run7') == 1
    assert value(samples, 'ckptfs_run_latest_iteration', run='run7') == 3
    assert value(samples, 'ckptfs_snapshot_ranks') == 0
    assert value(samples, 'ckptfs_snapshot_dropped_saves_total', reason='incomplete') == 0
    assert value(samples, 'ckptfs_process_resident_memory_bytes') > 1 << 20
    with open(os.path.join(os.path.dirname(__file__), '..', '..', 'docs', 'use', 'watch.md')) as page:
        listed = set(re.findall(r'^\| `(ckptfs_[a-z_]+)` \|', page.read(), re.M))
    rare = re.compile('ckptfs_(snapshot|retention|spool|hot|peer|follow)_'
                      + ('' if os.geteuid() == 0 else '|ckptfs_materialise'))
    assert {name for name in listed if not rare.match(name)} <= set(samples)
    mine, theirs = parse(ckptfs.run('status', '--store', ckptfs.store, '--metrics').stdout), samples
    assert set(mine) == set(theirs)
    before, after = counters(first), counters(second)
    assert before.keys() <= after.keys()
    assert all(after[series] >= number for series, number in before.items())
    assert any(after[series] > number for series, number in before.items())


def test_bytes_by_way_of_serving(ckptfs, source):
    mount = ckptfs.mount('--mode', 'stream', adopt=[source])
    with open(f'{mount}/view/dp2_zero1/rank0/model.safetensors', 'rb') as f:
        size = len(f.read())
    samples = parse(ckptfs.run('status', '--store', ckptfs.store, '--metrics').stdout)
    assert value(samples, 'ckptfs_served_bytes_total', way='stream') >= size
    assert value(samples, 'ckptfs_served_bytes_total', way='materialise') == 0
    assert value(samples, 'ckptfs_opens_total', way='stream') == 1


def test_refusals_are_counted_by_errno(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    for name in os.listdir(source / 'global_step3'):
        if name.startswith('mp_rank_00'):
            os.truncate(source / 'global_step3' / name, 10)
    path = f'{mount}/view/dp2_zero1/rank0/model.safetensors'
    with pytest.raises(OSError) as failed:
        with open(path, 'rb') as f:
            f.read()
    samples = parse(ckptfs.run('status', '--store', ckptfs.store, '--metrics').stdout)
    told = [dict(k) for k, v in samples['ckptfs_errors_total'].items() if v > 0]
    assert [t['errno'] for t in told] == ['ESTALE'] and failed.value.errno == 116, told


def test_a_followed_directory_has_its_lag(ckptfs, source, tmp_path):
    job = tmp_path / 'job'
    mount = ckptfs.mountpoint()
    ckptfs.run('mount', '--store', ckptfs.store, '--reserve', '0', '--follow', job, mount)

    def ask():
        return parse(ckptfs.run('status', '--store', ckptfs.store, '--metrics').stdout)
    samples = ask()
    assert value(samples, 'ckptfs_follow_adopted_steps_total', path=str(job)) == 0
    assert 'ckptfs_follow_lag_seconds' not in samples  # nothing was adopted
    begin = time.time()
    shutil.copytree(source, job, copy_function=shutil.copyfile)
    wait_until(lambda: value(ask(), 'ckptfs_follow_adopted_steps_total', path=str(job)) == 1, 'the step')
    samples = ask()
    assert 0.5 < value(samples, 'ckptfs_follow_lag_seconds') < time.time() - begin
    assert begin < value(samples, 'ckptfs_follow_last_adopted_timestamp_seconds') < time.time()
    assert value(samples, 'ckptfs_follow_look_seconds_total') > 0
    assert value(samples, 'ckptfs_follow_waiting_steps') == 0


def test_a_dead_mount_is_down(ckptfs, source):
    process, mount = ckptfs.start('--adopt', source)
    process.kill()
    process.wait()
    done = ckptfs.run('status', '--store', ckptfs.store, '--metrics', check=False)
    assert done.returncode == 3
    assert value(parse(done.stdout), 'ckptfs_up', mountpoint=mount) == 0


def test_names_of_runs_are_hostile(ckptfs, source):
    port = free_port()
    hostile = 'a"} 1\nckptfs_up 0\n# TYPE x\\'
    twin = source.parent / hostile
    shutil.copytree(source, twin)
    mount = ckptfs.mount('--metrics-listen', str(port))
    ckptfs.adopt(twin, check=False)
    runs = os.listdir(f'{mount}/run')
    samples = parse(scrape(port))
    assert value(samples, 'ckptfs_runs') == len(runs)
    assert len(samples.get('ckptfs_run_steps', {})) == len(runs)
    assert list(samples['ckptfs_up'].values()) == [1]


def test_a_daemon_without_a_mount_and_a_taken_port(ckptfs):
    port = free_port()
    daemon = subprocess.Popen([BIN, 'daemon', '--foreground', '--store', ckptfs.store, '--snapshot-memory', '64M',
                               '--metrics-listen', f'127.0.0.1:{port}'], stderr=subprocess.PIPE, text=True)
    ckptfs.processes.append(daemon)
    wait_until(lambda: reachable(port), 'the port', daemon)
    samples = parse(scrape(port))
    assert value(samples, 'ckptfs_snapshot_arena_limit_bytes', mountpoint='') == 64 << 20
    assert 'ckptfs_requests_total' not in samples
    for path in ('/', '/metrics.json', '/../../etc/passwd'):
        with pytest.raises(urllib.error.HTTPError):
            scrape(port, path)
    done = ckptfs.run('mount', '--store', ckptfs.store, '--metrics-listen', str(port), ckptfs.mountpoint(), check=False)
    assert done.returncode == 1 and f'127.0.0.1:{port}' in done.stderr, done.stderr
    done = ckptfs.run('mount', '--metrics-listen', 'localhost:80', ckptfs.mountpoint(), check=False)
    assert done.returncode == 2 and 'PORT' in done.stderr, done.stderr
    daemon.terminate()
    assert daemon.wait(20) == 0


def reachable(port):
    with socket.socket() as s:
        return s.connect_ex(('127.0.0.1', port)) == 0
