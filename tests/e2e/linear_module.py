# SPDX-License-Identifier: Apache-2.0
"""The smallest LightningModule that trains: for tests of what Lightning does around it."""
import lightning.pytorch as pl
import torch


class LinearModule(pl.LightningModule):
    """Batches of shape [n, 4]."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def training_step(self, batch, _):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
