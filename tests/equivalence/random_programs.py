"""Random programs: a network, a loss and a script that read and change Python state of many kinds.

Where changing_networks.py has networks that stand there, and random_changes.py changes what they
read, here the code itself is drawn: which containers and objects there are, where they hang, what
forward, loss and script read of them, write to them, exchange and share.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from random_kinds import BEGINNING, CLASSES, KINDS, Kind

# Where a value hangs, and how it is written there; {me} is the network, or a part of it.
HOMES = {
    "net": "{me}.{name}",
    "part": "{me}.part.{name}",
    "object": "{me}.held.{name}",
    "class": "Net.{name}",
    "function": "helper.{name}",
    "namespace": "G.{name}",
    "table": "TABLE[{name!r}]",
    "kept": "KEPT.{name}",
    "variable": "{name}",
}
GLOBAL = ("namespace", "table")


@dataclass(frozen=True)
class Slot:
    """A place for a value.

    Attributes:
        name: Its name there.
        kind: The kind of the value.
        home: Where it hangs.
        cls: The class of its objects.
    """

    name: str
    kind: str
    home: str
    cls: str

    def at(self, me: str) -> str:
        """How code names it."""
        return HOMES[self.home].format(me=me, name=self.name)


class Program:
    """Draws one program.

    Args:
        seed: It follows from this alone.

    Attributes:
        microbatches: How many a step has.
        has_own_loop: Whether the script trains by itself, and not by a Model.
        keeps_whole: Whether a part is kept whole.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.microbatches = self._draw.choice((1, 1, 4))
        self.has_own_loop = self._draw.random() < 0.3
        self.keeps_whole = random.Random(~seed).random() < 0.25
        self._asks = self._draw.random() < 0.12
        homes = ("net", "net", "net", "part", "namespace", "table", "class", "object", "function")
        slots = [self._slot(f"s{i}", homes) for i in range(self._draw.randrange(2, 6))]
        if self._happens(0.5):
            first, second = slots[:2]
            slots[1] = Slot(second.name, first.kind, second.home, first.cls)
        self._slots = slots
        self._text = ""

    def keep_to_the_network(self) -> None:
        """Let nothing hang in globals, classes or functions, which threads share."""
        homes = {"namespace": "net", "table": "part", "class": "object", "function": "net"}
        self._slots = [replace(one, home=homes.get(one.home, one.home)) for one in self._slots]

    def text(self) -> str:
        """The program. Its ``main`` yields what is to be compared."""
        if not self._text:  # it is drawn once
            parts = (self._part(), self._helper(), self._network(), self._loss(), self._script())
            lines = [BEGINNING, *(line for part in parts for line in ("", *part))]
            self._text = "\n".join(lines) + "\n"
        return self._text

    def _slot(self, name: str, homes: tuple[str, ...]) -> Slot:
        draw = self._draw
        return Slot(name, draw.choice(list(KINDS)), draw.choice(homes), draw.choice(CLASSES))

    def _happens(self, chance: float) -> bool:
        return self._draw.random() < chance

    def _of(self, choose: Callable[[Kind], tuple[str, ...]], slot: Slot, me: str) -> str:
        text = self._draw.choice(choose(KINDS[slot.kind]))
        return text.replace("@", slot.at(me)).replace("%(", f"{slot.cls}(")

    def _first(self, slot: Slot, me: str = "self") -> str:
        return f"{slot.at(me)} = {self._of(lambda kind: kind.first, slot, me)}"

    def _read(self, slot: Slot, me: str) -> str:
        return self._of(lambda kind: kind.reads, slot, me)

    def _write(self, slot: Slot, me: str) -> str:
        return self._of(lambda kind: kind.writes, slot, me)

    def _share(self, me: str, slots: list[Slot]) -> str:
        """One value in two places, or two that are exchanged."""
        pairs = [
            (one.at(me), other.at(me))
            for one in slots
            for other in slots
            if one is not other and (one.kind, one.cls) == (other.kind, other.cls)
        ]
        found = [f"{one} = {other}" for one, other in pairs]
        found += [f"{one}, {other} = {other}, {one}" for one, other in pairs]
        lists = [slot.at(me) for slot in slots if slot.kind == "list"]
        for slot in slots:
            if slot.kind == "object":
                found += [f"{slot.at(me)}.items = {one}" for one in lists]
                found += [f"{one} = {slot.at(me)}.items" for one in lists]
        return self._draw.choice(found) if found else "pass"

    def _compute(self, me: str, slots: list[Slot]) -> str:
        slot = self._draw.choice(slots)
        if KINDS[slot.kind].computes and self._happens(0.7):
            return self._of(lambda kind: kind.computes, slot, me)
        value = self._read(slot, me)
        found = [
            *(f"h = h * (1 + 0.1 * float({value}))", f"h = h * (1 - 0.1 * float({value}))"),
            f"h = torch.tanh(h) if ({value}) > {self._draw.randrange(3)} else h",
            f"h = (torch.tanh, torch.sigmoid, F.softplus)[int({value}) % 3](h)",
            f"for _ in range(int({value}) % 3): h = h * 0.5 + 0.1",
        ]
        if self.microbatches == 1:  # each microbatch begins where the step's generator stood
            found.append(f"h = F.dropout(h, 0.1 * (int({value}) % 4), self.training)")
        return self._draw.choice(found)

    def _simple(self, me: str, slots: list[Slot]) -> str:
        chance = self._draw.random()
        if chance < 0.45:
            return self._write(self._draw.choice(slots), me)
        return self._share(me, slots) if chance < 0.53 else self._compute(me, slots)

    def _statement(self, me: str, slots: list[Slot]) -> list[str]:
        simple = self._simple(me, slots)
        if not self._happens(0.35):
            return [simple]
        inside = [simple, self._simple(me, slots)] if self._happens(0.4) else [simple]
        if self._happens(0.15):
            last = self._write(self._draw.choice(slots), me)
            return ["try:", *_indented(inside), "finally:", f"    {last}"]
        asked = self._read(self._draw.choice(slots), me)
        heads = ["if self.training:", "if torch.is_grad_enabled():", "for _ in range(2):"]
        heads += [f"if {asked}:", *["if float(h.detach().sum()) > 0:"] * (3 * self._asks)]
        for slot in slots:
            holder, dot, name = slot.at(me).rpartition(".")
            if slot.kind == "int" and dot:
                heads.append(f"with counted({holder}, {name!r}):")
        return [self._draw.choice(heads), *_indented(inside)]

    def _block(self, me: str, slots: list[Slot], least: int, most: int) -> list[list[str]]:
        if not slots:
            return []
        return [self._statement(me, slots) for _ in range(self._draw.randint(least, most))]

    def _part(self) -> list[str]:
        own = [
            Slot(slot.name, slot.kind, "net" if slot.home == "part" else slot.home, slot.cls)
            for slot in self._slots
            if slot.home in ("part", *GLOBAL)
        ]
        return [
            *[self._first(slot) for slot in own if slot.home in GLOBAL],
            "class Part(nn.Module):",
            *_indented(["def __init__(self):", "    super().__init__()"]),
            "        self.lin = nn.Linear(4, 4)",
            *_indented([self._first(slot) for slot in own if slot.home == "net"], 2),
            *_indented(["def forward(self, h):", "    h = self.lin(h)"]),
            *_indented(_flat(self._block("self", own, 0, 2)), 2),
            "        return h",
        ]

    def _helper(self) -> list[str]:
        return [
            "def helper(self, h):",
            *_indented(_flat(self._block("self", self._slots, 1, 2))),
            "    return h",
            *[self._first(slot) for slot in self._slots if slot.home == "function"],
        ]

    def _network(self) -> list[str]:
        at_home = {home: [s for s in self._slots if s.home == home] for home in HOMES}
        own = [*at_home["net"], *at_home["object"]]
        more = [["h = self.part(h)"], ["h = torch.tanh(self.b(h))"]]
        if self._happens(0.5):
            more.append(["h = helper(self, h)"])
        if self._happens(0.3):
            in_place = "self.seen.mul_(0.5).add_(h.detach().mean(0))"
            anew = "self.seen = self.seen * 0.5 + h.detach().mean(0)"
            more.append([self._draw.choice((in_place, anew)), "h = h + 0.1 * self.seen"])
        if self._happens(0.2):
            more.append(["h = h if self.last is None else h + 0.1 * self.last"])
            more.append(["self.last = h.detach().mean()"])
        body = self._block("self", self._slots, 2, 5)
        for statements in more:
            body.insert(self._draw.randint(0, len(body)), statements)
        return [
            "class Net(nn.Module):",
            *[f"    {self._first(s).replace('Net.', '', 1)}" for s in at_home["class"]],
            *_indented(["def __init__(self):", "    super().__init__()"]),
            "        self.part, self.a, self.b = Part(), nn.Linear(4, 4), nn.Linear(4, 4)",
            "        self.held, self.last = Holder(), None",
            '        self.register_buffer("seen", torch.zeros(4))',
            *_indented([self._first(slot) for slot in own], 2),
            *_indented(["def forward(self, x):", "    h = self.a(x)", *_indented(_flat(body))]),
            "        return h",
        ]

    def _loss(self) -> list[str]:
        shared = [slot for slot in self._slots if slot.home in GLOBAL]
        made = "return (h - y).square().mean()"
        form = self._draw.choice(("function", "closure", "object"))
        if form == "function":
            body = _flat(self._block("", shared, 0, 2))
            return [
                "def loss_fn(h, y):",
                *_indented(["self = nn.Identity()", *body, made]),
            ]
        if form == "closure":
            slot = self._slot("st", ("variable",))
            body = _flat(self._block("", [slot, *shared], 1, 2))
            inner = ["nonlocal st", "self = nn.Identity()", *body, made]
            outer = [self._first(slot), "def loss_fn(h, y):", *_indented(inner), "return loss_fn"]
            return ["def make_loss():", *_indented(outer), "loss_fn = make_loss()"]
        slot = self._slot("st", ("net",))
        body = _flat(self._block("self", [slot, *shared], 1, 2))
        return [
            *("class Loss:", "    training = True"),
            *_indented(["def __init__(self):", f"    {self._first(slot)}"]),
            *_indented(["def __call__(self, h, y):", *_indented([*body, made])]),
            "loss_fn = Loss()",
        ]

    def _script(self) -> list[str]:
        lines = [
            *("torch.manual_seed(1)", "net = Net()", "place(net)"),
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)",
            "net = make(net)"
            if self.has_own_loop
            else f"model = make(net, loss_fn, optimizer, {self.microbatches})",
            "self, h = net, torch.ones(2, 4)",
            "roots = net, G, TABLE, Net, helper, loss_fn, net.held, net.part, KEPT",
        ]
        containers = [slot for slot in self._slots if KINDS[slot.kind].is_container]
        kept: list[Slot] = []
        for _ in range(self._draw.randrange(4, 7)):
            lines += self._keeping(containers, kept)
            lines += ["x, y = torch.randn(8, 4), torch.randn(8, 4)", *self._step()]
            lines.append('yield "state", look(roots)')
            if self._happens(0.3):
                lines += [*self._predict(), 'yield "state", look(roots)']
            if self._happens(0.45):
                lines += [self._between() for _ in range(self._draw.randint(1, 2))]
        holder = "net" if self.has_own_loop else "model"
        lines.append(f'yield "end", {{k: v.tolist() for k, v in {holder}.state_dict().items()}}')
        return ["def main(make, place, look):", *_indented(lines)]

    def _keeping(self, containers: list[Slot], kept: list[Slot]) -> list[str]:
        """The script keeps what the network has now, or changes what it has kept."""
        if containers and self._happens(0.25):
            slot = self._draw.choice(containers)
            kept.append(Slot(f"s9{len(kept)}", slot.kind, "kept", slot.cls))
            return [f"{kept[-1].at('')} = {slot.at('net')}"]
        if kept and self._happens(0.6):
            return [self._write(self._draw.choice(kept), "")]
        return []

    def _between(self) -> str:
        slot, chance = self._draw.choice(self._slots), self._draw.random()
        if (
            chance < 0.35 or KINDS[slot.kind].computes
        ):  # the script cannot compute with tensors there
            return self._first(slot, "net")
        return self._write(slot, "net") if chance < 0.85 else self._share("net", self._slots)

    def _step(self) -> list[str]:
        if not self.has_own_loop:
            return ['yield "loss", float(model.train_step(x, y)).hex()']
        return [
            *("net.train()", "optimizer.zero_grad()", "loss = loss_fn(net(x), y)"),
            *("loss.backward()", "optimizer.step()", 'yield "loss", float(loss.detach()).hex()'),
        ]

    def _predict(self) -> list[str]:
        if not self.has_own_loop:
            return ['yield "outputs", model.predict(x).tolist()']
        return ["net.eval()", "with torch.no_grad():", '    yield "outputs", net(x).tolist()']


def _indented(lines: list[str], times: int = 1) -> list[str]:
    return ["    " * times + line for line in lines]


def _flat(statements: list[list[str]]) -> list[str]:
    return [line for lines in statements for line in lines]
