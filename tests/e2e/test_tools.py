# SPDX-License-Identifier: Apache-2.0
"""Steps that training tools wrote, made by the tools themselves.  They are a run and hold what the
live job had; a training goes on from their views as one that never stopped."""
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tool_jobs import MIDDLE, UPDATES, model

from daemon import checkpoint, run_ranks
from ports import held_port
from zygote import Zygote

HERE = os.path.dirname(os.path.abspath(__file__))

# (tool, way, ranks) -> the directory of its runs, the run's name, and the step's id
MADE = {
    ('trainer', 'plain', 1): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('trainer', 'zero2', 2): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('trainer', 'zero0', 2): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('trainer', 'zero3', 2): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('trainer', 'fsdp1', 2): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('trainer', 'fsdp2', 2): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('trainer', 'fsdp2full', 2): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('accelerate', 'plain', 1): ('project', 'project', 'checkpoint_0'),
    ('accelerate', 'zero1', 1): ('project', 'project', 'checkpoint_0'),
    ('accelerate', 'zero2', 2): ('project', 'project', 'checkpoint_0'),
    ('accelerate', 'fsdp1', 2): ('project', 'project', 'checkpoint_0'),
    ('accelerate', 'fsdp2', 2): ('project', 'project', 'checkpoint_0'),
    ('accelerate', 'fsdp2full', 2): ('project', 'project', 'checkpoint_0'),
    ('lightning', 'plain', 1): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
    ('lightning', 'zero1', 1): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
    ('lightning', 'zero2', 2): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
    ('lightning', 'zero3', 2): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
    ('lightning', 'fsdp1', 2): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
    ('lightning', 'fsdp1full', 2): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
    ('lightning', 'fsdp2', 2): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
    ('lightning', 'fsdp2full', 2): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
}

ZYGOTE = Zygote(['transformers.trainer', 'transformers.models.llama.modeling_llama', 'deepspeed',
                 'lightning.pytorch', 'torch.distributed.checkpoint', 'torch.distributed.fsdp'])


@pytest.fixture(scope='module', autouse=True)
def end_of_zygote():
    """It waits for programs to start."""
    yield
    ZYGOTE.close()


def run(folder, tool, way, ranks, *path, **more):
    """A training to its end."""
    words = [sys.executable, os.path.join(HERE, 'tool_jobs.py'), tool, way, folder]
    with held_port() as port:
        run_ranks([[*words, str(rank), str(ranks), *path] for rank in range(ranks)], f'{folder}/log', 300,
                  ZYGOTE.start, env={**os.environ, 'TOOL_PORT': str(port), **more})


def train(folder, tool, way, ranks, *path, **more):
    """The losses of a training; with a path, of one that goes on from it."""
    run(folder, tool, way, ranks, *path, **more)
    with open(f'{folder}/{"resumed" if path else "losses"}.json', encoding='utf-8') as f:
        return json.load(f)


class Job:
    """One tool's job, its losses, and a mount of what it wrote."""

    def __init__(self, folder, tool, way, ranks):
        self.folder, self.tool, self.way, self.ranks = folder, tool, way, ranks
        self.losses = train(folder, tool, way, ranks)
        path, self.run, self.id = MADE[tool, way, ranks]
        self.path = os.path.join(folder, path)
        self.order = os.path.join(folder, 'order')
        with open(self.order, 'w', encoding='utf-8') as f:
            f.write('\n'.join(self.names_in_order()))

    def names_in_order(self):
        """As the optimizer was given them: Trainer's has two groups, Lightning's module has the model as `net`."""
        named = list(model().named_parameters())
        if self.tool == 'trainer':
            named.sort(key=lambda one: one[1].ndim < 2)
        return [f'net.{name}' if self.tool == 'lightning' else name for name, _ in named]

    def adopt(self, ckptfs, *more):
        """The step's directory in a mount of what the job wrote."""
        done = ckptfs.adopt(self.path, extra=more)
        assert f'{self.run}/{self.id}' in done.stdout.split(), done.stdout
        return os.path.join(ckptfs.mount(), 'run', self.run, 'step', self.id)

    def resumed(self, path, way=None, ranks=None, **more):
        """The losses of a training that goes on from a path."""
        return train(self.folder, self.tool, way or self.way, ranks or self.ranks, path, **more)

    def loaded(self, path, way, ranks):
        """{parameter: {kind: tensor}} of a job that was to go on from a path."""
        file = f'{self.folder}/loaded.pt'
        run(self.folder, self.tool, way, ranks, path, TOOL_LOAD=file)
        return torch.load(file)

    def own(self):
        """Returns what the tool itself wrote."""
        above = '' if self.tool == 'trainer' else 'checkpoints/'
        return f'{self.path}/{above}{self.id}'

    @property
    def engine(self):
        """The way of an engine that goes on from a view: DeepSpeed loads universal directories at ZeRO 1 to 3 alone."""
        return 'zero1' if self.way == 'zero0' else self.way

    @property
    def counts_twice(self):
        """True if DeepSpeed's universal loader at ZeRO 3 gives two groups, which Trainer makes, one
        tensor that counts the steps: torch's Adam then counts each twice, and its bias corrections
        are those of later steps."""
        return (self.tool, self.way) == ('trainer', 'zero3')

    def goes_on(self, losses):
        """True if they are what a training that goes on must have."""
        expected = self.expected()
        return losses == (pytest.approx(expected, abs=ROUNDED) if self.counts_twice else expected)

    def expected(self):
        """Returns the losses of a training that goes on.  Lightning's DeepSpeedStrategy and FSDP1
        under accelerate do not go on as one that never stopped even from their own directory: then
        as from that."""
        if (self.tool, self.way) not in (('trainer', 'fsdp1'), ('accelerate', 'fsdp1'), ('lightning', 'zero1')):
            return self.losses[MIDDLE:]
        return self.resumed(self.own(), TOOL_NATIVE='1')

    def path_in(self, step, layout):
        """Returns what the tool goes on from: Lightning's whole tensors are one file."""
        folder = f'{step}/view/{layout}/{self.tool}'
        file = self.tool == 'lightning' and (self.way == 'plain' or self.way.endswith('full'))
        return f'{folder}/{self.id}' if file else folder

    @property
    def sharded(self):
        """By FSDP, in what it saved."""
        return self.way in ('fsdp1', 'fsdp2')

    @property
    def layout(self):
        """Returns the layout of the degrees that it has."""
        words = [f'dp{self.ranks}'] if self.ranks > 1 else []
        return '_'.join(words + ([self.engine] if self.way.startswith('zero') else [])) or 'tp1'


@pytest.fixture(scope='module')
def jobs(tmp_path_factory):
    """Each tool's job, made once."""
    made = {}

    def get(key):
        if key not in made:
            made[key] = Job(str(tmp_path_factory.mktemp('job')), *key)
        return made[key]
    return get


@pytest.fixture
def job(request, jobs):
    """One of them."""
    return jobs(request.param)


def of(*keys):
    """Marks a test that is about these jobs."""
    return pytest.mark.parametrize('job', keys, ids=lambda one: '-'.join(map(str, one)), indirect=True)


LONG = [('lightning', 'zero3', 2), ('lightning', 'fsdp1full', 2), ('lightning', 'fsdp2full', 2), ('accelerate', 'fsdp2full', 2),
        ('accelerate', 'zero1', 1)]
OF_ALL = of(*(key for key in MADE if key not in LONG or os.environ.get('CKPTFS_LONG')))
ROUNDED = 1e-4  # losses may differ by it where sums have another order; a wrong moment or rate moves it by more
FULL = ('trainer', 'fsdp2full', 2)
TRAINER, ZERO, FSDP1, FSDP2 = ('trainer', 'plain', 1), ('trainer', 'zero2', 2), ('trainer', 'fsdp1', 2), ('trainer', 'fsdp2', 2)
ZERO0, ZERO3 = ('trainer', 'zero0', 2), ('trainer', 'zero3', 2)
LIGHTNING_ZERO, LIGHTNING_SHARDED = ('lightning', 'zero2', 2), [('lightning', 'fsdp1', 2), ('lightning', 'fsdp2', 2)]
ACCELERATE_ZERO, ACCELERATE_ZERO2, ACCELERATE_FSDP = ('accelerate', 'zero1', 1), ('accelerate', 'zero2', 2), ('accelerate', 'fsdp2', 2)


def shown(step):
    """{parameter: {kind: tensor}} of a step's rank files."""
    folder = f'{step}/view/tp1/rank0'
    # Copies: a file that is mapped keeps the mount.
    out = {k: {'weight': t.clone()} for k, t in load_file(f'{folder}/model.safetensors').items()}
    for key, tensor in load_file(f'{folder}/optimizer.safetensors').items():
        kind, name = key.split('/', 1)
        out[name][kind] = tensor.clone()
    return out


def info(ckptfs, path, *words):
    return json.loads(ckptfs.run('info', path, '--json', *words).stdout)


@OF_ALL
def test_a_step_is_found_and_is_what_the_job_had(ckptfs, job):
    if job.way in ('zero1', 'zero2'):  # the matrix compares these with DeepSpeed's own conversion
        said = info(ckptfs, job.path)
        assert said['kinds']['exp_avg']['atoms'] == said['parameters']['trainable']['number']
        assert said['iteration'] >= MIDDLE
        assert job.adopt(ckptfs)
        return
    plain = info(ckptfs, job.path)
    words = ()
    numbered = job.tool == 'lightning' and job.way.endswith('full')  # it gives FSDP's names numbers again
    if job.way == 'plain' or numbered:  # nothing says whose they are
        assert 'exp_avg' not in plain['kinds']
        assert any('--parameter-order' in one['needs'] for one in plain['left_out'])
        words = '--parameter-order', job.order
    step = shown(job.adopt(ckptfs, *words))
    truth = torch.load(f'{job.folder}/truth.pt')
    assert set(step) == set(truth)
    for name, states in truth.items():
        for kind, tensor in states.items():
            assert torch.equal(step[name][kind], tensor), (name, kind)
        assert job.sharded or torch.equal(step[name]['master'], states['weight']), name


@OF_ALL
def test_source_is_the_directory_as_it_is(ckptfs, job):
    # safetensors writes files that others may not read; beside an engine's they are left out.
    subprocess.run(['chmod', '-R', 'a+rX', job.path], check=True)
    step = job.adopt(ckptfs)
    made = subprocess.run(['find', job.path, '-name', job.id], capture_output=True, text=True,
                          check=True).stdout.strip()
    assert subprocess.run(['diff', '-r', made, f'{step}/source/{job.id}'], capture_output=True,
                          check=False).stdout == b''


def test_stock_scripts_run_in_source(ckptfs, tmp_path):
    """Each of two steps has the pointer to itself, though the job's names the last."""
    source = tmp_path / 'run'
    subprocess.run(['cp', '-r', checkpoint('zero2'), source], check=True)
    tag, = [p for p in os.listdir(source) if p.startswith('global_step')]
    subprocess.run(['cp', '-r', source / tag, source / 'global_step9'], check=True)
    script = importlib.util.find_spec('deepspeed.utils.zero_to_fp32').origin
    shutil.copy(script, source)  # as the engine does
    ckptfs.adopt(source, extra=('--replicated', r'.*\.tally\..*'))
    mount = ckptfs.mount()
    (source / 'latest').write_text('elsewhere')  # the job goes on
    (source / 'zero_to_fp32.py').write_text('')
    for name in tag, 'global_step9':
        folder = f'{mount}/run/run/step/{name}/source'
        assert 'zero_to_fp32.py' in os.listdir(folder)
        with open(f'{folder}/latest', encoding='utf-8') as f:
            assert f.read() == name
        subprocess.run([sys.executable, 'zero_to_fp32.py', '.', tmp_path / name], cwd=folder,
                       check=True, capture_output=True)
        assert os.listdir(tmp_path / name)
    assert {s['state'] for s in ckptfs.list()['steps']} == {'sound'}


@of(TRAINER)
def test_a_save_that_trainer_did_not_end_is_skipped(ckptfs, job):
    last = f'{job.path}/checkpoint-{UPDATES}'
    os.rename(f'{last}/trainer_state.json', f'{job.folder}/away')
    try:
        done = ckptfs.adopt(job.path)
        assert done.stdout.split() == [f'output/checkpoint-{MIDDLE}']
        assert 'no trainer_state.json, which Trainer writes last' in done.stderr
    finally:
        os.rename(f'{job.folder}/away', f'{last}/trainer_state.json')


# The file that each tool writes last; only other ranks' own files follow it.
LAST = {'trainer': 'trainer_state.json', 'accelerate': 'random_states_0.pkl', 'lightning': 'meta.pt'}
RANDOM = ('rng_state', 'random_states')


@of(*(key for key in MADE if key[1] not in ('zero0', 'zero3') and (key[0] != 'lightning' or key in LIGHTNING_SHARDED)))
def test_a_save_that_died_anywhere_is_no_step(ckptfs, job, tmp_path):
    """Its files in the order in which the tool wrote them, a save with each more of them, and without the last."""
    own, last = job.own(), LAST[job.tool]
    files = [os.path.relpath(os.path.join(folder, name), own)
             for folder, _, names in os.walk(own) for name in names]
    written = sorted((os.stat(f'{own}/{name}').st_mtime_ns, name) for name in files
                     if name != last and not name.startswith(RANDOM))
    saves = [[name for _, name in written[:count]] for count in range(1, len(written) + 1)] + [files]
    before = job.tool != 'lightning'  # a file may be the script's own: the step before tells
    step = job.id.replace('_0', '_1')
    for number, names in enumerate(saves):
        if before:
            shutil.copytree(own, tmp_path / f'{number}' / job.id.replace(str(MIDDLE), str(MIDDLE - 1)))
        for name in names:
            path = tmp_path / f'{number}' / step / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(f'{own}/{name}', path)
    done = [ckptfs.adopt(tmp_path / f'{number}', check=False) for number in range(len(saves))]
    taken = [name for one in done for name in one.stdout.split() if name.endswith(f'/{step}')]
    assert taken == [f'{len(saves) - 1}/{step}'], [one.stderr for one in done]
    assert f'no {last}, which ' in done[-2].stderr


@OF_ALL
def test_a_training_goes_on_as_one_that_never_stopped(ckptfs, job):
    """At the same degrees with the same losses, to the last bit."""
    step = job.adopt(ckptfs)
    losses = job.resumed(job.path_in(step, job.layout), job.engine)
    assert job.goes_on(losses), (losses, job.losses)


@of(ZERO, ZERO3, ACCELERATE_ZERO2)
def test_a_training_goes_on_at_other_degrees(ckptfs, job):
    """Two ranks at ZeRO 2 as one at ZeRO 1, two at ZeRO 3 as one."""
    step = job.adopt(ckptfs)
    stage = 'zero3' if job.way == 'zero3' else 'zero1'
    losses = job.resumed(f'{step}/view/{stage}/{job.tool}', stage, 1)
    assert losses == pytest.approx(job.losses[MIDDLE:], abs=ROUNDED)


@of(ZERO, LIGHTNING_ZERO)
def test_the_engines_script_runs_in_source(ckptfs, job, tmp_path):
    """Its tag is named by the file beside it; the weights are the masters."""
    step = job.adopt(ckptfs)
    script = ZYGOTE.start([sys.executable, 'zero_to_fp32.py', '.', tmp_path], cwd=f'{step}/source/{job.id}')
    assert script.wait(60) == 0
    whole = torch.load(tmp_path / 'pytorch_model.bin')
    masters = {name: states['master'] for name, states in shown(step).items()}
    assert set(whole) == set(masters)
    assert all(torch.equal(whole[name], master) for name, master in masters.items())


def assert_same(loaded, truth):
    """Bit for bit, and nothing more or less."""
    assert set(loaded) == set(truth)
    for name, states in truth.items():
        assert set(loaded[name]) == set(states), name
        for kind, tensor in states.items():
            assert torch.equal(loaded[name][kind], tensor), (name, kind)


def masters_of(step):
    """{parameter: {kind: tensor}} of a job that holds masters."""
    return {name: {'weight': states['master'], **{k: states[k] for k in ('exp_avg', 'exp_avg_sq', 'step')}}
            for name, states in shown(step).items()}


@of(FSDP1, FSDP2, ACCELERATE_FSDP, *LIGHTNING_SHARDED)
def test_a_sharded_training_goes_on_on_more_ranks(ckptfs, job):
    """The job then holds what the other held, bit for bit."""
    step = job.adopt(ckptfs)
    truth = torch.load(f'{job.folder}/truth.pt')
    if job.way == 'fsdp1' and job.tool != 'lightning':  # see tool_jobs.end_when_loaded
        truth = {name: {'weight': states['weight']} for name, states in truth.items()}
    assert_same(job.loaded(f'{step}/view/dp3/{job.tool}', job.way, 3), truth)


@of(FSDP2, ZERO, FULL)
def test_a_training_goes_on_under_another_hand(ckptfs, job):
    """FSDP's with DeepSpeed, on one rank that has the rows of both, and with FSDP that shards what it saves
    what DeepSpeed saved, or one that did not."""
    step = job.adopt(ckptfs)
    if job.sharded:
        losses = job.resumed(f'{step}/view/zero1/trainer', 'zero1', 1, TOOL_DROPOUT='0', TOOL_BATCH='2')
        own = job.resumed(job.own(), TOOL_DROPOUT='0')
        assert losses == pytest.approx(own, abs=ROUNDED)
        return
    assert not os.path.exists(f'{step}/view/dp2/trainer/optimizer_0')
    layout = 'dp2_accelerate' if job.way == 'fsdp2full' else 'dp2_fp32_accelerate'
    assert_same(job.loaded(f'{step}/view/{layout}/trainer', 'fsdp2', 2), masters_of(step))


@of(ZERO, ACCELERATE_ZERO, ZERO0, ZERO3)
def test_a_training_goes_on_without_deepspeed(ckptfs, job):
    """With the optimizer, whose states are numbered by two groups of Trainer's."""
    step = job.adopt(ckptfs)
    path = f'{step}/view/fp32/{job.tool}'
    assert_same(job.loaded(path, 'plain', 1), masters_of(step))
    assert job.resumed(path, 'plain', 1) == pytest.approx(job.losses[MIDDLE:], abs=ROUNDED)


@of(ACCELERATE_FSDP)
def test_sharded_weights_are_merged_by_the_tool(ckptfs, job, tmp_path):
    """accelerate's own merge of a directory, which must have the weights and nothing else."""
    step = job.adopt(ckptfs)
    ZYGOTE.start([sys.executable, '-c', 'import sys; from accelerate.utils import merge_fsdp_weights; '
                  'merge_fsdp_weights(*sys.argv[1:])', f'{step}/view/dp2/accelerate/pytorch_model_fsdp_0',
                  tmp_path]).wait(60)
    merged = load_file(tmp_path / 'model.safetensors')
    truth = torch.load(f'{job.folder}/truth.pt')
    assert set(merged) == set(truth)
    assert all(torch.equal(merged[name], states['weight']) for name, states in truth.items())


@of(TRAINER)
def test_a_plain_training_goes_on_with_deepspeed(ckptfs, job):
    """Where its optimizer's states have names."""
    unnamed = job.adopt(ckptfs)
    assert not os.path.exists(f'{unnamed}/view/zero1/trainer/latest_universal')
    ckptfs.adopt(job.path, 'named', extra=('--parameter-order', job.order))
    step = os.path.join(ckptfs.mount(), 'run', 'named', 'step', job.id)
    losses = job.resumed(f'{step}/view/zero1/trainer', 'zero1')
    assert losses == pytest.approx(job.losses[MIDDLE:], abs=ROUNDED)


@OF_ALL
def test_views_of_a_tool_are_its_own(ckptfs, job):
    step = job.adopt(ckptfs)
    for tool in 'trainer', 'accelerate', 'lightning':
        assert os.path.exists(f'{step}/view/tp1/{tool}') == (tool == job.tool)
    with open(f'{step}/view/tp1/info.json', encoding='utf-8') as f:
        assert 'not saved by' in f.read()
    if job.way == 'plain':  # whole tensors, for data parallelism alone
        assert not os.path.exists(f'{step}/view/tp2/{job.tool}')
    if job.sharded:  # the tool chose its keys
        assert not os.path.exists(f'{step}/view/titan/{job.tool}')


@of(*LIGHTNING_SHARDED)
def test_lightnings_directory_has_the_layouts_files_alone(ckptfs, job):
    """A view for three ranks has no file of the two ranks', and no engine's tag."""
    step = job.adopt(ckptfs)
    folder = f'{step}/view/tp1/lightning'
    assert sorted(os.listdir(folder)) == ['.metadata', '__0_0.distcp', 'meta.pt']
    with open(f'{folder}/meta.pt', 'rb') as shown, open(f'{job.own()}/meta.pt', 'rb') as own:
        assert shown.read() == own.read()
    assert not os.path.exists(f'{step}/view/accelerate/lightning')


@of(LIGHTNING_SHARDED[0])
def test_without_its_own_file_it_is_no_strategys(ckptfs, job):
    """dcp.save alone wrote into a directory whose name ends so."""
    shutil.copytree(job.own(), f'{job.folder}/bare/mine.ckpt')
    os.remove(f'{job.folder}/bare/mine.ckpt/meta.pt')
    ckptfs.adopt(f'{job.folder}/bare')
    step = os.path.join(ckptfs.mount(), 'run', 'bare', 'step', 'mine.ckpt')
    assert not os.path.exists(f'{step}/view/tp1/lightning')
    with open(f'{step}/view/tp1/info.json', encoding='utf-8') as f:
        assert 'meta.pt is missing' in f.read()
