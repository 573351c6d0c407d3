"""`strategy="dp_compile"` against Lightning's `ddp`, every step on two ranks: Trainer and Fabric, their BoringModel."""

import contextlib
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from docs_scripts import python_of
from launched import as_launched, assert_same_steps
from on_ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import dp_compile
from dp_compile.replication.module import state_of

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed: pip install -e '.[test-integrations]'"
)
NEEDS_THE_OTHER = pytest.mark.skipif(
    find_spec("pytorch_lightning") is None, reason="install it by pip install pytorch_lightning"
)
STEPS = 20
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@contextlib.contextmanager
def quickly():
    """Started by a launcher, without code generation."""
    defaults = dp_compile.ReplicateConfig.__init__.__kwdefaults__
    with as_launched(), mock.patch.dict(defaults, backend="aot_eager"):
        yield


class Layer(nn.Sequential):
    """A class of its own: Dynamo compiles none of torch's in place."""

    def __init__(self):
        torch.manual_seed(0)
        # In front of the norm a bias has no gradient but rounding errors, which AdamW makes as large as others.
        super().__init__(nn.Linear(32, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return super().forward(x)


def module_of(boring):
    """Lightning's own `BoringModel` with another layer, which remembers the losses of its steps."""

    class Boring(boring.BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = Layer()
            self.losses = []
            self.told = set()

        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(self(batch))}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.losses.append(outputs["loss"].item())

        def on_train_end(self):
            wrapper = self.trainer.strategy.model
            if isinstance(wrapper, dp_compile.DistributedDataParallel):
                hook = state_of(wrapper).planning.comm_hook
                self.told = {*dp_compile.report(wrapper).backwards, *([] if hook is None else [hook.name])}

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Boring()


def strategy_of(package, ours, case):
    """What `strategy=` is given: a name; or an object, if there is something to say."""
    strategies = import_module("lightning.pytorch.strategies" if package == "lightning" else f"{package}.strategies")
    if ours:
        made = import_module(f"dp_compile.integrations.{package}").DPCompileStrategy
        options = {"ddp_comm_hook": fp16_compress_hook, "find_unused_parameters": True}
        return made(**options) if case == "accumulated" else "dp_compile"

    class Hooked(strategies.DDPStrategy):
        """Lightning leaves hooks out on CPUs, without a word."""

        def _register_ddp_hooks(self):
            self.model.register_comm_hook(None, fp16_compress_hook)

    return Hooked() if case == "accumulated" else "ddp"


def fit(package, ours, case, folder):
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


@pytest.mark.parametrize(
    ("package", "case"),
    [
        ("lightning", "accumulated"),
        pytest.param("pytorch_lightning", "compiled", marks=[pytest.mark.nightly, NEEDS_THE_OTHER]),
    ],
)
@on_ranks("ranks2")
def test_every_step_as_ddp(package, case, tmp_path):
    with quickly():
        assert_same_steps(fit(package, True, case, str(tmp_path)), fit(package, False, case, str(tmp_path)))


@pytest.mark.nightly
@on_ranks("ranks2")
def test_the_page(tmp_path):
    boring = import_module("lightning.pytorch.demos.boring_classes")
    names = {"module": module_of(boring), "loader": torch.utils.data.DataLoader(boring.RandomDataset(32, 8), 4)}
    with quickly(), contextlib.chdir(tmp_path):
        exec(python_of("integrations.md", "Lightning").replace("(module)", "(module, backend='aot_eager')"), names)
    assert names["module"].told == {"captured"}


def by_fabric(strategy, folder):
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


@on_ranks("ranks2")
def test_every_step_as_fabrics_ddp(tmp_path):
    with quickly():
        assert_same_steps(by_fabric("dp_compile", tmp_path), by_fabric("ddp", tmp_path))
