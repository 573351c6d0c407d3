"""Our `Accelerator` and `DPCompileTrainer` beside accelerate's and transformers', step by step; what is refused."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from docs_scripts import python_of
from launched import as_launched, assert_same_steps
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dp_compile

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed: pip install -e '.[test-integrations]'"
)
STEPS = 20


class Blocks(nn.Module):
    """Blocks of one class in a list, which regional compilation looks for, and a buffer that ranks have to share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))


@contextlib.contextmanager
def accelerator(ours, **given):
    """A new `Accelerator` of ours or of accelerate, and nothing of it left behind."""
    import accelerate

    from dp_compile.integrations.accelerate import Accelerator

    with nothing_left_behind():
        yield (Accelerator if ours else accelerate.Accelerator)(cpu=True, **given)


@contextlib.contextmanager
def nothing_left_behind():
    from accelerate.state import AcceleratorState, GradientState

    torch._dynamo.reset()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def arguments(case):
    """What both kinds of `Accelerator` are given."""
    from accelerate.utils import DDPCommunicationHookType as Hook
    from accelerate.utils import DistributedDataParallelKwargs as Given
    from accelerate.utils import TorchDynamoPlugin

    compiled, hook = {"dynamo_backend": "aot_eager"}, Given(comm_hook=Hook.FP16, broadcast_buffers=False)
    return {
        "compiled": compiled | {"mixed_precision": "bf16"},
        "regional": {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)},
        "accumulated": compiled | {"gradient_accumulation_steps": 3, "kwargs_handlers": [hook]},
    }[case]


def train(ours, case, folder):
    """Losses of the steps, parameters, how many were synchronised; halfway all is saved and loaded again."""
    with accelerator(ours, **arguments(case)) as this:
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        data = [(torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)) for _ in range(STEPS)]
        model, optimizer = this.prepare(model, optimizer)
        assert this.prepare(model) is model
        losses, synced = [], 0
        for step, (x, y) in enumerate(data):
            with this.accumulate(model):
                loss = nn.functional.mse_loss(model(x).float(), y)
                this.backward(loss)
                synced += this.sync_gradients
                if this.sync_gradients:
                    this.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if step == STEPS // 2 + 1:  # no micro-step is open
                this.save_state(folder)
                this.wait_for_everyone()
                with torch.no_grad():
                    next(model.parameters()).zero_()
                this.load_state(folder)
        inner = this.unwrap_model(model, keep_torch_compile=False)
        assert type(inner) is Blocks
        if ours:
            assert set(dp_compile.report(model).backwards) - {"without sync"} == {"captured"}
        return losses, nn.utils.parameters_to_vector(inner.parameters()).tolist(), synced


@pytest.mark.parametrize("case", ["compiled", "regional", pytest.param("accumulated", marks=pytest.mark.nightly)])
@on_ranks("ranks2")
def test_every_step_as_accelerates(case, tmp_path):
    with as_launched():
        assert_same_steps(train(True, case, f"{tmp_path}/ours"), train(False, case, f"{tmp_path}/theirs"))


@on_ranks("ranks2")
def test_sync_in_backward_of_a_compiled_model():
    """Gradients after `trigger_sync_in_backward` inside `no_sync`."""
    with as_launched(), accelerator(True, dynamo_backend="aot_eager") as this:
        model = this.prepare(nn.Linear(2, 1, bias=False))
        rank = dist.get_rank()
        alone = this.unwrap_model(model)  # accelerate takes the wrapper out of the compiled model itself
        assert type(alone) is type(model)
        assert alone._orig_mod is model._orig_mod.module
        weight = model.module.weight
        with this.no_sync(model):
            this.backward(model(torch.full((1, 2), float(rank))).sum())
            assert weight.grad.tolist() == [[rank, rank]]
            with this.trigger_sync_in_backward(model):
                this.backward(model(torch.full((1, 2), 2.0 + rank)).sum())
        assert weight.grad.tolist() == [[3.0, 3.0]]  # the means of 0 and 1, and of 2 and 3


@on_ranks("ranks2")
def test_never_silently():
    """accelerate itself gives a model that was prepared for evaluation before back as it is: not reduced."""
    with as_launched(), accelerator(True, dynamo_backend="aot_eager") as this:
        model = Blocks()
        this.prepare_model(model, evaluation_mode=True)
        assert isinstance(this.prepare(model)._orig_mod, dp_compile.DistributedDataParallel)


def run_the_page(code):
    """The page's lines on data of this rank's own: the parameters, and what was saved."""
    names = {"Model": lambda: nn.Linear(4, 3), "loss_fn": nn.functional.mse_loss}
    torch.manual_seed(dist.get_rank())
    names["loader"] = [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(3)]
    with as_launched(), nothing_left_behind(), tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        exec(code.replace('"inductor"', '"aot_eager"'), names)
        files = os.listdir("checkpoint") if dist.get_rank() == 0 else []
    values = nn.utils.parameters_to_vector(names["model"].parameters()).tolist()
    assert "backwards: 3 captured" in str(dp_compile.report(names["model"]))
    return values, files


def test_the_page(ranks2):
    (one, files), (other, _) = ranks2.run(run_the_page, python_of("integrations.md", "accelerate"))
    assert one == other
    assert files == ["model.safetensors"]


@pytest.mark.nightly
def test_accelerates_own(tmp_path):
    """As its authors wrote them, with our `Accelerator` under its name."""
    environ = dict(os.environ) | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    tests = Path(__file__).parents[1]
    environ["PYTHONPATH"] = os.pathsep.join([str(tests.parent), *filter(None, [environ.get("PYTHONPATH")])])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(tests / "accelerate_script.py"), "test_sync"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("through") == 2


def make(given, model=None):
    with as_launched(), accelerator(True, **given) as this:
        if model is not None:
            this.prepare(model)


def refusals():
    """Arguments that are not allowed, and models that are reduced already."""
    from accelerate.utils import DistributedDataParallelKwargs as Given

    return [
        ({"replicate_config": {}}, nn.Sequential, "replicate_config must be a ReplicateConfig, got dict"),
        ({"kwargs_handlers": [Given(dim=1)]}, nn.Sequential, "dim must be 0, .* got 1"),
        ({}, dp_compile.replicate, "Blocks is replicated already, and Accelerator.prepare.. replicates it too"),
        ({}, TorchDDP, "Blocks is wrapped by torch's DDP already"),
        ({}, dp_compile.DistributedDataParallel, "Blocks is wrapped by dp_compile.DistributedDataParallel already"),
    ]


@pytest.mark.usefixtures("fake_group")
def test_what_is_refused(monkeypatch):
    for given, wrap, message in refusals():
        model = wrap(Blocks())
        for each in (model, torch.compile(model, backend="aot_eager")):
            with pytest.raises(dp_compile.DPCompileError, match=message):
                make(given, each)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(dp_compile.ConfigError, match=r"^ACCELERATE_USE_FSDP .* is not supported"):
        make({})


TEXT = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text().encode()
ACCUMULATED = {
    "torch_compile": True,
    "torch_compile_backend": "aot_eager",
    "gradient_accumulation_steps": 2,
    "average_tokens_across_devices": True,
    "gradient_checkpointing": True,
    "ddp_broadcast_buffers": False,
}


def texts():
    """Lines of different lengths, so that ranks do not have equally many tokens."""
    lines = [line[:40] for line in TEXT.splitlines() if len(line) > 8]
    return [{"input_ids": list(line)} for line in lines[: 4 * STEPS * 2]]


def padded(examples):
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = nn.functional.pad(nn.utils.rnn.pad_sequence(rows, batch_first=True), (0, 40 - max(map(len, rows))))
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def trainer_of(ours, folder, **options):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from dp_compile.integrations.transformers import DPCompileTrainer

    torch._dynamo.reset()
    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=256, n_positions=64, use_cache=False, **no_dropout)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=STEPS // 2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    kind = DPCompileTrainer if ours else Trainer
    model = GPT2LMHeadModel(config)
    return kind(model=model, args=arguments, train_dataset=texts(), data_collator=padded)


def ways_of(trainer):
    """Lets a trainer remember which way its backwards went, in the set that is returned."""
    from transformers import TrainerCallback

    ways = set()

    class Ways(TrainerCallback):
        def on_train_end(self, *args, model, **kwargs):
            ways.update(dp_compile.report(model).backwards)

    trainer.add_callback(Ways())
    return ways


def outcome(trainer):
    """Losses and norms of the steps, and the parameters."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    norms = [float(entry["grad_norm"]) for entry in steps]
    parameters = nn.utils.parameters_to_vector(trainer.model.parameters()).tolist()
    return [entry["loss"] for entry in steps], norms, parameters


NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install -e '.[test-integrations]'"
)


@NEEDS_TRANSFORMERS
@pytest.mark.nightly
@pytest.mark.parametrize("resumed", [False, True])
@on_ranks("ranks2")
def test_every_step_as_transformers(resumed, tmp_path):
    """Both trainers; or ours goes on from where the other one was halfway."""
    from accelerate.state import AcceleratorState

    with as_launched():
        theirs = trainer_of(False, f"{tmp_path}/theirs", **ACCUMULATED)
        theirs.train()
        AcceleratorState._reset_state(reset_partial_state=True)
        ours = trainer_of(True, f"{tmp_path}/ours", **ACCUMULATED)
        ways, halfway = ways_of(ours), None
        if resumed:
            ours.evaluate(texts()[:8])  # transformers would not wrap its model any more
            halfway = f"{tmp_path}/theirs/checkpoint-{STEPS // 2}"
        ours.train(resume_from_checkpoint=halfway)
        AcceleratorState._reset_state(reset_partial_state=True)
        dist.barrier()
        saved = json.loads(Path(tmp_path, "ours", f"checkpoint-{STEPS}", "config.json").read_text())
        assert (type(ours.model).__name__, saved["architectures"]) == ("GPT2LMHeadModel", ["GPT2LMHeadModel"])
        assert ways - {"without sync"} == {"captured"}
        assert len(outcome(ours)[0]) == STEPS
        assert_same_steps(outcome(ours), outcome(theirs))


@NEEDS_TRANSFORMERS
@pytest.mark.nightly
@on_ranks("ranks2")
def test_the_page_of_transformers(tmp_path):
    from accelerate.state import AcceleratorState

    code = python_of("integrations.md", "transformers Trainer").replace("max_steps=20", "max_steps=2, report_to=[]")
    with as_launched(), contextlib.chdir(tmp_path):
        model = trainer_of(False, ".").model
        AcceleratorState._reset_state(reset_partial_state=True)
        dataset = [{name: row[0] for name, row in padded([each]).items()} for each in texts()]
        names = {"model": model, "dataset": dataset}
        exec(code.replace("torch_compile=True", 'torch_compile_backend="aot_eager"'), names)
        dist.barrier()
        assert Path("fine_tuned/model.safetensors").exists()


@NEEDS_TRANSFORMERS
@on_ranks("ranks2")
def test_models_that_would_not_be_reduced(tmp_path):
    from dp_compile.integrations import transformers as ours

    class Alone(ours.DPCompileMixin):
        pass

    class Shards(ours.DPCompileTrainer):
        """Prepares its model in a way of its own, as transformers does for shards."""

        def _prepare_for_training(self, *args):
            prepared = super()._prepare_for_training(*args)
            return self.accelerator.unwrap_model(prepared[0]), *prepared[1:]

    def refused(text):
        return pytest.raises(dp_compile.DPCompileError, match=f"^{text}")

    with as_launched():
        made = trainer_of(True, str(tmp_path))
        with refused("Alone has DPCompileMixin but is no transformers.Trainer. Derive it from both"):
            Alone()
        with refused("GPT2LMHeadModel was not wrapped by dp_compile"):
            Shards(model=made.model, args=made.args, train_dataset=texts(), data_collator=padded).train()
        with refused("GPT2LMHeadModel is replicated already, and DPCompileTrainer replicates it too"):
            type(made)(model=dp_compile.replicate(made.model), args=made.args)
