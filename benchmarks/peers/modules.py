"""Replicas as PyTorch modules, each with AdamW, that take JAX's gradients."""

import importlib
from typing import Any

import layouts
import numpy as np
import race


class Modules:
    """One module a replica, whose parameters are the arrays of `layouts.split`.

    Attributes:
        modules: The modules.
        adams: AdamW of each, with the values of our presets.
    """

    def __init__(self, task: race.Task, rate: float):
        self._torch = torch = importlib.import_module("torch")
        self._task, self._rates = task, race.rates(rate, task.run.steps)
        start = layouts.split(task.params)
        self._names = {name: name.replace("/", "-") for name in start}
        self.modules, self.adams = [], []
        for _ in range(task.run.replicas):
            module = torch.nn.Module()
            for name, array in start.items():
                value = torch.nn.Parameter(torch.from_numpy(array.copy()))
                module.register_parameter(self._names[name], value)
            self.modules.append(module)
            self.adams.append(
                torch.optim.AdamW(
                    module.parameters(), betas=(0.9, 0.95), weight_decay=0.0
                )
            )

    def params(self) -> Any:
        """The parameters of all replicas, as the model has them."""
        replicas = [
            {n: getattr(module, m).detach().numpy() for n, m in self._names.items()}
            for module in self.modules
        ]
        return layouts.join_replicas(replicas, self._task.params)

    def give(self, params: Any, number: int, batch: np.ndarray) -> None:
        """Puts the gradients at these parameters into the modules, and AdamW's rate."""
        split = layouts.split_replicas(self._task.gradients(params, batch))
        for module, adam, own in zip(self.modules, self.adams, split, strict=True):
            for name, array in own.items():
                parameter = getattr(module, self._names[name])
                parameter.grad = self._torch.from_numpy(array)
            adam.param_groups[0]["lr"] = float(self._rates[number - 1])
