# SPDX-License-Identifier: Apache-2.0
"""Other releases of transformers load what transformers 5 trained, and compute the same.

The release of tests/requirements.txt always does.  transformers 4.57 does where it is installed: in the Python that
CKPTFS_TRANSFORMERS4 names, or in .cache/venv-transformers4, which `tests/run --transformers4` makes.
"""
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import daemon
from other_transformers import WORDS, load

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, '..', '..')
sys.path.insert(0, os.path.join(ROOT, 'formats', 'dialects'))
import derive_hf5  # noqa: E402  pylint: disable=wrong-import-position

OTHER = os.environ.get('CKPTFS_TRANSFORMERS4') or os.path.join(ROOT, '.cache', 'venv-transformers4', 'bin', 'python')
needs_other = pytest.mark.skipif(not os.path.exists(OTHER), reason='no transformers 4 (tests/run --transformers4)')
# Not in 4.57, or (jamba, mamba2) not on a CPU or not from its own files there.
UNKNOWN = {'minimax_m2', 'qwen3_5_moe_text', 'jamba', 'mamba2'}
ROTARY = {
    'llama': {'rope_type': 'llama3', 'rope_theta': 77.0, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
              'original_max_position_embeddings': 32},
    'deepseek_v3': {'rope_type': 'yarn', 'rope_theta': 77.0, 'factor': 4.0, 'original_max_position_embeddings': 16,
                    'mscale': 1.0, 'mscale_all_dim': 1.0, 'beta_fast': 32, 'beta_slow': 1}}
KINDS = list(derive_hf5.ARCHITECTURES) if os.path.exists(OTHER) else [*ROTARY, 'mixtral', 'qwen3_moe', 'gpt_neox']
ENGINE = 'mixtral_zero2'  # of make_huggingface.py


def model_of(kind):
    """A model of random weights whose rotary frequencies are not the default's."""
    model = derive_hf5.build(kind)
    rotary = getattr(model.config, 'rope_parameters', None)
    if rotary and 'rope_theta' in rotary:
        model.config.rope_parameters = ROTARY.get(kind, {**rotary, 'rope_theta': 77.0})
        model = type(model)(model.config)
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.2)
    model.eval().set_attn_implementation('eager')
    return model


def logits_of(model):
    with torch.no_grad():
        return model(WORDS, use_cache=False).logits.float()


def engine_truth():
    """A plain model of what DeepSpeed's engine had in memory."""
    folder = os.path.join(daemon.FIXTURES, 'huggingface', ENGINE)
    config = AutoConfig.from_pretrained(folder + '/ckpt')
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation='eager').eval()
    truth = load_file(folder + '/truth.safetensors')
    said = model.load_state_dict({k.removeprefix('weight/'): v.float() for k, v in truth.items() if k.startswith('weight/')})
    assert not said.missing_keys
    return model


class Shown:
    """Every kind as modules that DCP saved, and an engine's save, in one mount."""

    def __init__(self, folder, program):
        self.program, self.folder, self.live, self.own, self.made = program, folder, {}, {}, {}
        for kind in KINDS:
            model = model_of(kind)
            self.live[kind] = logits_of(model)
            saved = f'{folder}/{kind}'
            model.config.save_pretrained(saved)
            dcp.save({'model': model.state_dict()}, checkpoint_id=saved, no_dist=True)
            self.own[kind] = f'{folder}/own-{kind}'
            model.save_pretrained(self.own[kind])
            program.adopt(saved, kind)
            if kind == 'mixtral':
                self.made = {k: v.clone() for k, v in model.state_dict().items()}
        program.adopt(os.path.join(daemon.FIXTURES, 'huggingface', ENGINE, 'ckpt'), 'engine')
        self.live['engine'] = logits_of(engine_truth())
        self.mount = program.mount()

    def view(self, run):
        return os.path.join(daemon.step_of(self.mount, run), 'view', 'tp1', 'huggingface')

    def read(self, jobs):
        """(what is said of keys, logits, the release) of directories, read by transformers 4."""
        path = f'{self.folder}/jobs.json'
        with open(path, 'w', encoding='utf-8') as f:
            json.dump(jobs, f)
        done = subprocess.run([OTHER, HERE + '/other_transformers.py', path, f'{self.folder}/out'], capture_output=True,
                              text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        with open(f'{self.folder}/out.json', encoding='utf-8') as f:
            out = json.load(f)
        return out['said'], load_file(f'{self.folder}/out.safetensors'), out['release']


@pytest.fixture(scope='module')
def shown(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp('releases'))
    program = daemon.Ckptfs(folder)
    yield Shown(folder, program)
    program.close()


def assert_equal_logits(shown, said, logits, names):
    """Nothing was missing, left over or of another shape, and what is computed is what the job's modules compute."""
    for name in names:
        assert said[name] == {'missing_keys': [], 'unexpected_keys': [], 'mismatched_keys': []}, (name, said[name])
        torch.testing.assert_close(logits[name], shown.live[name], rtol=0, atol=1e-5, msg=lambda text, n=name: f'{n}: {text}')


def test_this_release_computes_the_same(shown):
    """The keys of older releases in config.json change nothing here."""
    names = ['engine', 'llama', 'deepseek_v3', 'mixtral', 'gpt_neox']
    read = {name: load(shown.view(name)) for name in names}
    assert_equal_logits(shown, {k: said for k, (said, _) in read.items()}, {k: v for k, (_, v) in read.items()}, names)


@needs_other
def test_transformers_4_loads_all_and_computes_the_same(shown):
    names = ['engine', *(kind for kind in KINDS if kind not in UNKNOWN)]
    said, logits, release = shown.read({name: shown.view(name) for name in names})
    assert release.startswith('4.57.')
    assert_equal_logits(shown, said, logits, names)
    print(f'transformers {release}: {len(names)} models; largest difference of a logit',
          max(float((logits[n] - shown.live[n]).abs().max()) for n in names))


@needs_other
def test_transformers_4_knows_no_other_of_these(shown):
    said, _, _ = shown.read({kind: shown.own[kind] for kind in UNKNOWN})
    assert all('failed' in said[kind] for kind in UNKNOWN), said


@needs_other
def test_the_comparison_sees_names_of_modules_and_another_rotation(shown):
    """What transformers 5 itself writes is another model to 4.57, and so are the modules' names: both must be seen."""
    bare = f'{shown.folder}/bare'
    os.makedirs(bare)
    save_file(shown.made, bare + '/model.safetensors', metadata={'format': 'pt'})
    with open(shown.view('mixtral') + '/config.json', encoding='utf-8') as f, \
            open(bare + '/config.json', 'w', encoding='utf-8') as g:
        g.write(f.read())
    said, logits, _ = shown.read({'bare': bare, 'mixtral': shown.own['mixtral']})
    assert any(re.search(r'experts\.0\.w1', key) for key in said['bare']['missing_keys'])
    with pytest.raises(AssertionError):
        assert_equal_logits(shown, said, logits, ['mixtral'])
