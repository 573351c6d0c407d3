"""`strategy="dp_compile"` against Lightning's `ddp`, every step on two ranks: Trainer and Fabric, their BoringModel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launched import as_launched, assert_same_steps
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import dp_compile
from dp_compile.replication.module import state_of
from dp_compile.testing.ranks import Ranks

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed: pip install -e '.[test-integrations]'"
)
STEPS = 20
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Started by a launcher, without code generation."""
    defaults = dp_compile.ReplicateConfig.__init__.__kwdefaults__
    with as_launched(), mock.patch.dict(defaults, backend="aot_eager"):
        yield


class Layer(nn.Sequential):
    """A class of its own: Dynamo compiles none of torch's in place."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # In front of the norm a bias has no gradient but rounding errors, which AdamW makes as large as others.
        super().__init__(nn.Linear(32, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def module_of(boring: Any) -> Any:
    """Lightning's own `BoringModel` with another layer, which remembers the losses of its steps."""

    class Boring(boring.BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()
            self.losses: list[float] = []
            self.told: set[str] = set()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(self(batch))}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(outputs["loss"].item())

        def on_train_end(self) -> None:
            wrapper = self.trainer.strategy.model
            if isinstance(wrapper, dp_compile.DistributedDataParallel):
                hook = state_of(wrapper).planning.comm_hook
                self.told = {*dp_compile.report(wrapper).backwards, *([] if hook is None else [hook.name])}

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Boring()


def strategy_of(package: str, ours: bool, case: str) -> Any:
    """What `strategy=` is given: a name; or an object, if there is something to say."""
    strategies = import_module("lightning.pytorch.strategies" if package == "lightning" else f"{package}.strategies")
    if ours:
        made = import_module(f"dp_compile.integrations.{package}").DPCompileStrategy
        options = {"ddp_comm_hook": fp16_compress_hook, "find_unused_parameters": True}
        return made(**options) if case == "accumulated" else "dp_compile"

    class Hooked(strategies.DDPStrategy):  # type: ignore[misc, name-defined]
        """Lightning leaves hooks out on CPUs, without a word."""

        def _register_ddp_hooks(self) -> None:
            self.model.register_comm_hook(None, fp16_compress_hook)

    return Hooked() if case == "accumulated" else "ddp"


def fit(package: str, ours: bool, case: str, folder: str) -> tuple[list[float], list[float]]:
    pl = import_module("lightning.pytorch" if package == "lightning" else package)
    boring = import_module(f"{pl.__name__}.demos.boring_classes")
    torch._dynamo.reset()
    module = module_of(boring)
    accumulation = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5} if case == "accumulated" else {}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_of(package, ours, case),
        max_steps=STEPS // (2 if accumulation else 1),
        default_root_dir=folder,
        **QUIET,
        **accumulation,
    )
    torch.manual_seed(dist.get_rank())
    loader = torch.utils.data.DataLoader(boring.RandomDataset(32, 2 * 6 * STEPS), batch_size=6)
    trainer.fit(torch.compile(module, backend="aot_eager"), loader)
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
    assert list(saved) == list(module.state_dict())
    assert type(module).__name__ == "Boring"
    with pytest.raises(dp_compile.UnsupportedModuleError, match="is not replicated"):  # nothing is left after teardown
        dp_compile.report(module)
    assert not module._forward_pre_hooks
    assert not any(each._post_accumulate_grad_hooks for each in module.parameters())
    also = {"without sync", "fp16_compress_hook"} if accumulation else set()
    assert module.told == ({"captured", *also} if ours else set())
    assert len(module.losses) == STEPS
    return module.losses, nn.utils.parameters_to_vector(module.parameters()).tolist()


def fit_side_by_side(package: str, case: str, folder: str) -> tuple[Any, Any]:
    with quickly():
        return fit(package, True, case, folder), fit(package, False, case, folder)


@pytest.mark.parametrize(
    ("package", "case"),
    [("lightning", "accumulated"), pytest.param("pytorch_lightning", "compiled", marks=pytest.mark.nightly)],
)
def test_every_step_as_ddp(ranks2: Ranks, package: str, case: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    assert_same_steps(ranks2.run(fit_side_by_side, package, case, str(tmp_path)))


# --- Fabric -----------------------------------------------------------------------------------------------------


def by_fabric(strategy: str, folder: str) -> tuple[list[float], list[float]]:
    """Accumulation, clipping, a checkpoint halfway."""
    from lightning.fabric import Fabric

    import_module("dp_compile.integrations.lightning")
    torch._dynamo.reset()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    plain = Layer()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    compiled = torch.compile(plain, backend="aot_eager")
    model, optimizer = fabric.setup(compiled, optimizer)
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(STEPS):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = nn.functional.mse_loss(model(torch.randn(6, 32)), torch.ones(6, 2))
            fabric.backward(loss)
        losses.append(loss.item())
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if step == STEPS // 2 - 1:
            state = {"model": model, "optimizer": optimizer}
            fabric.save(f"{folder}/{strategy}.ckpt", state)
            with torch.no_grad():
                next(model.parameters()).zero_()
            fabric.barrier()
            fabric.load(f"{folder}/{strategy}.ckpt", state)
    if strategy == "dp_compile":
        assert set(dp_compile.report(plain).backwards) == {"captured", "without sync"}
    return losses, nn.utils.parameters_to_vector(plain.parameters()).tolist()


def fabric_side_by_side(folder: str) -> tuple[Any, Any]:
    with quickly():
        return by_fabric("dp_compile", folder), by_fabric("ddp", folder)


def test_every_step_as_fabrics_ddp(ranks2: Ranks, tmp_path: Path) -> None:
    assert_same_steps(ranks2.run(fabric_side_by_side, str(tmp_path)))
