"""A fine-tune of a tiny GPT-2 on this repository's own text by both kinds of trainer, every step compared.

python -m torch.distributed.run --standalone --nproc-per-node=2 tests/integrations/fine_tune.py FOLDER
"""

from __future__ import annotations

import sys

import torch
from accelerate.state import AcceleratorState
from test_trainer import outcome, trainer_of, ways_of

if __name__ == "__main__":
    outcomes = []
    for ours in (False, True):
        trainer = trainer_of(ours, "compiled", f"{sys.argv[1]}/{ours}")
        ways = ways_of(trainer) if ours else set()
        trainer.train()
        outcomes.append(outcome(trainer))
        AcceleratorState._reset_state(reset_partial_state=True)
    assert ways == {"captured", "captured without sync"}
    for theirs, mine in zip(*outcomes, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-5)
    print("through")
