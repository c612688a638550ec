"""parallel.train with a rank that SLOW_RANK names: it computes half of its own computing again, or
its batches come late, as SLOW_KIND says. `off`: nobody measures."""

import os
import sys
import time

import torch

from parallel import train, trainer
from parallel.measure.own_times import OwnTimes

KIND = os.environ["SLOW_KIND"]
IS_SLOW = os.environ["RANK"] == os.environ.get("SLOW_RANK")


class Slowed(OwnTimes):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.is_on = self.is_on and KIND != "off"

    def begin(self) -> None:
        super().begin()
        usual_s = self._times[-1][0] / (1.5 if len(self._times) > 1 else 1) if self._times else 0.02
        ones = torch.ones(64, 64)
        while IS_SLOW and KIND == "compute" and time.thread_time() < self._began + usual_s / 2:
            torch.mm(ones, ones)


class Late(trainer.Trainer):
    def _batches(self, made):
        def late():
            time.sleep(0.2 if IS_SLOW and KIND == "data" else 0)
            yield from made

        return super()._batches(late())


trainer.OwnTimes, trainer.Trainer = Slowed, Late
status = train.main()
sys.stdout.flush()
os._exit(status)
