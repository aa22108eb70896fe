# SPDX-License-Identifier: Apache-2.0
"""Files that the ranks of an FSDP job wrote each for itself, as verl and SkyRL do.  What is shown is what torch put
together from the live job; files that are not of one save, or not of the ranks that their names say, are refused."""
import json
import os
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import daemon
from daemon import run_ranks, step_of, wait_until
from zygote import Zygote

HERE = os.path.dirname(os.path.abspath(__file__))
WORLDS = {'fsdp': 2, 'wide': 4, 'hsdp': 4, 'tp': 4, 'tied': 2, 'alone': 1, 'flat': 2, 'flat_mesh': 2}
PROVED = ['fsdp', 'wide', 'hsdp', 'tp', 'tied', 'alone']  # of FSDP2
STEP = 'global_step_2'
ZYGOTE = Zygote(['torch', 'torch.distributed.fsdp', 'torch.distributed.tensor.parallel', 'transformers.models.llama.modeling_llama'])


@pytest.fixture(scope='module', autouse=True)
def end_of_zygote():
    """It waits for programs to start."""
    yield
    ZYGOTE.close()


@pytest.fixture(scope='module')
def jobs(tmp_path_factory):
    """The folder of a training, by its kind; each is made once."""
    root, made = tmp_path_factory.mktemp('jobs'), {}

    def job(kind):
        if kind not in made:
            folder = str(root / kind)
            os.makedirs(folder)
            words = [sys.executable, os.path.join(HERE, 'rank_shards_job.py'), folder, kind]
            run_ranks([[*words, str(rank), str(WORLDS[kind])] for rank in range(WORLDS[kind])], f'{folder}/log', 300, ZYGOTE.start,
                      env={**os.environ, 'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1', 'TRANSFORMERS_VERBOSITY': 'error'})
            made[kind] = folder
        return made[kind]
    return job


@pytest.fixture(scope='module')
def program(tmp_path_factory):
    one = daemon.Ckptfs(str(tmp_path_factory.mktemp('rank_shards')))
    yield one
    one.close()


@pytest.fixture(scope='module')
def shown(jobs, program):
    """(the folder of a job, the view directory of its last step), by kind."""
    folders = {kind: jobs(kind) for kind in WORLDS}
    for kind, folder in folders.items():
        program.adopt(f'{folder}/run', kind)
    mount = program.mount()
    return {kind: (folder, step_of(mount, kind, STEP)) for kind, folder in folders.items()}


def differ(got, want):
    """Names that only one has, and those of other elements."""
    return [k for k in want if k not in got or got[k].shape != want[k].shape or not torch.equal(got[k], want[k])] + sorted(set(got) - set(want))


@pytest.mark.parametrize('kind', WORLDS)
def test_the_weights_are_the_live_jobs(shown, kind):
    folder, step = shown[kind]
    assert not differ(load_file(f'{step}/view/tp1/huggingface/model.safetensors'), load_file(f'{folder}/truth/model.safetensors'))
    loaded = AutoModelForCausalLM.from_pretrained(f'{step}/view/tp1/huggingface')
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=torch.arange(16).view(2, 8)).logits, torch.load(f'{folder}/logits.pt'))


@pytest.mark.parametrize('kind', PROVED)
def test_the_moments_are_the_live_jobs(shown, kind):
    folder, step = shown[kind]
    held = torch.load(f'{step}/view/tp1/rank0/optimizer.pt', weights_only=True)
    assert not differ({k: v for k, v in held.items() if k.startswith('exp_avg')}, torch.load(f'{folder}/moments.pt'))


@pytest.mark.parametrize('kind', ['flat', 'flat_mesh'])
def test_flat_parameters_leave_the_optimizer_out(shown, kind):
    with open(f'{shown[kind][1]}/info.json', encoding='utf-8') as f:
        info = json.load(f)
    assert [one for one in info['left_out'] if one['part'] == 'optimizer' and 'FSDP1' in one['why']], info['left_out']


@pytest.mark.parametrize('kind', ['wide', 'tp'])
def test_dcp_and_other_layouts_are_cut_from_the_same_bytes(shown, kind):
    folder, step = shown[kind]
    truth, moments = load_file(f'{folder}/truth/model.safetensors'), torch.load(f'{folder}/moments.pt')
    state = {'model': {name: torch.empty_like(value) for name, value in truth.items()}}
    dcp.load(state, checkpoint_id=f'{step}/view/tp1/dcp', no_dist=True)
    assert not differ(state['model'], truth)
    name = 'model.layers.1.mlp.up_proj.weight'
    universal = f'{step}/view/dp2_zero1/deepspeed/{STEP}/zero/{name}'
    assert torch.equal(torch.load(f'{universal}/fp32.pt', weights_only=False)['param'], truth[name])
    assert torch.equal(torch.load(f'{universal}/exp_avg.pt', weights_only=False)['param'], moments[f'exp_avg/{name}'])
    name = 'model.layers.1.self_attn.q_proj.weight'
    parts = [load_file(f'{step}/view/tp2/rank{r}/model.safetensors')[name] for r in range(2)]
    assert torch.equal(torch.cat(parts), truth[name])


def test_a_run_has_its_steps_and_each_has_one_model(jobs, tmp_path):
    program = daemon.Ckptfs(str(tmp_path))
    try:
        shutil.copytree(f"{jobs('fsdp')}/run", tmp_path / 'run')
        shutil.copytree(tmp_path / 'run/global_step_1/actor', tmp_path / 'run/global_step_2/critic')
        said = program.adopt(tmp_path / 'run')
        assert "'critic/'" in said.stdout + said.stderr
        program.adopt(tmp_path / 'run/global_step_2/critic', 'critic')
        mount = program.mount()
        assert sorted(os.listdir(f'{mount}/run/run/step')) == ['global_step_1', STEP]
        first, critic = step_of(mount, 'run', 'global_step_1'), step_of(mount, 'critic')
        assert not differ(*(load_file(f'{one}/view/tp1/rank0/model.safetensors') for one in (first, critic)))
        assert sorted(os.listdir(f"{step_of(mount, 'run', STEP)}/source/{STEP}")) == ['actor', 'critic', 'data.pt']
    finally:
        program.close()


class Copy:
    """A copy of a step of two ranks, to be changed."""

    def __init__(self, job, folder):
        self.job, self.actor = job, str(folder / f'run/{STEP}/actor')
        shutil.copytree(f'{job}/run/{STEP}', folder / f'run/{STEP}')

    def path(self, kind, rank, world=2):
        return f'{self.actor}/{kind}_world_size_{world}_rank_{rank}.pt'

    def other(self, kind, rank):
        """The file of the step before."""
        return f'{self.job}/run/global_step_1/actor/{kind}_world_size_2_rank_{rank}.pt'


@pytest.fixture
def copy(jobs, tmp_path):
    return Copy(jobs('fsdp'), tmp_path)


def refusal(copy, tmp_path, *extra):
    """The words in which `adopt` refuses it."""
    program = daemon.Ckptfs(str(tmp_path))
    done = program.adopt(copy.actor, check=False, extra=extra)
    program.close()
    assert done.returncode != 0, done.stdout
    return done.stderr + done.stdout


@pytest.mark.parametrize('kind', ['model', 'optim'])
def test_a_missing_rank_is_named(copy, tmp_path, kind):
    os.unlink(copy.path(kind, 1))
    assert f'no {kind}_world_size_2_rank_1.pt' in refusal(copy, tmp_path)


def test_without_an_optimizers_file_the_weights_are_taken_if_asked_for(copy, tmp_path):
    os.unlink(copy.path('optim', 1))
    program = daemon.Ckptfs(str(tmp_path))
    try:
        program.adopt(copy.actor, 'run', extra=['--weights-only'])
        step = step_of(program.mount(), 'run')
        assert not differ(load_file(f'{step}/view/tp1/huggingface/model.safetensors'), load_file(f'{copy.job}/truth/model.safetensors'))
    finally:
        program.close()


@pytest.mark.parametrize('kinds', [('model', 'optim', 'extra_state'), ('optim',), ('extra_state',)])
def test_files_of_another_save_are_refused(copy, tmp_path, kinds):
    for kind in kinds:
        shutil.copy(copy.other(kind, 1), copy.path(kind, 1))
    assert 'not of one save' in refusal(copy, tmp_path)


def test_exchanged_names_are_refused(copy, tmp_path):
    for kind in ('model', 'optim'):
        os.rename(copy.path(kind, 0), copy.path(kind, 9))
        os.rename(copy.path(kind, 1), copy.path(kind, 0))
        os.rename(copy.path(kind, 9), copy.path(kind, 1))
    assert 'its name says rank' in refusal(copy, tmp_path)


def test_files_of_another_world_size_are_named_and_left_out(jobs, copy, tmp_path):
    wide = f"{jobs('wide')}/run/{STEP}/actor"
    for name in os.listdir(wide):
        if name.startswith('model_world_size_4'):
            shutil.copy(f'{wide}/{name}', copy.actor)
    program = daemon.Ckptfs(str(tmp_path))
    try:
        said = program.adopt(copy.actor, 'run')
        assert 'model_world_size_4_rank_0.pt' in said.stdout + said.stderr
        step = step_of(program.mount(), 'run')
        assert not differ(load_file(f'{step}/view/tp1/huggingface/model.safetensors'), load_file(f'{copy.job}/truth/model.safetensors'))
    finally:
        program.close()
    os.unlink(f'{copy.actor}/fsdp_config.json')
    (tmp_path / 'second').mkdir()
    assert 'no fsdp_config.json says which' in refusal(copy, tmp_path / 'second')


def saved_again(path, change):
    """The file with its DTensors' spec or mesh changed."""
    state = torch.load(path, weights_only=False)
    for value in state.values():
        change(value)
    torch.save(state, path)


def rank_map(value):
    value._spec.mesh._rank_map = torch.tensor([1, 0], dtype=torch.int)


def placement(value):
    value._spec.placements = (torch.distributed.tensor.Shard(1),)


def coordinate(value):
    value._spec.mesh._coordinate_on_dim = (0,)


@pytest.mark.parametrize('change', [rank_map, placement, coordinate])
@pytest.mark.parametrize('ranks', [(0,), (1,), (0, 1)])
def test_a_changed_mesh_is_refused(copy, tmp_path, change, ranks):
    if change is coordinate and ranks == (0,):
        pytest.skip('it is at 0')
    for rank in ranks:
        saved_again(copy.path('model', rank), change)
    refusal(copy, tmp_path)


def test_a_step_of_a_running_job_is_taken_when_its_tracker_says_so(jobs, tmp_path):
    program = daemon.Ckptfs(str(tmp_path))
    try:
        run = tmp_path / 'run'
        run.mkdir()
        _, mount = program.start('--follow', run)
        saved = f"{jobs('fsdp')}/run/{STEP}"
        shutil.copytree(saved, run / STEP, copy_function=shutil.copyfile)
        (run / 'latest_checkpointed_iteration.txt').write_text('2')
        wait_until(lambda: os.path.isdir(f'{mount}/run/run/step/{STEP}'), 'the step', seconds=60)
    finally:
        program.close()
