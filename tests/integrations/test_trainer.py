"""`DPCompileTrainer` against transformers' `Trainer`, every step of a fine-tune on two ranks; checkpoints of both."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import as_launched, assert_same_steps
from on_ranks import on_ranks
from torch import nn

import dp_compile
from dp_compile.testing.ranks import Ranks

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None or find_spec("transformers") is None,
    reason="transformers or accelerate is not installed: pip install -e '.[test-integrations]'",
)
STEPS = 20
TEXT = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text().encode()
ACCUMULATED = {
    "torch_compile": True,
    "torch_compile_backend": "aot_eager",
    "gradient_accumulation_steps": 2,
    "average_tokens_across_devices": True,
    "gradient_checkpointing": True,
    "ddp_broadcast_buffers": False,
}


def texts() -> list[dict[str, list[int]]]:
    """Lines of different lengths, so that ranks do not have equally many tokens."""
    lines = [line[:40] for line in TEXT.splitlines() if len(line) > 8]
    return [{"input_ids": list(line)} for line in lines[: 4 * STEPS * 2]]


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = nn.functional.pad(nn.utils.rnn.pad_sequence(rows, batch_first=True), (0, 40 - max(map(len, rows))))
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def trainer_of(ours: bool, folder: str, **options: Any) -> Any:
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


def ways_of(trainer: Any) -> set[str]:
    """Lets a trainer remember which way its backwards went, in the set that is returned."""
    from transformers import TrainerCallback

    ways: set[str] = set()

    class Ways(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
            ways.update(dp_compile.report(model).backwards)

    trainer.add_callback(Ways())
    return ways


def outcome(trainer: Any) -> tuple[list[float], list[float], list[float]]:
    """Losses and norms of the steps, and the parameters."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    norms = [float(entry["grad_norm"]) for entry in steps]
    parameters = nn.utils.parameters_to_vector(trainer.model.parameters()).tolist()
    return [entry["loss"] for entry in steps], norms, parameters


def fine_tune(resumed: bool, folder: str) -> tuple[Any, Any]:
    """Both trainers; or ours goes on from where the other one was halfway."""
    from accelerate.state import AcceleratorState

    with as_launched():
        theirs = trainer_of(False, f"{folder}/theirs", **ACCUMULATED)
        theirs.train()
        AcceleratorState._reset_state(reset_partial_state=True)
        ours = trainer_of(True, f"{folder}/ours", **ACCUMULATED)
        ways, halfway = ways_of(ours), None
        if resumed:
            ours.evaluate(texts()[:8])  # transformers would not wrap its model any more
            halfway = f"{folder}/theirs/checkpoint-{STEPS // 2}"
        ours.train(resume_from_checkpoint=halfway)
        AcceleratorState._reset_state(reset_partial_state=True)
        dist.barrier()
        saved = json.loads(Path(folder, "ours", f"checkpoint-{STEPS}", "config.json").read_text())
        assert (type(ours.model).__name__, saved["architectures"]) == ("GPT2LMHeadModel", ["GPT2LMHeadModel"])
        assert ways - {"without sync"} == {"captured"}
        assert len(outcome(ours)[0]) == STEPS
        return outcome(ours), outcome(theirs)


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_every_step_as_transformers(ranks2: Ranks, resumed: bool, tmp_path: Path) -> None:
    assert_same_steps(ranks2.run(fine_tune, resumed, str(tmp_path)))


# --- what is refused --------------------------------------------------------------------------------------------


@on_ranks("ranks2")
def test_models_that_would_not_be_reduced(tmp_path: Path) -> None:
    from dp_compile.integrations import transformers as ours

    class Alone(ours.DPCompileMixin):
        pass

    class Shards(ours.DPCompileTrainer):
        """Prepares its model in a way of its own, as transformers does for shards."""

        def _prepare_for_training(self, *args: Any) -> Any:
            prepared = super()._prepare_for_training(*args)
            return self.accelerator.unwrap_model(prepared[0]), *prepared[1:]

    def refused(text: str) -> Any:
        return pytest.raises(dp_compile.DPCompileError, match=f"^{text}")

    with as_launched():
        made = trainer_of(True, str(tmp_path))
        with refused("Alone has DPCompileMixin but is no transformers.Trainer. Derive it from both"):
            Alone()
        with refused("GPT2LMHeadModel was not wrapped by dp_compile"):
            Shards(model=made.model, args=made.args, train_dataset=texts(), data_collator=padded).train()
        with refused("GPT2LMHeadModel is replicated already, and DPCompileTrainer does that too"):
            type(made)(model=dp_compile.replicate(made.model), args=made.args)
