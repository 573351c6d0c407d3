"""The class of a replicated module, also of unusual ones, its methods, its start at the first forward, comm hooks."""

import abc
import copy
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, same_on_all_ranks
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dp_compile
from dp_compile.replication.module import InputMover, replica_of

pytestmark = pytest.mark.usefixtures("fake_group")

unsupported = partial(pytest.raises, dp_compile.UnsupportedModuleError)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.body(x))


class OwnCopy(nn.Linear):
    """Says itself how it is copied, by class and attributes."""

    def __deepcopy__(self, memo):
        twin = type(self)(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        return twin


class TestClass:
    def test_is_a_subclass_of_both_and_gets_its_class_back(self):
        model = dp_compile.replicate(Net())
        assert type(model).__name__ == "DDPNet"
        assert isinstance(model, Net)
        assert isinstance(model, dp_compile.ReplicatedModule)
        assert repr(model).startswith("DDPNet(")
        assert type(model) is type(dp_compile.replicate(Net()))
        assert type(dp_compile.unreplicate(model)) is Net
        assert not model._forward_pre_hooks
        assert type(dp_compile.replicate(model)).__name__ == "DDPNet"

        # Containers can be indexed and sliced.
        layers = dp_compile.replicate(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        assert type(layers[:2]) is nn.Sequential
        assert layers[:2](torch.ones(1, 2)).shape == (1, 3)
        assert layers[2].weight is layers[-1].weight
        blocks = dp_compile.replicate(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        assert type(blocks + nn.ModuleList([nn.ReLU()])) is nn.ModuleList

    def test_copies_and_pickles_are_plain(self):
        """Also where something inside points back, and with the user's hooks, but without ours."""
        model = dp_compile.replicate(Net())
        model.register_forward_pre_hook(hook_of_the_user)
        model.head.root = [model]
        pickles = [partial(pickle.dumps, protocol=protocol) for protocol in (2, pickle.HIGHEST_PROTOCOL)]
        for copied in (copy.deepcopy, *(lambda module, dumps=dumps: pickle.loads(dumps(module)) for dumps in pickles)):
            for twin in (copied(model), copied(nn.Sequential(model))[0]):
                assert type(twin) is Net
                assert twin.head.root == [twin]
                assert list(twin._forward_pre_hooks.values()) == [hook_of_the_user]
                twin(torch.ones(1, 4)).sum().backward()
                torch.testing.assert_close(twin.head.weight, model.head.weight)
                with unsupported(match="Net is not replicated"):
                    dp_compile.report(twin)
                assert type(dp_compile.replicate(twin)).__name__ == "DDPNet"
        assert type(model).__name__ == "DDPNet"
        assert b"dp_compile" not in pickle.dumps(dp_compile.replicate(nn.Sequential(nn.Linear(2, 2))))

    def test_classes_that_say_how_they_are_copied(self):
        wrapper = dp_compile.DistributedDataParallel(Net(), config=AOT)
        average = AveragedModel(wrapper, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.update_parameters(wrapper)
        with torch.no_grad():
            wrapper.module.head.bias += 1
        average.update_parameters(wrapper)
        torch.testing.assert_close(average.module.module.head.bias + 0.5, wrapper.module.head.bias)
        for plain in (OwnCopy(2, 3), torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))):
            kind, model = type(plain), dp_compile.replicate(plain, config=AOT)
            twin = AveragedModel(model).module
            assert isinstance(twin, OwnCopy if kind is OwnCopy else torch.fx.GraphModule)
            assert not isinstance(twin, dp_compile.ReplicatedModule)
            assert not twin._forward_pre_hooks
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine, other)
                assert mine is not other


def hook_of_the_user(module, args):
    """A forward pre-hook that does nothing."""


def test_no_sync_returns_to_what_was_before():
    model = dp_compile.replicate(Net())
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        with model.no_sync():
            assert not replica_of(model).state.sync
        assert replica_of(model).state.sync is sync


def test_inputs_are_moved_inside_a_compiled_forward():
    model = dp_compile.replicate(nn.Linear(4, 2), config=AOT)
    model.register_forward_pre_hook(InputMover(torch.device("cpu")), with_kwargs=True)
    mover = InputMover(torch.device("meta"))
    (positional, other), named = mover(nn.Identity(), (torch.ones(2), 3), {"mask": [torch.ones(2)], "flag": None})
    assert (positional.device.type, named["mask"][0].device.type) == ("meta", "meta")
    assert (other, named["flag"]) == (3, None)
    compiled = torch.compile(nn.Sequential(Net().body, nn.Linear(3, 4), model), backend="aot_eager", fullgraph=True)
    compiled(torch.ones(1, 4)).sum().backward()
    assert dp_compile.report(model).backwards == {"captured": 1}


class TestPending:
    def test_meta(self):
        with torch.device("meta"):
            model = Net()
        dp_compile.replicate(model, config=AOT)
        assert type(model).__name__ == "DDPNet"
        assert isinstance(model, Net)
        with unsupported(match="Net is not replicated yet"):
            dp_compile.report(model)
        with unsupported(match=r"body\.0\.weight is on the meta device.*to_empty"):
            model(torch.ones(1, 4))
        model.to_empty(device="cpu")(torch.ones(1, 4))
        torch.compile(nn.Sequential(model), backend="aot_eager", fullgraph=True)(torch.ones(1, 4))  # nothing is left
        assert [len(each._forward_pre_hooks) for each in model.modules()] == [1, 0, 0, 0, 0]

    def test_lazy(self):
        """Parameters need values by the start; torch has no word on which one has none."""
        x = torch.ones(3, 4)
        with pytest.raises(RuntimeError):
            torch_replicate(nn.Sequential(nn.LazyLinear(2)))(x)
        lazy = dp_compile.replicate(nn.Sequential(nn.LazyLinear(2)), config=AOT)
        with unsupported(match=r"Sequential is replicated already .awaits its first forward."):
            dp_compile.replicate(lazy)
        with unsupported(match=r"0\.weight is lazy\. Run one forward .* before replicate"):
            lazy(x)
        assert type(dp_compile.unreplicate(lazy)) is nn.Sequential
        lazy(x).sum().backward()
        itself = dp_compile.replicate(nn.LazyLinear(2), config=AOT)
        itself(x)
        assert replica_of(itself).names == ("weight", "bias")
        assert type(itself).__name__ == "DDPLinear"
        with unsupported(match="LazyLinear has lazy parameters"):
            dp_compile.DistributedDataParallel(nn.LazyLinear(2))


@on_ranks("ranks")
def test_starts_as_torchs_replicate():
    """Ranks draw different initial values and see different inputs; the first forward is one without a reduction."""
    with torch.device("meta"):
        models = [Net(), Net()]
    dp_compile.replicate(models[0], config=AOT)
    torch_replicate(models[1])
    for model in models:
        model.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    runs = [torch.compile(models[0], backend="aot_eager"), models[1]]
    for step in range(4):
        for model, run in zip(models, runs, strict=True):
            model.set_requires_gradient_sync(step % 2 == 1)
            run(torch.full((2, 4), 1.0 + step + dist.get_rank())).square().mean().backward()
        for mine, other in zip(*(model.parameters() for model in models), strict=True) if step % 2 else ():
            torch.testing.assert_close((mine, mine.grad), (other, other.grad))
            with torch.no_grad():
                for each in (mine, other):
                    each -= 0.1 * each.grad
                    each.grad = None
    same_on_all_ranks(models[0])
    assert dp_compile.report(models[0]).backwards == {"captured": 2, "without sync": 2}


class TestCommHooks:
    def test_bad_hooks(self):
        """What is no hook, a second one, one after the first backward."""
        bf16 = default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_hook)
        hooks = [
            (3, r"must be a function of \(state, bucket\), got int"),
            (repr, r"repr must take \(state, bucket\), takes \(obj, /\)"),
            (bf16, "bf16_compress_wrapper.* needs NCCL or XCCL, the group's backend is fake"),
        ]
        for hook, message in hooks:
            for model in (dp_compile.replicate(Net()), dp_compile.DistributedDataParallel(Net())):
                with pytest.raises(dp_compile.ConfigError, match=message):
                    model.register_comm_hook(None, hook)
                assert dp_compile.report(model).mode == "dp_compile"
        model = dp_compile.replicate(Net(), config=AOT)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with unsupported(match="Net has a comm hook already, allreduce_hook"):
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        model = dp_compile.replicate(Net(), config=AOT)
        model(torch.ones(1, 4)).sum().backward()
        with unsupported(match="a backward of Net has run already"):
            model.register_comm_hook(None, default_hooks.allreduce_hook)

    def test_the_report_says_why_one_is_not_captured(self):
        """Registered before the start."""
        hooks = [
            (local_hook, [], "what it computes is unknown"),
            (default_hooks.allreduce_hook, dist.new_group([0]), "it averages over another group than the module's"),
        ]
        for hook, state, why in hooks:
            with torch.device("meta"):
                model = dp_compile.replicate(Net(), config=AOT)
            model.to_empty(device="cpu").register_comm_hook(state, hook)
            output = model(torch.ones(3, 4))
            text = f"comm hook {hook.__name__} is called with each bucket: {why}"
            assert dp_compile.report(model).why_not_captured.startswith(text)
            assert dp_compile.report(model).mode == f"dp_compile, comm hook {hook.__name__}"
            if hook is local_hook:  # the other one needs a future that holds something
                output.sum().backward()
                assert len(state) > 0


def local_hook(state, bucket):
    """Leaves the bucket as it is; the fake group's futures hold nothing."""
    state.append(bucket.buffer().numel())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def counting_hook(state, bucket):  # torch's DDP refuses annotations that are text
    """Doubles the average, and writes down the size of the bucket."""
    state.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 2 / dist.get_world_size())


HOOKS = {"ours": counting_hook, "fp16": default_hooks.fp16_compress_hook}


@pytest.mark.parametrize(("how", "name"), [("compiled", "fp16"), ("wrapper", "ours")])
@on_ranks("ranks")
def test_comm_hook_as_torch_ddp(how, name):
    """Compare with torch's DDP with the same hook; with accumulation, compiled, over a few steps."""
    torch.manual_seed(0)
    plain = Net()
    theirs = TorchDDP(copy.deepcopy(plain))
    ours = dp_compile.DistributedDataParallel(plain, config=AOT) if how == "wrapper" else plain
    if how != "wrapper":
        dp_compile.replicate(plain, config=AOT)
    states = [[], []]
    for model, state in ((ours, states[0]), (theirs, states[1])):
        model.register_comm_hook(state if name == "ours" else None, HOOKS[name])
    run = torch.compile(ours, backend="aot_eager")
    for step in range(3):
        for micro_step in range(2):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for model, forward in ((ours, run), (theirs, theirs)):
                with model.no_sync() if micro_step == 0 else nullcontext():
                    forward(x).square().mean().backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            # Of more than two ranks another one adds first, and rounds, where a gradient lies elsewhere in its bucket.
            rounded = {"rtol": 0.01, "atol": 1e-3} if name == "fp16" and dist.get_world_size() > 2 else {}
            torch.testing.assert_close(mine.grad, other.grad, **rounded)
            mine.grad = other.grad = None
    assert states[0] == states[1]
    assert (len(states[0]) > 0) is (name == "ours")
    known = {"without sync": 3, "captured": 3}  # what it does
    assert dp_compile.report(ours).backwards == (known if name == "fp16" else {"without sync": 3, "eager hooks": 3})


def other_calls():
    """What each rank raises of hooks that differ, and of what is refused on rank 1 alone."""
    raised, second = [], dist.get_rank() == 1
    for attempt in (
        lambda module: module.register_comm_hook([], counting_hook if second else default_hooks.allreduce_hook),
        lambda module: module.register_comm_hook(None, 3 if second else default_hooks.allreduce_hook),
        lambda module: module.set_gradient_divide_factor(0.0 if second else 2.0),
    ):
        module = dp_compile.replicate(nn.Linear(2, 2))
        with pytest.raises(dp_compile.DPCompileError) as error:
            attempt(module)
        raised.append(f"{type(error.value).__name__}: {error.value}")
        dp_compile.unreplicate(module)
    return raised


def test_ranks_with_other_comm_hooks(ranks2):
    """All ranks hear at once; they waited for it, as long as their group waits."""
    first, second = ranks2.run(other_calls, timeout_s=60.0)
    for text in (first[0], second[0]):
        assert text.startswith("DesyncError: register_comm_hook(): rank 1 differs from rank 0")
        assert 'comm hook is "counting_hook" there, "allreduce_hook" on rank 0' in text
    for raised, own, call in zip(first[1:], second[1:], ("register_comm_hook()", "set_gradient_divide_f"), strict=True):
        assert raised.startswith(f"DesyncError: {call}")
        assert own.startswith("ConfigError: ")
        assert own.removeprefix("ConfigError: ") in raised


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


class MixinFirst(abc.ABC, Plain):
    """In front of `nn.Module`: objects of two such classes have layouts that Python takes for different."""


class Refusing(type):
    def __new__(cls, name, bases, body, **kwargs):
        if "forward" not in body:
            raise TypeError("every class has to define forward")
        return super().__new__(cls, name, bases, body, **kwargs)


class OfRefusing(Plain, metaclass=Refusing):
    def forward(self, x):
        return super().forward(x)


class StoresElsewhere(Plain):
    """Assigns all that it is given, the class too, to another object, and finds it there."""

    def __setattr__(self, name, value):
        if name in ("training", "layer") or (name[0] == "_" and name != "__class__"):
            super().__setattr__(name, value)
        else:
            vars(self).setdefault("elsewhere", {})[name] = value

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class OurNames(Plain):
    """Children and a method with names that methods and wrappers of ours, or of torch's, have."""

    def __init__(self):
        super().__init__()
        self.module, self._orig_mod, self.no_sync = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def set_requires_gradient_sync(self, x):
        return 2 * x

    def forward(self, x):
        return self.set_requires_gradient_sync(self._orig_mod(self.module(self.no_sync(self.layer(x)))))


CLASSES = {
    "metaclass": OfRefusing,
    "mixin": MixinFirst,
    "stores": StoresElsewhere,
    "names": OurNames,
    "graph": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))),
    "script": lambda: torch.jit.script(nn.Linear(4, 4)),
}


def gradients(module, model):
    for step in range(2):
        module.zero_grad()
        if step and isinstance(module, torch.fx.GraphModule):
            (relu,) = module.graph.find_nodes(op="call_module", target="1")
            with module.graph.inserting_after(relu):
                relu.replace_all_uses_with(doubled := module.graph.call_function(torch.mul, (relu, 2.0)))
            doubled.args = (relu, 2.0)
            module.recompile()
        model(torch.ones(2, 4) + step).square().mean().backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_trains(kind):
    """The wrapper takes all, `replicate` swaps the class. The sum of the fake group is this rank's half."""
    for swapped in (False, True) if kind != "metaclass" else (False,):
        torch.manual_seed(1)
        alone = CLASSES[kind]()
        torch.manual_seed(1)
        module = CLASSES[kind]()
        own = type(module)
        model = (dp_compile.replicate if swapped else dp_compile.DistributedDataParallel)(module, config=AOT)
        assert (type(module) is not own) is swapped
        assert issubclass(type(module), own)
        found = [2 * each for each in gradients(module, model)]
        torch.testing.assert_close(found, gradients(alone, alone))
    if kind == "metaclass":
        module = OfRefusing()
        with unsupported(match=r"Use dp_compile.DistributedDataParallel\(module\)"):
            dp_compile.replicate(module)
        dp_compile.DistributedDataParallel(module)  # nothing of the attempt is left
