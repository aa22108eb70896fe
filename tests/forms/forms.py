# SPDX-License-Identifier: Apache-2.0
"""The forms of optimizers: one of torch, transformers or pytorch_optimizer with the words it is made with.

`pytorch_optimizer` is not among the tests' requirements: `pip install --no-deps --target DIR pytorch_optimizer`, and
DIR for `--library`.
"""
import inspect
import sys
from dataclasses import dataclass, field

import torch
from torch import nn

STEPS = 3

# torch.optim: class, and sets of words.
TORCH = {
    'ASGD': [{}, {'foreach': True}],
    'Adadelta': [{}, {'capturable': True, 'foreach': True}],
    'Adafactor': [{}],
    'Adagrad': [{}, {'lr_decay': .1, 'initial_accumulator_value': .5}],
    'Adam': [{}, {'amsgrad': True}, {'fused': True}, {'foreach': True}, {'lr': torch.tensor(1e-2)}],
    'AdamW': [{}, {'amsgrad': True}, {'fused': True}, {'weight_decay': .1, 'groups': True}, {'capturable': True, 'foreach': True},
              {'lr': torch.tensor(1e-2)}],
    'Adamax': [{}, {'weight_decay': .1}],
    'LBFGS': [{}],
    'NAdam': [{}, {'decoupled_weight_decay': True, 'weight_decay': .1}],
    'RAdam': [{}],
    'RMSprop': [{}, {'centered': True, 'momentum': .9}],
    'Rprop': [{}],
    'SGD': [{}, {'momentum': .9}, {'momentum': .9, 'nesterov': True}, {'momentum': .9, 'groups': True}],
    'SparseAdam': [{'sparse': True}],
    'Muon': [{'matrices': True}],
}
TRANSFORMERS = [{}, {'scale_parameter': False, 'relative_step': False, 'lr': 1e-3},
                {'beta1': .9, 'scale_parameter': False, 'relative_step': False, 'lr': 1e-3, 'groups': True}]
# pytorch_optimizer: words that a class cannot do without, by its name there.
NEEDED = {'ranger21': {'num_iterations': 10}, 'bsam': {'num_data': 16}, 'alig': {'closure': True}, 'lbfgs': {'closure': True},
          'spectralsphere': {'matrices': True}, 'lorarite': {'matrices': True}, 'adalomo': {'module': True},
          'adammini': {'module': True}, 'lomo': {'module': True}, 'adahessian': {'create_graph': True},
          'sophiah': {'create_graph': True}, 'adago': {'muon': True}, 'adamuon': {'muon': True}, 'muon': {'muon': True},
          'distributedmuon': {'muon': True}, 'muonclip': {'muon': True}, 'normuon': {'muon': True}}
# Words that are not the class's.
OURS = ('groups', 'sparse', 'matrices', 'closure', 'module', 'create_graph', 'muon')


class Net(nn.Module):
    """Parameters of one and of two dimensions; `matrices`: of two alone."""

    def __init__(self, matrices=False):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 6, bias=not matrices)
        self.norm = nn.Identity() if matrices else nn.LayerNorm(6)
        self.head = nn.Linear(6, 4, bias=not matrices)

    def forward(self, x):
        return self.head(self.norm(self.body(self.embed(x)).relu()))


@dataclass
class Form:
    name: str
    library: str
    make: object  # the class
    words: dict = field(default_factory=dict)

    def has(self, word):
        return bool(self.words.get(word))

    def model(self, seed):
        torch.manual_seed(seed)
        net = Net(self.has('matrices'))
        if self.has('sparse'):
            net.embed.sparse = True
        return net

    def optimizer(self, net):
        words = {key: value for key, value in self.words.items() if key not in OURS}
        if self.library == 'pytorch_optimizer' and 'lr' in inspect.signature(self.make).parameters and 'lr' not in words:
            words['lr'] = 1e-3
        parameters = list(net.parameters())
        if self.has('sparse'):
            parameters = [net.embed.weight]
        if self.has('module'):
            return self.make(net, **words)
        if self.has('muon'):
            parameters = [{'params': [p for p in parameters if p.ndim > 1], 'use_muon': True},
                          {'params': [p for p in parameters if p.ndim < 2], 'use_muon': False}]
        if self.has('groups'):
            words.pop('weight_decay', None)
            parameters = [{'params': [p for p in parameters if p.ndim > 1], 'weight_decay': .1},
                          {'params': [p for p in parameters if p.ndim < 2], 'weight_decay': 0.}]
        return self.make(parameters, **words)

    def train(self, net, optimizer, seed):
        """Some updates on rows that the seed says."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(STEPS):
            rows = torch.randint(0, 10, (16,), generator=generator)

            def closure(rows=rows):
                optimizer.zero_grad()
                loss = net(rows).pow(2).sum()
                loss.backward(create_graph=self.has('create_graph'))
                return loss
            if self.has('closure') or self.make is torch.optim.LBFGS:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()


def all_forms(library=None, sample=False):
    """Every form; `sample`: those whose states differ in kind."""
    out = []
    for name, words in TORCH.items():
        out += [Form(f'torch.{name}.{i}', 'torch', getattr(torch.optim, name), one) for i, one in enumerate(words)]
    from transformers import Adafactor
    out += [Form(f'transformers.Adafactor.{i}', 'transformers', Adafactor, one) for i, one in enumerate(TRANSFORMERS)]
    if library:
        sys.path.append(library)
        import pytorch_optimizer
        out += [Form(f'pytorch_optimizer.{name}', 'pytorch_optimizer', pytorch_optimizer.load_optimizer(name), NEEDED.get(name, {}))
                for name in sorted(pytorch_optimizer.get_supported_optimizers())]
    if sample:
        kept = ('torch.AdamW.3', 'torch.Adam.4', 'torch.SGD.3', 'torch.ASGD.0', 'torch.NAdam.0', 'torch.Rprop.0',
                'torch.Adafactor.0', 'torch.RMSprop.1', 'torch.Muon.0', 'torch.SGD.0', 'transformers.Adafactor.2')
        out = [form for form in out if form.name in kept]
    return out
