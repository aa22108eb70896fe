# SPDX-License-Identifier: Apache-2.0
"""Optimizers number their states in the order in which they were given their parameters.

In any order, a moment is that of its own parameter, or the optimizer is left out with a line that
says why and what helps; the weights are always there.  The truth is what the live optimizer holds.
"""
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

MOMENTS = ('exp_avg', 'exp_avg_sq')


class Net(nn.Module):
    """Two layers of one shape, or of their own."""

    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Linear(8, width)
        self.head = nn.Linear(width, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.head(self.body(x).relu()))


def head_first(model):
    return [*model.head.parameters(), *model.norm.parameters(), *model.body.parameters()]


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-2)


class Trained:
    """A model after three steps, its optimizer, and whose each state is."""

    def __init__(self, make, width=8):
        torch.manual_seed(0)
        self.model = Net(width)
        self.optimizer = make(self.model)
        for _ in range(3):
            self.model(torch.randn(4, 8)).pow(2).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.names = {p: n for n, p in self.model.named_parameters()}
        self.order = [self.names[p] for group in self.optimizer.param_groups for p in group['params']]

    def truth(self):
        return {f'{kind}/{self.names[p]}': state[kind] for p, state in self.optimizer.state.items()
                for kind in MOMENTS}


def accelerate(folder, one):
    own = folder / 'step_3'
    own.mkdir(parents=True)
    torch.save(one.model.state_dict(), own / 'pytorch_model.bin')
    torch.save(one.optimizer.state_dict(), own / 'optimizer.bin')
    torch.save({}, own / 'random_states_0.pkl')
    torch.save({'last_epoch': 3}, own / 'scheduler.bin')


def lightning(folder, one):
    folder.mkdir(parents=True)
    torch.save({'epoch': 0, 'global_step': 3, 'pytorch-lightning_version': '2.5.0', 'loops': {}, 'lr_schedulers': [],
                'state_dict': one.model.state_dict(), 'optimizer_states': [one.optimizer.state_dict()]},
               folder / 'epoch=0-step=3.ckpt')


def safetensors(folder, one):
    own = folder / 'checkpoint-3'
    own.mkdir(parents=True)
    save_file(one.model.state_dict(), own / 'model.safetensors')
    torch.save(one.optimizer.state_dict(), own / 'optimizer.pt')
    (own / 'trainer_state.json').write_text('{}')


def sharded(folder, one):
    dcp.save({'model': one.model.state_dict(), 'optim': one.optimizer.state_dict()}, checkpoint_id=folder / 'step_3',
             no_dist=True)


def deepspeed(folder, one, optimizer=None):
    """As its engine saves without ZeRO in fp32: torch's own state_dict."""
    own = folder / 'global_step3'
    own.mkdir(parents=True, exist_ok=True)
    torch.save({'module': one.model.state_dict(), 'buffer_names': [], 'global_steps': 3, 'dp_world_size': 1,
                'mp_world_size': 1, 'optimizer': optimizer or one.optimizer.state_dict()},
               own / 'mp_rank_00_model_states.pt')


ENTRANCES = pytest.mark.parametrize('save', [accelerate, lightning, safetensors, sharded, deepspeed],
                                    ids=lambda one: one.__name__)


def taken(ckptfs, path, out, *words):
    """(the moments that are shown, the weights, what was said)."""
    done = ckptfs.adopt(path, extra=words)
    ckptfs.run('export', '--store', ckptfs.store, done.stdout.split()[0], 'tp1/rank0', out)
    states = load_file(next(out.rglob('optimizer.safetensors')))
    return ({k: t for k, t in states.items() if k.startswith(MOMENTS)}, load_file(next(out.rglob('model.safetensors'))),
            done.stderr)


def assert_taken(one, got, said):
    moments, weights, _ = got
    assert said == ''
    assert set(moments) == set(one.truth())
    assert all(torch.equal(moments[k], t) for k, t in one.truth().items())
    assert all(torch.equal(weights[k], t) for k, t in one.model.state_dict().items())


def assert_left_out(one, got, *why):
    moments, weights, said = got
    assert not moments
    assert all(torch.equal(weights[k], t) for k, t in one.model.state_dict().items())
    for word in ('left out', '--parameter-order', '--weights-only', *why):
        assert word in said


@ENTRANCES
def test_shapes_that_fit_another_order_prove_nothing(ckptfs, tmp_path, save):
    one = Trained(lambda model: adamw(head_first(model)))
    save(tmp_path / 'run', one)
    assert_left_out(one, taken(ckptfs, tmp_path / 'run', tmp_path / 'out'), 'nothing proves', "'body.")


@ENTRANCES
def test_the_models_own_order_is_not_proved_either(ckptfs, tmp_path, save):
    one = Trained(lambda model: adamw(model.parameters()))
    save(tmp_path / 'run', one)
    assert_left_out(one, taken(ckptfs, tmp_path / 'run', tmp_path / 'out'))


@ENTRANCES
@pytest.mark.parametrize('groups', [1, 2])
def test_the_optimizers_order_is_taken(ckptfs, tmp_path, save, groups):
    def make(model):
        head, body = head_first(model)[:4], head_first(model)[4:]
        return adamw(head + body if groups == 1 else [{'params': body[::-1]}, {'params': head, 'weight_decay': 0.}])
    one = Trained(make)
    save(tmp_path / 'run', one)
    (tmp_path / 'order').write_text('\n'.join(one.order))
    got = taken(ckptfs, tmp_path / 'run', tmp_path / 'out', '--parameter-order', tmp_path / 'order')
    assert_taken(one, got, got[2])


def test_an_order_of_an_adapters_live_names_is_taken(ckptfs, tmp_path):
    """PEFT's files leave the adapter's name out, which the documented line prints."""
    names = [f'base_model.model.{layer}.lora_{part}' for layer in 'qk' for part in 'AB']
    weights = {f'{name}.weight': torch.randn(4, 4) for name in names}
    states = {i: {'step': torch.tensor(1.), 'exp_avg': torch.randn(4, 4), 'exp_avg_sq': torch.rand(4, 4)} for i in range(4)}
    run = tmp_path / 'run' / 'checkpoint-3'
    run.mkdir(parents=True)
    save_file(weights, run / 'adapter_model.safetensors', {'format': 'pt'})
    (run / 'adapter_config.json').write_text(json.dumps({'peft_type': 'LORA', 'r': 4}))
    (run / 'trainer_state.json').write_text('{"global_step": 3}')
    torch.save({'state': states, 'param_groups': [{'lr': 0.1, 'params': [0, 1, 2, 3]}]}, run / 'optimizer.pt')
    (tmp_path / 'order').write_text('\n'.join(f'{name}.default.weight' for name in reversed(names)))
    moments, _, said = taken(ckptfs, run, tmp_path / 'out', '--parameter-order', tmp_path / 'order')
    for number, name in enumerate(reversed(names)):
        assert torch.equal(moments[f'exp_avg/{name}.weight'], states[number]['exp_avg']), (name, said)


@ENTRANCES
def test_another_order_is_not(ckptfs, tmp_path, save):
    """A model whose shapes tell the order; it is that of the model's names, as a user may give
    it."""
    one = Trained(lambda model: adamw([{'params': [p for p in model.parameters() if p.ndim > 1]},
                                       {'params': [p for p in model.parameters() if p.ndim < 2]}]))
    save(tmp_path / 'run', one)
    (tmp_path / 'order').write_text('\n'.join(n for n, _ in one.model.named_parameters()))
    got = taken(ckptfs, tmp_path / 'run', tmp_path / 'out', '--parameter-order', tmp_path / 'order')
    assert_left_out(one, got, "is not the optimizer's order", "'body.bias' is of shape [8]")


class Odd(nn.Module):
    """No two parameters have one shape."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)
        self.register_buffer('count', torch.zeros(3))

    def forward(self, x):
        return self.head(self.body(x).relu())


@ENTRANCES
def test_shapes_that_leave_one_way_prove_it(ckptfs, tmp_path, save, monkeypatch):
    monkeypatch.setitem(globals(), 'Net', lambda _: Odd())
    one = Trained(lambda model: adamw([*model.head.parameters(), *model.body.parameters()]))
    save(tmp_path / 'run', one)
    got = taken(ckptfs, tmp_path / 'run', tmp_path / 'out')
    assert_taken(one, got, got[2])


@ENTRANCES
def test_names_in_the_file_prove_it(ckptfs, tmp_path, save):
    if save is sharded:
        pytest.skip('torch drops the names there: get_optimizer_state_dict has names for keys')
    one = Trained(lambda model: adamw([*model.head.named_parameters('head'), *model.norm.named_parameters('norm'),
                                       *model.body.named_parameters('body')]))
    save(tmp_path / 'run', one)
    got = taken(ckptfs, tmp_path / 'run', tmp_path / 'out')
    assert_taken(one, got, got[2])


def unfused(one, folder):
    """DeepSpeed's FP16_UnfusedOptimizer: bf16 weights, fp32 masters by number."""
    masters = [[p.detach().clone() for p in group['params']] for group in one.optimizer.param_groups]
    state = {'dynamic_loss_scale': False, 'cur_scale': 1, 'cur_iter': 3, 'fp32_groups': masters,
             'optimizer_state_dict': one.optimizer.state_dict()}
    one.model.bfloat16()
    deepspeed(folder, one, state)


def test_masters_prove_whose_they_are(ckptfs, tmp_path):
    one = Trained(lambda model: adamw(head_first(model)))
    truth = one.truth()
    unfused(one, tmp_path / 'run')
    moments, _, said = taken(ckptfs, tmp_path / 'run', tmp_path / 'out')
    assert said == ''
    assert set(moments) == set(truth) and all(torch.equal(moments[k], t) for k, t in truth.items())


def test_equal_masters_prove_nothing(ckptfs, tmp_path):
    one = Trained(lambda model: adamw(head_first(model)))
    with torch.no_grad():
        one.model.head.bias.zero_()
        one.model.body.bias.zero_()
    unfused(one, tmp_path / 'run')
    got = taken(ckptfs, tmp_path / 'run', tmp_path / 'out')
    assert_left_out(one, got, 'equal masters')


def arguments(**more):
    from transformers import TrainingArguments
    return TrainingArguments(output_dir='unused', learning_rate=1e-3, weight_decay=0.1, use_cpu=True, report_to=[], **more)


def trainers_own(args):
    """The optimizer that Trainer makes itself."""
    from transformers import Trainer

    def make(model):
        trainer = Trainer(model, args)
        trainer.create_optimizer_and_scheduler(6)
        return trainer.optimizer
    return make


def beside_trainer(folder, one, args, how):
    """Writes what Trainer writes around it: without DeepSpeed (torch files), or with it and without
    ZeRO."""
    own = folder / 'checkpoint-3'
    own.mkdir(parents=True)
    if how == 'plain':
        torch.save(one.model.state_dict(), own / 'pytorch_model.bin')
        torch.save(one.optimizer.state_dict(), own / 'optimizer.pt')
    else:
        deepspeed(own, one)
        (own / 'latest').write_text('global_step3')
    torch.save({}, own / 'scheduler.pt')
    torch.save(args, own / 'training_args.bin')
    torch.save({}, own / 'rng_state.pth')
    (own / 'trainer_state.json').write_text(json.dumps({'global_step': 3}))


HOW = pytest.mark.parametrize('how', ['plain', 'deepspeed'])


class Deep(nn.Module):
    """Shapes tell its order, but for that of equal layers; `swapped` has two modules that nothing tells apart."""

    def __init__(self, swapped=False):
        super().__init__()
        self.embed = nn.Linear(8, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        if swapped:
            self.out = nn.Linear(8, 6)
        self.head = nn.Linear(6, 8)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h).relu()
        y = self.head(self.norm(h))
        return y + self.head(self.out(x)) if hasattr(self, 'out') else y


def deep(monkeypatch, swapped=False):
    monkeypatch.setitem(globals(), 'Net', lambda _: Deep(swapped))


@HOW
def test_trainers_own_groups_prove_it(ckptfs, tmp_path, how, monkeypatch):
    deep(monkeypatch)
    args = arguments()
    one = Trained(trainers_own(args))
    assert one.order != [n for n, _ in one.model.named_parameters()]
    beside_trainer(tmp_path / 'run', one, args, how)
    got = taken(ckptfs, tmp_path / 'run', tmp_path / 'out')
    assert_taken(one, got, got[2])


def tiny(family):
    """A model of transformers, of two layers, with heads of its own."""
    import transformers
    sizes = {'vocab_size': 64, 'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'intermediate_size': 24}
    if family == 'gpt2':
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    if family == 'bert':
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, max_position_embeddings=32))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=family == 'llama_tied'))


@pytest.mark.parametrize('family', ['llama', 'llama_tied', 'gpt2', 'bert'])
def test_trainers_own_groups_of_real_models_prove_it(ckptfs, tmp_path, family):
    from transformers import Trainer
    torch.manual_seed(0)
    model, args = tiny(family), arguments()
    trainer = Trainer(model, args)
    trainer.create_optimizer_and_scheduler(6)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    trainer.optimizer.step()
    names = {p: n for n, p in model.named_parameters()}
    own = tmp_path / 'run' / 'checkpoint-3'
    own.mkdir(parents=True)
    torch.save(model.state_dict(), own / 'pytorch_model.bin')
    model.config.save_pretrained(own)
    torch.save(trainer.optimizer.state_dict(), own / 'optimizer.pt')
    torch.save(args, own / 'training_args.bin')
    for name in ('scheduler.pt', 'rng_state.pth'):
        torch.save({}, own / name)
    (own / 'trainer_state.json').write_text(json.dumps({'global_step': 3}))
    moments, _, said = taken(ckptfs, tmp_path / 'run', tmp_path / 'out')
    assert said == ''
    truth = {f'{kind}/{names[p]}': state[kind] for p, state in trainer.optimizer.state.items() for kind in MOMENTS}
    assert set(moments) == set(truth) and all(torch.equal(moments[k], t) for k, t in truth.items())


@HOW
def test_trainers_own_groups_prove_nothing_of_modules_alike(ckptfs, tmp_path, how, monkeypatch):
    """A script's own groups with the two modules exchanged would be the same file."""
    deep(monkeypatch, swapped=True)
    args = arguments()
    one = Trained(trainers_own(args))
    beside_trainer(tmp_path / 'run', one, args, how)
    assert_left_out(one, taken(ckptfs, tmp_path / 'run', tmp_path / 'out'), 'they also fit an order in which')


FORMS = {'adamw_torch': False, 'adamw_torch_fused': True, 'adafactor': True, 'sgd': False, 'adagrad': False,
         'rmsprop': False}  # of optim=: those whose groups tell who made them


@HOW
@pytest.mark.parametrize('optim', FORMS)
def test_each_form_of_trainers_optimizer(ckptfs, tmp_path, how, optim, monkeypatch):
    deep(monkeypatch)
    args = arguments(optim=optim, optim_args='momentum=0.9' if optim in ('sgd', 'rmsprop') else None)
    one = Trained(trainers_own(args))
    beside_trainer(tmp_path / 'run', one, args, how)
    done = ckptfs.adopt(tmp_path / 'run')
    ckptfs.run('export', '--store', ckptfs.store, done.stdout.split()[0], 'tp1/rank0', tmp_path / 'out')
    weights = load_file(tmp_path / 'out/model.safetensors')
    assert all(torch.equal(weights[k], t) for k, t in one.model.state_dict().items())
    states = load_file(tmp_path / 'out/optimizer.safetensors')
    truth = {f'{kind}/{one.names[p]}': t for p, state in one.optimizer.state.items() for kind, t in state.items()
             if torch.is_tensor(t) and kind != 'step'}
    if not FORMS[optim]:
        assert truth and not set(truth) & set(states)
        assert 'left out' in done.stderr and '--parameter-order' in done.stderr
        return
    assert done.stderr == ''
    assert truth and all(torch.equal(states[k], t) for k, t in truth.items())


@HOW
def test_an_optimizer_that_trainer_was_given_has_no_rule(ckptfs, tmp_path, how):
    """Two groups like Trainer's, in another order, at a rate that is not Trainer's."""
    one = Trained(lambda model: adamw([{'params': [p for p in head_first(model) if p.ndim > 1], 'weight_decay': 0.1},
                                       {'params': [p for p in head_first(model) if p.ndim < 2], 'weight_decay': 0.}]))
    torch.optim.lr_scheduler.LambdaLR(one.optimizer, lambda _: 1.)
    beside_trainer(tmp_path / 'run', one, arguments(), how)
    assert_left_out(one, taken(ckptfs, tmp_path / 'run', tmp_path / 'out'))


ORDERS = {'head first': head_first, 'reversed': lambda model: list(model.parameters())[::-1],
          'sorted': lambda model: [p for _, p in sorted(model.named_parameters(), reverse=True)],
          'last': lambda model: [*model.body.parameters(), *model.norm.parameters(), *model.head.parameters()]}


@HOW
@pytest.mark.parametrize('fused', [True, None])
@pytest.mark.parametrize('order', ORDERS)
def test_trainers_hyper_parameters_are_no_order(ckptfs, tmp_path, how, fused, order):
    """An optimizer that Trainer was given, with Trainer's two groups and every one of its hyper-parameters."""
    def make(model):
        ours = ORDERS[order](model)
        own = torch.optim.AdamW([{'params': [p for p in ours if p.ndim > 1], 'weight_decay': 0.1},
                                 {'params': [p for p in ours if p.ndim < 2], 'weight_decay': 0.}], lr=1e-3, fused=fused)
        torch.optim.lr_scheduler.LambdaLR(own, lambda _: 1.)
        return own
    one = Trained(make)
    beside_trainer(tmp_path / 'run', one, arguments(optim='adamw_torch_fused' if fused else 'adamw_torch'), how)
    assert_left_out(one, taken(ckptfs, tmp_path / 'run', tmp_path / 'out'))


@HOW
def test_a_frozen_layer_among_equals_is_not_guessed(ckptfs, tmp_path, how):
    args = arguments()

    def make(model):
        model.body.requires_grad_(False)
        return trainers_own(args)(model)
    one = Trained(make)
    beside_trainer(tmp_path / 'run', one, args, how)
    assert_left_out(one, taken(ckptfs, tmp_path / 'run', tmp_path / 'out'), "'body.")
