"""Elastic data-parallel training: if ranks are lost or join, the others continue without restart or recompilation.

    elastic.init_process_group()
    model = dp_compile.replicate(Net())
    compiled = torch.compile(model)
    training = elastic.Training(model, optimizer)
    for batch in loader:
        with training.step():
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

Start the script with `python -m dp_compile.elastic --ranks 3 script.py`. This launcher serves the key-value store and
must outlive every rank.
"""

from dp_compile.elastic.membership import LeftOutError, LostStateError, TooFewRanksError
from dp_compile.elastic.training import Training, init_process_group

__all__ = ["LeftOutError", "LostStateError", "TooFewRanksError", "Training", "init_process_group"]
