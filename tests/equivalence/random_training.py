"""Random trainings: a usual network, and what scripts do to it while it is trained.

Where random_programs.py draws Python state of many kinds, here modes, trained parameters,
optimizers, layers, hooks, saved states and random numbers change at random moments: between
steps, in a callback, in the data set, in forward and loss.
"""

from __future__ import annotations

import random

from random_actions import (
    ACTIONS,
    BEGINNING,
    BESIDE,
    CALLS,
    GRADIENTS,
    LAYERS,
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
)


class Training:
    """Draws one training.

    Args:
        seed: It follows from this alone.
    """

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self._microbatches = draw.choice((1, 1, 4))
        self._has_own_loop = draw.random() < 0.3
        rest = sorted(LAYERS.keys() - {"a", "b", "dropout"})
        self._layers = ["a", "b", "dropout", *draw.sample(rest, draw.randint(2, 3))]
        self._linear = ["a", "b", "a", "b"]
        self._linear += ["seq[0]"] * ("seq" in self._layers)
        self._linear += ["blocks[0]"] * ("blocks" in self._layers)
        self._usual = draw.random() < 0.5  # no odd code in forward and loss

    def text(self) -> str:
        """The training. Its ``main`` gives what is to be compared."""
        parts = (self._network(), self._losses(), self._helpers(), self._script())
        return "\n".join([BEGINNING, *(line for part in parts for line in ("", *part))]) + "\n"

    def _happens(self, chance: float) -> bool:
        return self._draw.random() < chance

    def _network(self) -> list[str]:
        draws = ("python", "own", "tensors", "torch")
        drawn = f"'by_{self._draw.choice(draws)}'"
        made = [f"self.{name} = {LAYERS[name].replace('%', drawn)}" for name in self._layers]
        if self._happens(0.2):
            made.append("self.b.weight = self.a.weight")
        made.append("self.p, self.calls, self.limit = 0.2, 0, 1e6")
        made.append("self.register_buffer('k', torch.ones(4))")
        calls = [CALLS.get(name, f"h = self.{name}(h)") for name in self._layers]
        beside = [self._draw.choice(BESIDE) for _ in range(0 if self._usual else 3)]
        body = [*calls, *beside]
        self._draw.shuffle(body)
        others = [line for line in body if line not in beside]
        return [
            *("class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"),
            *_indented(made, 2),
            *_indented(["def forward(self, h):", *_indented(body), "    return h"]),
            *_indented(["def other(self, h):", *_indented(others), "    return h"]),
        ]

    def _losses(self) -> list[str]:
        first = LOSSES[0] if self._usual else self._draw.choice(LOSSES)
        other = self._draw.choice(LOSSES)
        return ["def loss_fn(h, y):", f"    {first}", "def other_loss(h, y):", f"    {other}"]

    def _helpers(self) -> list[str]:
        own = self._has_own_loop
        swap = "S.optimizer = optimizer" if own else "S.optimizer = model.optimizer = optimizer"
        holder = "net" if own else "model"
        moments = "S.optimizer.state_dict()" if own else "model.optimizer_state_dict()"
        load = (
            "S.optimizer.load_state_dict(state)"
            if own
            else "model.load_optimizer_state_dict(state)"
        )
        return [
            *("def set_optimizer(optimizer):", f"    {swap}"),
            *(
                "def set_loss(loss):",
                "    S.loss = loss",
                *([] if own else ["    model.loss_fn = loss"]),
            ),
            *("def add(*parameters):",),
            "    S.optimizer.add_param_group({'params': list(parameters)})",
            *("def state():", f"    return {holder}.state_dict()"),
            *("def load(state, **options):",),
            f"    log('loaded', str({holder}.load_state_dict(state, **options)))",
            *("def moments():", f"    return {moments}"),
            *("def load_moments(state):", f"    {load}"),
            *("def average(ema):", "    with torch.no_grad():"),
            "        for e, p in zip(ema.parameters(), net.parameters()):",
            "            e.mul_(0.9).add_(p, alpha=0.1)",
            "        log('average', [e.sum().item() for e in ema.parameters()])" if own else "",
            *("def end():", "    log('state', state(), moments())"),
        ]

    def _action(self) -> str:
        found = self._draw.choice(ACTIONS[""])
        special = [name for name in ACTIONS if name in self._layers]
        if special and self._happens(0.25):
            found = self._draw.choice(ACTIONS[self._draw.choice(special)])
        return self._filled(found)

    def _filled(self, text: str) -> str:
        draw = self._draw
        text = text.replace("$", draw.choice(OPTIMIZERS)).replace("%", "net.parameters()")
        text = text.replace("&", draw.choice(SCHEDULES))
        return text.replace("@", draw.choice(self._linear)).replace("~", draw.choice(self._layers))

    def _actions(self, most: int = 2) -> list[str]:
        return [self._action() for _ in range(self._draw.randint(1, most))]

    def _script(self) -> list[str]:
        draw, ranks = self._draw, {name: self._draw.randrange(2) for name in self._layers}
        ranks.update(a=0, b=1)
        steps = self._own_loop() if self._has_own_loop else self._by_model()
        return [
            *self._data(),
            *self._callback(),
            "def main(make, place):",
            *_indented(["global net, model", "torch.manual_seed(1)", "random.seed(1)"]),
            *_indented(["np.random.seed(1)", "S.own = random.Random(2)"]),
            f"    net = Net(); place(net, {ranks})",
            f"    S.optimizer = {draw.choice(OPTIMIZERS).replace('%', 'net.parameters()')}",
            "    S.loss, S.sched, S.moments, S.ema = loss_fn, None, None, None",
            "    net, model = make.distribute(net), None"
            if self._has_own_loop
            else f"    model = make.model(net, loss_fn, S.optimizer, {self._microbatches})",
            *_indented(steps),
            *_indented(["end()", "return LOG"]),
        ]

    def _data(self) -> list[str]:
        lines = [*("class Data:", "    def __init__(self, n):", "        self.n, self.seen = n, 0")]
        lines += [
            "    def __len__(self):",
            "        return self.n",
            "    def __getitem__(self, i):",
        ]
        lines += ["        if not 0 <= i < self.n: raise IndexError", "        self.seen += 1"]
        acts = self._happens(0.4) and self._actions()
        if acts:
            lines += [f"        if self.seen == {self._draw.choice((1, 8, 9, 12, 17, 24))}:"]
            lines += _indented(acts, 3)
        noise = ("0.1", "random.random()", "np.random.rand()", "torch.rand(1)", "S.own.random()")
        made = f"torch.full((4,), 0.1 * i) + {self._draw.choice(noise)}"
        return [*lines, f"        return {made}, torch.sin(torch.arange(4) + i)"]

    def _callback(self) -> list[str]:
        lines = ["def acts(base):", "    class Acts(base):", "        step = 0"]
        for name in ("on_epoch_begin", "on_epoch_end", "on_train_begin"):
            if self._happens(0.2):
                lines += [f"        def {name}(self, context):", *_indented(self._actions(), 3)]
        if self._happens(0.2):
            lines += ["        def on_gradients(self, context):", "            C.m += 1"]
        lines += ["        def on_step_end(self, context):", "            self.step += 1"]
        for step in range(1, 5):
            if self._happens(0.5):
                lines += [f"            if self.step == {step}:", *_indented(self._actions(), 4)]
        lines += ["            log('loss', float(context.loss).hex())", "            look()"]
        return [*lines, "    return Acts()"]

    def _by_model(self) -> list[str]:
        lines = []
        for _ in range(self._draw.randint(3, 6)):
            chance = self._draw.random()
            if chance < 0.4:
                shuffle = (
                    f"{self._draw.choice((16, 19))}), batch_size=8, shuffle={self._happens(0.5)}"
                )
                loader = f"torch.utils.data.DataLoader(Data({shuffle})"
                lines.append(
                    f"model.train({self._draw.choice((1, 2))}, {loader}, [acts(make.base)])"
                )
            elif chance < 0.5:
                lines.append("log('outputs', model.predict(torch.randn(8, 4)).clone())")
            else:
                lines.append("x, y = torch.randn(8, 4), torch.randn(8, 4)")
                lines += self._tried(["log('loss', float(model.train_step(x, y)).hex())"])
            lines.append("look()")
            lines += self._between()
        return lines

    def _tried(self, lines: list[str]) -> list[str]:
        if not self._happens(0.4):
            return lines
        head = ["net.limit = 0.1", "try:"] if self._happens(0.2) else ["try:"]
        lines = [
            *head,
            *_indented(lines),
            "except (ValueError, RuntimeError, AssertionError) as e:",
        ]
        lines.append("    if 'graphsplit' in type(e).__module__: raise")
        return [*lines, "    log('error', type(e), str(e)[:40])", "net.limit = 1e6"]

    def _own_loop(self) -> list[str]:
        shuffle = f"shuffle={self._happens(0.5)}"
        lines = [f"batches = iter(torch.utils.data.DataLoader(Data(64), batch_size=8, {shuffle}))"]
        for _ in range(self._draw.randint(4, 6)):
            made = "torch.randn(8, 4), torch.randn(8, 4)"
            lines += [f"x, y = {'next(batches)' if self._happens(0.5) else made}"]
            parts = self._happens(0.3)
            step = ["net.train()"] * self._happens(0.7)
            step += ["S.optimizer.zero_grad(set_to_none=False)"] * self._happens(0.2)
            step += ["S.optimizer.zero_grad()"] * self._happens(0.8)
            if parts:
                step += ["for one, two in zip(x.chunk(2), y.chunk(2)):"]
                step += ["    loss = S.loss(net(one), two) / 2", "    loss.backward()"]
            else:
                step += ["loss = S.loss(net(x), y)", *(self._actions(1) * self._happens(0.1))]
                step += ["loss.backward()"]
            if self._happens(0.5):
                step += [self._filled(self._draw.choice(GRADIENTS))]
            step += ["S.optimizer.step()", "log('loss', loss.item())"]
            lines += [*self._tried(step), "look()"]
            if self._happens(0.2):
                lines += ["net.eval()", "with torch.no_grad(): log('outputs', net(x).tolist())"]
            lines += self._between()
        return lines

    def _between(self) -> list[str]:
        lines = self._actions(4) if self._happens(0.9) else []
        return [*lines, *(["end()"] * self._happens(0.15))]


def _indented(lines: list[str], times: int = 1) -> list[str]:
    return ["    " * times + line for line in lines]
