# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries: each architecture's modules and files are each other's views.

Maps are never trusted, they are compared: transformers itself writes the files of tiny models whose elements are
distinct integers, and a view in the other spelling must have these names and these elements.
"""
import json
import os
import re
import shutil
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM

import daemon
from dcp_reads import read_dcp

HERE = os.path.dirname(os.path.abspath(__file__))
TABLES = os.path.join(HERE, '..', '..', 'formats', 'dialects')
sys.path.insert(0, TABLES)
import derive_hf5  # noqa: E402  pylint: disable=wrong-import-position

KINDS = list(derive_hf5.ARCHITECTURES)
MIXED = [kind for kind in KINDS if kind in ('mixtral', 'qwen2_moe', 'qwen3_moe', 'deepseek_v3')]
warnings.filterwarnings('ignore')


@pytest.fixture(scope='module')
def models():
    """Every architecture, of distinct integers."""
    return {kind: derive_hf5.build(kind) for kind in KINDS}


def save_modules(folder, state, config):
    """A state_dict as a job with FSDP saves it, with the config beside it."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    shutil.copy(config, folder)


@pytest.fixture(scope='module')
def shown(models, tmp_path_factory):
    """All of them in both spellings, in one mount: (mount, {kind: files}, {kind: modules})."""
    root = str(tmp_path_factory.mktemp('dialects'))
    program = daemon.Ckptfs(root)
    files, modules = {}, {}
    for kind, model in models.items():
        written = f'{root}/files-{kind}'
        files[kind] = derive_hf5.files_of(model, written)
        modules[kind] = derive_hf5.modules_of(model)
        save_modules(f'{root}/modules-{kind}', {'model': model.state_dict()}, f'{written}/config.json')
        program.adopt(written, f'files-{kind}')
        program.adopt(f'{root}/modules-{kind}', f'modules-{kind}')
    yield program.mount(), files, modules
    program.close()


def assert_same(got, want, what):
    """The same names, shapes and elements."""
    assert set(got) == set(want), (what, sorted(set(got) ^ set(want))[:4])
    for name, tensor in want.items():
        assert got[name].shape == tensor.shape and torch.equal(got[name], tensor), (what, name)


def view(mount, run, layout):
    """A view of a run's only step."""
    return os.path.join(daemon.step_of(mount, run), 'view', layout)


def test_the_table_is_what_the_library_writes(models):
    """A release of transformers that names or joins tensors in another way fails here, by rule and model."""
    with open(os.path.join(TABLES, 'hf5.toml'), encoding='utf-8') as f:
        kept = f.read()
    made = derive_hf5.table({kind: derive_hf5.rules_of(model) for kind, model in models.items()})
    assert kept[kept.index('\n[[map]]'):] == made


def take_tied_head(got, want, model):
    """A tied head is the embedding under a second name, which files do not have."""
    if 'lm_head.weight' not in want and model.config.tie_word_embeddings and 'lm_head.weight' in got:
        assert torch.equal(got.pop('lm_head.weight'), model.get_output_embeddings().weight)


@pytest.mark.parametrize('kind', KINDS)
def test_modules_are_shown_as_the_files_that_save_pretrained_writes(shown, models, kind):
    mount, files, _ = shown
    got = load_file(view(mount, f'modules-{kind}', 'tp1') + '/huggingface/model.safetensors')
    take_tied_head(got, files[kind], models[kind])
    assert_same(got, files[kind], kind)
    assert set(files[kind]) <= set(torch.load(view(mount, f'modules-{kind}', 'hf') + '/rank0/model.pt'))


@pytest.mark.parametrize('kind', KINDS)
def test_files_are_shown_as_modules(shown, models, kind):
    mount, _, modules = shown
    got = torch.load(view(mount, f'files-{kind}', 'hf5') + '/rank0/model.pt')
    take_tied_head(got, modules[kind], models[kind])
    assert_same({k: v for k, v in got.items() if v.is_floating_point()}, modules[kind], kind)
    own = torch.load(view(mount, f'files-{kind}', 'hf') + '/rank0/model.pt')
    as_it_is = torch.load(view(mount, f'files-{kind}', 'tp1') + '/rank0/model.pt')
    assert own.keys() == as_it_is.keys()


@pytest.mark.parametrize('kind', KINDS)
def test_a_family_has_a_rule_for_every_parameter(shown, kind):
    for spelling in ('files', 'modules'):
        with open(os.path.join(daemon.step_of(shown[0], f'{spelling}-{kind}'), 'info.json'), encoding='utf-8') as f:
            notes = json.load(f)['notes']
        assert not [note for note in notes if 'rules for' in note or 'no family' in note], (spelling, notes)


def planned_dim(plan, name):
    """The dimension that transformers' own plan cuts a module's parameter along; None where it says nothing."""
    module, _, kind = name.removeprefix('model.').rpartition('.')
    how = plan.get(re.sub(r'\.\d+\.', '.*.', module), '')
    if how.startswith('colwise'):
        return 0
    return 1 if how.startswith('rowwise') and kind == 'weight' else None


def test_ranks_are_cut_as_the_librarys_own_plan_cuts_them(shown):
    mount, _, modules = shown
    compared = []
    for kind in KINDS:
        plan = derive_hf5.CONFIG_MAPPING[kind].base_model_tp_plan
        rank = view(mount, f'modules-{kind}', 'tp2') + '/rank0/model.pt'
        if not plan or not os.path.exists(rank):
            continue
        held = torch.load(rank)
        for name, whole in modules[kind].items():
            dim = planned_dim(plan, name)
            if dim is None:
                continue
            shape = list(whole.shape)
            shape[dim] //= 2
            assert list(held[name].shape) == shape, (kind, name)
        compared.append(kind)
    assert len(compared) >= 15, compared


def trained(kind):
    """A model after two steps of AdamW, and its optimizer."""
    torch.manual_seed(1)
    model = derive_hf5.build(kind)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = torch.randint(1, 96, (4, 16))
    for _ in range(2):
        model(words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, words


def as_files(model, tensors, folder):
    """What transformers makes of tensors of the modules' names when it saves."""
    twin = type(model)(model.config)
    twin.load_state_dict(tensors)
    return derive_hf5.files_of(twin, folder)


class Trained:
    """A trained model, saved with its optimizer by DCP in both spellings."""

    def __init__(self, kind, folder):
        self.model, optimizer, self.words = trained(kind)
        self.state, states = get_state_dict(self.model, optimizer)
        self.files = derive_hf5.files_of(self.model, f'{folder}/files')
        config = f'{folder}/files/config.json'
        save_modules(f'{folder}/modules', {'model': self.state, 'optim': states}, config)
        zeros = {k: torch.zeros_like(v) for k, v in self.state.items()}
        self.moments, self.own = {}, {}
        for moment in ('exp_avg', 'exp_avg_sq'):
            self.own[moment] = {k: v[moment] for k, v in states['state'].items() if moment in v}
            self.moments[moment] = as_files(self.model, {**zeros, **self.own[moment]}, f'{folder}/{moment}')
        names = [k for k in self.files if self.files[k].is_floating_point()]
        step = {'step': torch.tensor(2.0)}
        spelled = {
            'state': {k: {**step, **{m: self.moments[m][k] for m in self.moments}} for k in names},
            'param_groups': [{**states['param_groups'][0], 'params': names}]}
        save_modules(f'{folder}/spelled', {'model': self.files, 'optim': spelled}, config)


@pytest.fixture(scope='module', params=MIXED)
def job(request, tmp_path_factory):
    """(Trained, mount)"""
    folder = str(tmp_path_factory.mktemp(request.param))
    made = Trained(request.param, folder)
    program = daemon.Ckptfs(folder)
    program.adopt(f'{folder}/modules', 'modules')
    program.adopt(f'{folder}/spelled', 'spelled')
    yield made, program.mount()
    program.close()


def test_a_mixture_of_experts_loads_as_files_with_equal_logits(job):
    made, mount = job
    folder = view(mount, 'modules', 'tp1') + '/huggingface'
    assert_same(load_file(folder + '/model.safetensors'), made.files, 'huggingface')
    loaded, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not said['missing_keys'] and not said['unexpected_keys'] and not said['mismatched_keys']
    with torch.no_grad():
        assert torch.equal(loaded(made.words).logits, made.model(made.words).logits)


def assert_optimizer(state, weights, moments, what):
    for name, tensor in weights.items():
        assert torch.equal(state[f'model.{name}'], tensor), (what, name)
    shown = {k[len('optim.state.'):] for k in state if k.startswith('optim.state.')}
    for moment, tensors in moments.items():
        of_moment = {k[:-len(moment) - 1] for k in shown if k.endswith('.' + moment)}
        assert of_moment <= set(tensors) and len(of_moment) > 10, (what, moment)
        for name in of_moment:
            assert torch.equal(state[f'optim.state.{name}.{moment}'], tensors[name]), (what, moment, name)
    return shown


def test_moments_follow_their_parameters_in_both_directions(job):
    made, mount = job
    shown = assert_optimizer(read_dcp(view(mount, 'modules', 'hf') + '/dcp'), made.files, made.moments, 'as files')
    trained_files = {k for k, v in made.moments['exp_avg'].items() if v.any()}
    assert trained_files <= {k[:-len('.exp_avg')] for k in shown if k.endswith('.exp_avg')}
    shown = assert_optimizer(read_dcp(view(mount, 'spelled', 'hf5') + '/dcp'), made.state, {
        m: {**{k: torch.zeros_like(v) for k, v in made.state.items()}, **made.own[m]} for m in made.own}, 'as modules')
    assert set(made.own['exp_avg']) <= {k[:-len('.exp_avg')] for k in shown if k.endswith('.exp_avg')}


def test_what_nothing_proves_keeps_its_names(models, ckptfs, tmp_path):
    """Without a config, and of a type that no table knows, no name is guessed."""
    model = models['mixtral']
    dcp.save({'model': model.state_dict()}, checkpoint_id=tmp_path / 'bare', no_dist=True)
    ckptfs.adopt(tmp_path / 'bare', 'bare')
    mount = ckptfs.mount()
    names = torch.load(view(mount, 'bare', 'tp1') + '/rank0/model.pt').keys()
    assert names == model.state_dict().keys()
    assert not os.path.exists(view(mount, 'bare', 'hf') + '/rank0')
    said = ckptfs.run('explain', 'hf', '--step', 'bare', '--store', ckptfs.store, check=False)
    assert 'no config.json says which model it is' in said.stdout + said.stderr
