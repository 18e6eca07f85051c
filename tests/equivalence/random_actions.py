"""What random trainings consist of: layers, odd code in forward and loss, what scripts do.

``@`` stands for a linear layer, ``~`` for any, ``$`` for an optimizer, ``&`` for a schedule.
"""

from __future__ import annotations

BEGINNING = """
import copy, functools, hashlib, random, types
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, parametrizations, prune

C, S, LOG = types.SimpleNamespace(n=0, m=0), types.SimpleNamespace(hooks=[], states=[]), []


def log(name, *values):
    LOG.append((name, *copy.deepcopy(values)))


def short(state):
    return hashlib.sha256(repr(state).encode()).hexdigest()[:8]


def look():
    log("torch", short(torch.get_rng_state().tolist()))
    log("others", short(random.getstate()), short(np.random.get_state()))
    log("modes", [module.training for module in net.modules()])
    log("trained", [(name, p.requires_grad) for name, p in net.named_parameters()])
    groups = S.optimizer.param_groups
    log("groups", [{**group, "params": len(group["params"])} for group in groups])
    log("counts", C.n, C.m, S.own.random(), S.sched and S.sched.get_last_lr())


def unhook():
    if S.hooks:
        S.hooks.pop(0).remove()


class Half(nn.Module):
    def forward(self, w):
        return w * 0.5


class Lazy(nn.Module):
    def __init__(self, draws):
        super().__init__()
        self.lin, self.rate, self.draws = nn.Linear(4, 4), 0.5, draws
        self.own = random.Random(3)
        self.arrays, self.tensors = np.random.default_rng(3), torch.Generator().manual_seed(3)

    def forward(self, h):
        if self.training and getattr(self, self.draws)() < self.rate:
            return h
        return h + self.lin(h)

    def by_python(self):
        return random.random()

    def by_numpy(self):
        return np.random.rand()

    def by_own(self):
        return self.own.random()

    def by_arrays(self):
        return self.arrays.random()

    def by_tensors(self):
        return torch.rand(1, generator=self.tensors).item()

    def by_torch(self):
        return torch.rand(1)


def other_forward(self, h):
    return F.linear(h, self.weight, self.bias) * 0.9


def count(*args):
    C.n += 1


def more(module, inputs, output):
    C.m += 1
    return output * 1.1


def doubled(module, inputs):
    return (inputs[0] * 2,)


def halved(module, grad_input, grad_output):
    return tuple(None if g is None else g * 0.5 for g in grad_input)


def scale_gradient(p):
    p.grad.mul_(0.5)


def keep(module, inputs, output):
    S.kept = output.detach()


def with_noise(module, inputs, output):
    return output + 0.1 * torch.randn_like(output)


def at_times(module, inputs, output):
    C.m += 1
    return output * 0.5 if C.m % 2 else output


def fewer(group):
    C.m += 1
    return 0.5 ** C.m
"""

LAYERS = {
    "a": "nn.Linear(4, 4)",
    "b": "nn.Linear(4, 4)",
    "bn": "nn.BatchNorm1d(4)",
    "dropout": "nn.Dropout(0.2)",
    "ln": "nn.LayerNorm(4)",
    "emb": "nn.Embedding(5, 4)",
    "cell": "nn.GRUCell(4, 4)",
    "conv": "nn.Conv1d(1, 1, 3, padding=1)",
    "seq": "nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1))",
    "blocks": "nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])",
    "lazy": "Lazy(%)",
}
CALLS = {
    "emb": "h = h + self.emb((h.detach() > 0).sum(1))",
    "cell": "h = self.cell(h, h * self.k)",
    "conv": "h = self.conv(h.unsqueeze(1)).squeeze(1)",
    "blocks": "for block in self.blocks: h = torch.tanh(block(h))",
}
BESIDE = (
    "h = F.dropout(h, self.p, self.training)",
    "h = h * self.k",
    "h = F.dropout(h, self.dropout.p, self.dropout.training)",
    "if torch.rand(1) < self.p: h = torch.tanh(h)",
    "if self.training and torch.rand(()).item() < 0.5: return h",
    "h = h + self.p * torch.randn_like(h)",
    "if h.sum() > 0: h = h * 0.5",
    "if h.detach().mean().item() > self.p: h = self.b(h)",
    "while float(h.detach().abs().max()) > 1: h = h * 0.5",
    "if float(h.detach().abs().sum()) > self.limit: raise ValueError('too large')",
    "assert torch.isfinite(h).all(), 'not finite'",
    "self.k = self.k * 0.9 + 0.1 * h.detach().mean(0)",
    "self.k.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)",
    "self.calls += 1",
    "if self.calls > 3: h = h * 0.5",
    "if self.training: self.p *= 0.9",
    "self.a.requires_grad_(self.calls > 2)",
    "self.dropout.p = 0.1 * (self.calls % 3)",
    "h = F.batch_norm(h, None, None, training=True)",
)
OPTIMIZERS = (
    "torch.optim.SGD(%, lr=0.1)",
    "torch.optim.SGD(%, lr=0.1, momentum=0.9, nesterov=True)",
    "torch.optim.Adam(%, lr=0.01)",
    "torch.optim.AdamW(%, lr=0.01, weight_decay=0.1, amsgrad=True)",
    "torch.optim.RMSprop(%, lr=0.01)",
    "torch.optim.Adagrad(%, lr=0.05)",
)
SCHEDULES = (
    "torch.optim.lr_scheduler.StepLR(S.optimizer, 1, 0.5)",
    "torch.optim.lr_scheduler.OneCycleLR(S.optimizer, 0.1, total_steps=99)",
    "torch.optim.lr_scheduler.LambdaLR(S.optimizer, fewer)",
    "torch.optim.lr_scheduler.CosineAnnealingLR(S.optimizer, 5)",
)
# What a script does, by the layer that it needs.
ACTIONS = {
    "": (
        *("net.eval()", "net.train()", "net.~.eval()", "net.~.train()", "net.~.train(False)"),
        *("net.dropout.p = 0.4", "net.p = 0.3", "net.p = net.p * 0.5", "net.limit = 9.0"),
        *("net.~.training = False", "net.@.weight.requires_grad_(False)", "net.zero_grad()"),
        *("net.~.requires_grad_(False)", "net.~.requires_grad_(True)", "net.requires_grad_(True)"),
        *("net.@.bias.requires_grad = False", "net.@.bias.requires_grad_(True)"),
        "S.optimizer.param_groups[0]['lr'] *= 0.5",
        "S.optimizer.param_groups[-1]['weight_decay'] = 0.1",
        "for group in S.optimizer.param_groups: group['lr'] = group['lr'] * 0.9",
        *("S.sched = &", "S.sched and S.sched.step()", "S.sched and S.sched.step()"),
        *("set_optimizer($)", "set_optimizer($)", "set_loss(other_loss)", "set_loss(loss_fn)"),
        *("net.@.weight = nn.Parameter(torch.randn(4, 4) * 0.3)", "net.@.bias = None"),
        "net.@.weight = nn.Parameter(torch.randn(4, 4) * 0.3); add(net.@.weight)",
        "net.@.bias = nn.Parameter(net.@.bias.detach().clone())",
        "net.k = torch.rand(4)",
        *("net.k.mul_(0.5)", "net.register_buffer('k', torch.rand(4))"),
        *("net.a = nn.Identity()", "net.b = nn.Linear(4, 4); add(*net.b.parameters())"),
        *("net.b = nn.Linear(4, 4)", "net.b = nn.Sequential(net.b, nn.Tanh())"),
        "net.b = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)); set_optimizer($)",
        "net.@.forward = functools.partial(other_forward, net.@)",
        "net.@.forward = lambda h, f=net.@.forward: f(h) * 0.5",
        "S.hooks.append(net.@.register_full_backward_hook(count))",
        "S.hooks.append(net.@.weight.register_post_accumulate_grad_hook(scale_gradient))",
        "S.hooks.append(net.~.register_forward_hook(keep))",
        "S.hooks.append(net.~.register_forward_hook(with_noise))",
        "S.hooks.append(net.~.register_forward_hook(at_times))",
        "S.hooks.append(net.@.register_full_backward_pre_hook(lambda m, g: (g[0] * 2,)))",
        "net.@.forward = types.MethodType(other_forward, net.@)",
        "nn.Module.__delattr__(net.@, 'forward') if 'forward' in vars(net.@) else None",
        "Net.forward = Net.other",
        "net.b, net.a = net.a, net.b",
        "S.hooks.append(net.~.register_forward_hook(more))",
        "S.hooks.append(net.~.register_forward_hook(count))",
        "S.hooks.append(net.@.register_forward_pre_hook(doubled))",
        "S.hooks.append(net.@.register_forward_pre_hook(count))",
        "S.hooks.append(net.@.register_full_backward_hook(halved))",
        "S.hooks.append(net.@.weight.register_hook(lambda g: g * 0.5))",
        "S.hooks.append(net.register_forward_hook(more))",
        "S.hooks.append(net.register_state_dict_post_hook(count))",
        "S.hooks.append(net.@.register_load_state_dict_pre_hook(count))",
        "S.hooks.append(net.@.register_load_state_dict_post_hook(count))",
        "S.hooks.append(S.optimizer.register_step_post_hook(count))",
        *(
            "unhook()",
            "unhook()",
            "S.states.append(copy.deepcopy(state()))",
            "if S.states: load(S.states[-1])",
        ),
        *(
            "S.states.append(copy.deepcopy(state()))",
            "if S.states: load(S.states[-1])",
            "if S.states: load(S.states[0])",
        ),
        "load({k: v for k, v in state().items() if 'a' in k}, strict=False)",
        "S.moments = copy.deepcopy(moments())",
        "S.moments and load_moments(S.moments)",
        "with torch.no_grad(): net.@.weight.copy_(torch.randn(4, 4))",
        "with torch.no_grad(): net.@.weight[0] = 0.5",
        *("net.@.weight.data.mul_(0.9)", "nn.init.xavier_uniform_(net.@.weight)"),
        "for p in net.parameters(): p.data.clamp_(-0.5, 0.5)",
        "with torch.no_grad(): [p.add_(torch.randn_like(p), alpha=0.1) for p in net.parameters()]",
        *("net.@.reset_parameters()", "nn.init.zeros_(net.@.bias)"),
        "S.ema = copy.deepcopy(net)",
        "if S.ema: average(S.ema)",
        "if S.ema: average(S.ema)",
        "parametrize.register_parametrization(net.@, 'weight', Half())",
        "parametrize.remove_parametrizations(net.@, 'weight')",
        "parametrizations.weight_norm(net.@); set_optimizer($)",
        "prune.l1_unstructured(net.@, 'weight', 3)",
        "prune.random_unstructured(net.@, 'weight', 3)",
        *("log('drawn', random.random(), np.random.rand())", "log('drawn', torch.rand(2))"),
        *("torch.manual_seed(3)", "random.seed(3)", "np.random.seed(3)"),
        *("log('drawn', S.own.random())", "random.shuffle(S.states)", "S.own.seed(1)"),
    ),
    "bn": (
        *("net.bn.momentum = 0.3", "net.bn.momentum = None", "net.bn.eps = 0.01", "net.bn.eval()"),
        *("net.bn.track_running_stats = False", "net.bn.track_running_stats = True"),
        *("net.bn.reset_running_stats()", "net.bn.weight.data.fill_(0.5)", "net.bn.train()"),
        *("net.bn.running_mean = torch.zeros(4)", "net.bn = nn.Identity()"),
        *("net.bn.running_mean.mul_(0.5)", "net.bn.num_batches_tracked.zero_()"),
    ),
    "ln": ("net.ln.eps = 0.1", "net.ln = nn.Identity()", "net.ln.bias = None"),
    "emb": ("net.emb.max_norm = 0.5", "net.emb.weight.data[0] = 0.0"),
    "seq": (
        *("net.seq.append(nn.Tanh())", "del net.seq[-1]", "net.seq[1] = nn.Sigmoid()"),
        *("net.seq = nn.Sequential(*reversed(net.seq))", "net.seq.insert(0, nn.Identity())"),
    ),
    "blocks": (
        *("net.blocks.append(nn.Linear(4, 4)); add(*net.blocks[-1].parameters())",),
        *("net.blocks.append(nn.Linear(4, 4))", "del net.blocks[0]", "net.blocks.append(net.a)"),
        *("net.blocks = nn.ModuleList(reversed(net.blocks))", "net.blocks[0] = nn.Tanh()"),
        "net.blocks[0], net.blocks[-1] = net.blocks[-1], net.blocks[0]",
    ),
    "lazy": (
        *("net.lazy.rate = 0.9", "net.lazy.rate = 0.0", "net.lazy.draws = 'by_own'"),
        *("net.lazy.own = random.Random(5)", "net.lazy.own.random()", "net.lazy.own.seed(1)"),
        *("net.lazy.tensors.manual_seed(1)", "net.lazy.arrays = np.random.default_rng(1)"),
        "log('drawn', net.lazy.own.random(), net.lazy.arrays.random())",
    ),
}
GRADIENTS = (
    "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)",
    "torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)",
    "net.@.weight.grad = None",
    "if net.@.weight.grad is not None: net.@.weight.grad.zero_()",
    "for p in net.parameters(): p.grad = None if p.grad is None else p.grad * 0.5",
    "log('none', [p.grad is None for p in net.parameters()])",
    "log('norm', [float(p.grad.norm()) for p in net.parameters() if p.grad is not None])",
)
LOSSES = (
    "return (h - y).square().mean()",
    "return F.smooth_l1_loss(h, y)",
    "return F.mse_loss(F.dropout(h, 0.2), y)",
    "return F.mse_loss(h, y) + 0.01 * sum(p.square().sum() for p in net.parameters())",
    "return F.mse_loss(h, y) * (1 if C.n % 2 else 0.5)",
    "return F.mse_loss(h, y + 0.1 * torch.randn_like(y))",
    "return F.mse_loss(h, y) if h.mean() > 0 else F.l1_loss(h, y)",
    "C.n += 1; return F.mse_loss(h, y) / C.n",
    "return F.mse_loss(h, y) * (0.5 + S.own.random())",
    "return F.mse_loss(h, y) * (0.5 + random.random())",
)
