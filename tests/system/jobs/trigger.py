"""Worker 1 sets a trigger of accelerate's before the second of three checks."""

import graphsplit as gs
from graphsplit.integrations.accelerate import Accelerator

accelerator = Accelerator()
for check in range(3):
    if check == gs.get_rank() == 1:
        accelerator.set_trigger()
    print(accelerator.check_trigger())
