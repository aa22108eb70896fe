#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every form of optimizer through a mount: saved by its framework, adopted, loaded strictly, compared bit by bit.

    tests/forms/run_forms.py FOLDER [--library DIR] [--sample] [--only NAME] [--table FILE]

Each form is saved in three ways: by DCP in one process (`dcp`), by DCP on two ranks under FSDP2 (`fsdp`), and as
`optimizer.pt` beside safetensors (`file`).  The job itself then loads `view/<layout>/dcp` with its own keys, strictly,
in one process and on two ranks, and every leaf is compared with the live job's.  A cell is

    exact       all leaves are the live job's, to the last bit
    left out    `adopt` names what is not there; the rest is exact, and so are the weights
    job: ...    the job cannot save so, or cannot load its own save again: nothing to show
    WRONG ...   anything else

The exit code is 1 if a cell is WRONG.
"""
import argparse
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forms import all_forms

BIN = os.environ.get('CKPTFS_BIN', 'build/ckptfs')
WAYS = ('dcp', 'fsdp', 'file')
LAYOUTS = {1: 'tp1', 2: 'dp2'}


def whole(value):
    """The value with every DTensor gathered."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(whole(one) for one in value)
    return value


def leaves(value, at=()):
    """{path: leaf}; tuples and lists are opened, too."""
    if isinstance(value, (dict, list, tuple)) and value:
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, one in inner for path, leaf in leaves(one, (*at, str(key))).items()}
    return {at: value}


def is_same(a, b):
    if torch.is_tensor(b):
        return torch.is_tensor(a) and a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b) or pickle.dumps(a) == pickle.dumps(b) or a != a and b != b
    except Exception:
        return pickle.dumps(a) == pickle.dumps(b)


def bytes_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b''


def without(tree, paths):
    """The tree without leaves, in dicts and in lists of dicts."""
    if isinstance(tree, list):
        return [without(one, [path[1:] for path in paths if path[0] == str(i)]) for i, one in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    inner = {key: [path[1:] for path in paths if path[0] == str(key)] for key in tree}
    return {key: without(one, inner[key]) for key, one in tree.items() if () not in inner[key]}


class Job:
    """A training of one form in this process, alone or one of two ranks."""

    def __init__(self, form, seed, sharded):
        self.form, self.model = form, form.model(seed)
        if sharded:
            fully_shard(self.model)
        self.optimizer = form.optimizer(self.model)
        form.train(self.model, self.optimizer, seed)

    def state(self, numbered=False):
        """As the job gives it to DCP."""
        optimizer = self.optimizer.state_dict() if numbered else get_optimizer_state_dict(self.model, self.optimizer)
        return {'model': get_model_state_dict(self.model), 'optim': optimizer}

    def named(self):
        """{(name, kind): state} of the live optimizer, whatever its keys are."""
        names = {p: n for n, p in self.model.named_parameters()}
        return {(names[p], kind): value for p, states in self.optimizer.state.items() for kind, value in states.items()}


def save(form, folder, sharded):
    """Saves the form; what became of it, by way."""
    done = {}
    job = Job(form, 0, sharded)
    way, no_dist = ('fsdp', False) if sharded else ('dcp', True)
    numbered = False
    try:
        state = job.state()
        if not leaves(state['optim']['state']):
            raise ValueError('no states')
    except Exception:
        numbered = True
        state = job.state(numbered)
    own = f'{folder}/{way}/{form.name}/step-3'
    dcp.save(state, checkpoint_id=own, no_dist=no_dist)
    truth = whole(state)
    done[way] = {'numbered': numbered}
    if not sharded or dist.get_rank() == 0:
        torch.save(truth, f'{folder}/{way}/{form.name}.truth')
        order = [n for group in job.optimizer.param_groups for p in group['params']
                 for n, q in job.model.named_parameters() if q is p]
        with open(f'{folder}/{way}/{form.name}.order', 'w', encoding='utf-8') as out:
            out.write('\n'.join(order))
    if sharded:
        return done
    own = f'{folder}/file/{form.name}/checkpoint-3'
    os.makedirs(own)
    save_file(job.model.state_dict(), f'{own}/model.safetensors')
    torch.save(job.optimizer.state_dict(), f'{own}/optimizer.pt')
    with open(f'{own}/trainer_state.json', 'w', encoding='utf-8') as out:
        out.write('{"global_step": 3}')
    torch.save(truth, f'{folder}/file/{form.name}.truth')
    os.link(f'{folder}/dcp/{form.name}.order', f'{folder}/file/{form.name}.order')
    done['file'] = {'numbered': numbered}
    return done


def load(form, folder, way, directory, numbered, left_out, sharded):
    """Loads from the view as the job does; '' or what is wrong."""
    job = Job(form, 7, sharded)
    state = job.state(numbered)
    truth = torch.load(f'{folder}/{way}/{form.name}.truth', weights_only=False)
    if 'optimizer' in left_out:
        state, truth = {'model': state['model']}, {'model': truth['model']}
    gone = [path for path in {*leaves(truth), *leaves(state)} if is_left_out(path, left_out)]
    gone += [path[:length] for path in gone for length in range(4, len(path))]  # a leaf takes its list with it
    state, truth = without(state, gone), without(truth, gone)
    dcp.load(state, checkpoint_id=directory, no_dist=not sharded)
    got, want = leaves(whole(state)), leaves(truth)
    if sharded:  # where FSDP2 is not what saved, its groups are still the job's
        want = {path: leaf for path, leaf in want.items() if path in got or path[0] == 'model'}
    differ = sorted('.'.join(path) for path in {*got, *want}
                    if path not in got or path not in want or not is_same(got[path], want[path]))
    return ', '.join(differ[:4])


def is_left_out(path, left_out):
    """True if a line of `adopt` names the state or the setting."""
    return path[0] == 'optim' and any(what in path for what in left_out)


WAITED = 'the ranks waited for each other'


def ranks(count, body, jobs, folder):
    """Runs body(job) for each job on `count` ranks; [result, or text of an error], by job."""
    results = []
    while len(results) < len(jobs):
        meeting = f'{folder}/meeting-{count}-{len(results)}-{os.getpid()}'
        found = gang(count, body, jobs[len(results):], meeting)
        if found == [WAITED]:  # gloo is refused a port now and then; who waits for a job does so again
            found = gang(count, body, jobs[len(results):], f'{meeting}-again')
        results += found
    return results


def gang(count, body, jobs, meeting, seconds=60):
    """The results of the first jobs: until several ranks have failed, who may be out of step then, or wait for each
    other."""
    context = multiprocessing.get_context('fork')
    gc.freeze()  # or each rank would walk, and so copy, what was imported
    out, results = context.SimpleQueue(), []
    processes = [context.Process(target=rank_main, args=(rank, count, body, jobs, meeting, out)) for rank in range(count)]
    for process in processes:
        process.start()
    while len(results) < len(jobs):
        if not wait_for(out, processes, seconds):
            results.append(WAITED)
            break
        results.append(out.get())
        if count > 1 and has_failed(results[-1]):
            break
    for process in processes:
        process.kill()
        process.join()
    return results


def has_failed(result):
    return isinstance(result, str) and result != ''


def wait_for(queue, processes, seconds):
    end = time.monotonic() + seconds
    while queue.empty() and time.monotonic() < end and processes[0].is_alive():
        time.sleep(.01)
    return not queue.empty()


def rank_main(rank, count, body, jobs, meeting, out):
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group('gloo', init_method=f'file://{meeting}', rank=rank, world_size=count)
    for job in jobs:
        try:
            result = body(job)
        except BaseException as error:  # DCP's own is not an Exception
            result = f'{type(error).__name__}: {str(error).strip()}'
        if rank == 0:
            out.put(result)
        if count > 1 and has_failed(result):
            return


class Runner:
    def __init__(self, options):
        self.options, self.folder = options, os.path.abspath(options.folder)
        self.store, self.mount = f'{self.folder}/store', f'{self.folder}/mnt'
        self.forms = [f for f in all_forms(options.library, options.sample) if re.search(options.only or '', f.name)]
        self.cells, self.steps = {}, {}

    def run(self, *words, check=True):
        done = subprocess.run([BIN, *words], capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f'{words}: {done.stderr}')
        return done

    def save_all(self):
        for way in WAYS:
            os.makedirs(f'{self.folder}/{way}')
        for sharded in (False, True):
            done = ranks(2 if sharded else 1, lambda form: save(form, self.folder, sharded), self.forms, self.folder)
            for form, result in zip(self.forms, done):
                for way in ('fsdp',) if sharded else ('dcp', 'file'):
                    if has_failed(result):
                        self.cells[form.name, way] = f'job: {short(result)}'
                    else:
                        self.steps[form.name, way] = result[way]

    def adopt_all(self):
        for (name, way), step in list(self.steps.items()):
            order = ['--parameter-order', f'{self.folder}/{way}/{name}.order'] if step['numbered'] or way == 'file' else []
            done = self.run('adopt', f'{self.folder}/{way}/{name}', '--store', self.store, '--name', f'{way}-{name}', *order,
                            check=False)
            if done.returncode:
                self.cells[name, way] = f'WRONG: refused: {short(done.stderr)}'
                del self.steps[name, way]
                continue
            info = json.loads(self.run('info', '--store', self.store, '--json', done.stdout.split()[0]).stdout)
            step['left_out'] = sorted({state_of(one) for one in info.get('left_out', []) if is_gone(one)})
            if step['left_out'] and 'left out' not in done.stderr:
                self.cells[name, way] = f'WRONG: adopt does not say that {step["left_out"]} are left out'

    def view(self, name, way, world):
        """Its own keys, without a token where DCP saved it."""
        steps = f'{self.mount}/run/{way}-{name}/step'
        step, = os.listdir(steps)
        keys = '_numbered' if way == 'file' and self.steps[name, way]['numbered'] else ''
        return f'{steps}/{step}/view/{LAYOUTS[world]}{keys}/dcp'

    def load_all(self):
        by_name = {form.name: form for form in self.forms}
        for world in LAYOUTS:
            jobs = [(by_name[name], way, step) for (name, way), step in self.steps.items()
                    if world == 1 or (name, 'fsdp') in self.steps]

            def body(job, world=world):
                form, way, step = job
                return load(form, self.folder, way, self.view(form.name, way, world), step['numbered'], step['left_out'], world > 1)
            for job, result in zip(jobs, ranks(world, body, jobs, self.folder)):
                if has_failed(result) and world > 1:  # ranks may not have met
                    result, = ranks(world, body, [job], self.folder)
                self.judge(*job, world, result)

    def judge(self, form, way, step, world, result):
        """A load that fails shows nothing if the job's own directory fails it, too."""
        cell = self.cells.get((form.name, way), '')
        if result == '':
            text = f'left out: {", ".join(step["left_out"])}' if step['left_out'] else 'exact'
        else:
            text = f'WRONG at {world}: {short(result)}'
            saved = 'fsdp' if way == 'fsdp' else 'dcp'
            own, = ranks(world, lambda _: load(form, self.folder, saved, f'{self.folder}/{saved}/{form.name}/step-3',
                                               step['numbered'], [], world > 1), [None], self.folder)
            if has_failed(own):
                text = f'job at {world}: {short(own)}'
        if not cell or text.startswith('WRONG') and not cell.startswith('WRONG'):
            self.cells[form.name, way] = text

    def table(self):
        lines = ['| form | ' + ' | '.join(WAYS) + ' |', '| --- |' + ' --- |' * len(WAYS)]
        for form in self.forms:
            lines.append(f'| {form.name} | ' + ' | '.join(self.cells.get((form.name, way), '?') for way in WAYS) + ' |')
        counts = {}
        for cell in self.cells.values():
            kind = re.split(r'[: ]', cell)[0]
            counts[kind] = counts.get(kind, 0) + 1
        return '\n'.join([*lines, '', f'{len(self.forms)} forms, {len(self.cells)} cells: {counts}', ''])

    def main(self):
        self.save_all()
        self.adopt_all()
        os.makedirs(self.mount)
        self.run('mount', '--store', self.store, '--reserve', '0', self.mount)
        try:
            self.load_all()
        finally:
            self.run('umount', self.mount)
        table = self.table()
        print(table)
        if self.options.table:
            with open(self.options.table, 'w', encoding='utf-8') as out:
                out.write(table)
        return int(any(cell.startswith('WRONG') for cell in self.cells.values()) or not self.cells)


def is_gone(left_out):
    """True if `dcp/` does not show it either."""
    return left_out.get('part') == 'optimizer' and 'dcp/ alone shows it' not in left_out['text']


def state_of(left_out):
    """The state or setting that a line of `info` speaks of, or the whole optimizer."""
    state = re.match(r"(?:optimizer state|the optimizer's|the optimizer's state|the optimizer's setting) '([^']+)'", left_out['what'])
    return state.group(1) if state else 'optimizer'


def short(text):
    """One line of a message; the last one of DCP's, which quotes every rank's."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or [text]
    return re.sub(r'[\s|]+', ' ', lines[-1] if text.startswith('CheckpointException') else ' '.join(lines))[:160]


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folder')
    parser.add_argument('--library')
    parser.add_argument('--sample', action='store_true')
    parser.add_argument('--only')
    parser.add_argument('--table')
    sys.exit(Runner(parser.parse_args()).main())
