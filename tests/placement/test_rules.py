"""``gs.apply_placement``: rules for modules, from a mapping and from a file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.errors import PlacementError
from graphsplit.marks.annotations import annotations_of, mark_planned


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({n: nn.Linear(2, 2) for n in ("q_proj", "k_proj", "o")})
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(2, 4)


def ranks(network: nn.Module) -> dict[str, int]:
    return {path: found.rank for path, found in annotations_of(network).items()}


def applied(source: Any) -> dict[str, int]:
    return ranks(gs.apply_placement(Tower(), source))


def refused(source: Any, network: nn.Module | None = None) -> str:
    with pytest.raises(PlacementError) as caught:
        gs.apply_placement(network if network is not None else Tower(), source)
    return str(caught.value)


def written(folder: Path, text: str, name: str = "placement.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("embed", ["embed"]),
        ("", [""]),
        ("(network)", [""]),
        ("layers.*.mlp", [f"layers.{i}.mlp" for i in range(6)]),
        ("layers.{0..2}", ["layers.0", "layers.1", "layers.2"]),
        ("layers.{0,4..5}", ["layers.0", "layers.4", "layers.5"]),
        ("layers[0:2]", ["layers.0", "layers.1"]),
        ("layers[4:]", ["layers.4", "layers.5"]),
        ("layers[::3]", ["layers.0", "layers.3"]),
        ("layers[-1]", ["layers.5"]),
        ("layers[-2:].mlp[0]", ["layers.4.mlp.0", "layers.5.mlp.0"]),
        (
            "layers.3.attention.{q,k}_proj",
            ["layers.3.attention.q_proj", "layers.3.attention.k_proj"],
        ),
        ("layers.3.attention.?_proj", ["layers.3.attention.q_proj", "layers.3.attention.k_proj"]),
        ("layers.0.mlp.**", ["layers.0.mlp", "layers.0.mlp.0", "layers.0.mlp.1"]),
        ("**.o", [f"layers.{i}.attention.o" for i in range(6)]),
    ],
)
def test_a_pattern_names_modules(pattern: str, paths: list[str]) -> None:
    assert applied({pattern: 1}) == dict.fromkeys(paths, 1)


@pytest.mark.parametrize(
    "worker", [2, ["MS_WORKER", 2], ("MS_WORKER", 2), {"rank": 2}, {"role": "MS_WORKER", "rank": 2}]
)
def test_a_worker_is_a_rank_with_or_without_its_role(worker: Any) -> None:
    assert applied({"embed": worker}) == {"embed": 2}


def test_the_later_rule_wins() -> None:
    found = applied({"layers.*": 0, "layers[4:]": 1})
    assert found == {f"layers.{i}": int(i >= 4) for i in range(6)}


def test_sections_and_a_bare_mapping_say_the_same() -> None:
    assert applied({"modules": {"embed": 1}, "operations": {}}) == applied({"embed": 1})


def test_a_yaml_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    text = """\
# towers
modules:
  embed: 0
  layers[0:3]: [MS_WORKER, 1]
  "layers.{3..5}": {rank: 2}
parameters:
"""
    network = Tower()
    path = written(tmp_path, text)
    assert gs.apply_placement(network, path) is network
    assert ranks(network) == {"embed": 0} | {f"layers.{i}": 1 + i // 3 for i in range(6)}
    assert annotations_of(network)["layers.4"].source == f"{path}:5"


def test_numbers_are_names_in_a_file(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    gs.apply_placement(network, written(tmp_path, "0: 1\n1.0: 2\n"))
    assert ranks(network) == {"0": 1, "1.0": 2}


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    text = json.dumps({"modules": {"layers.*.mlp": 1, "head": {"rank": 2}}}, indent="\t")
    network = gs.apply_placement(Tower(), str(written(tmp_path, text, "placement.json")))
    assert annotations_of(network)["head"].source.endswith("placement.json:4")


def test_applying_another_placement_replaces_the_first() -> None:
    network = Tower()
    network.head.place("MS_WORKER", 3)
    gs.apply_placement(network, {"embed": 0, "layers": 1})
    gs.apply_placement(network, {"embed": 2})
    assert ranks(network) == {"head": 3, "embed": 2}


def test_rules_travel_with_a_copy_of_the_network() -> None:
    network = gs.apply_placement(
        Tower(), {"modules": {"embed": 2}, "operations": {"head": {"*": 1}}}
    )
    assert ranks(copy.deepcopy(network)) == {"embed": 2}
    assert list(network.state_dict()) == list(Tower().state_dict())


def test_a_rule_that_says_what_the_code_says_is_welcome() -> None:
    network = Tower()
    network.head.place("MS_WORKER", 3)
    gs.apply_placement(network, {"head": 3})
    assert "test_rules.py" in annotations_of(network)["head"].source


def test_every_fault_of_a_file_is_listed_with_its_line(tmp_path: Path) -> None:
    text = """\
modules:
  embd: 0
  layers.*.mpl: 1
  layers[7]: 1
  head: -1
  embed: {rnk: 1}
  layers.{3..1}: 0
  layers.2: 1
  layers.*: 2
  head[0]: 2
  layers.[x]: 1
operations:
  layers.3: 4
  layer.3: {add: 1}
parameters:
  embed.wight: 1
  embeds.weight: 1
modlues:
  embed: 1
"""
    path = written(tmp_path, text)
    faults = refused(path).replace(str(path), "F")
    assert faults.startswith("14 placements cannot be honoured:\n")
    for expected in (
        "rule 'embd' -> 0: the network has no module 'embd'; did you mean 'embed'?\n    F:2\n",
        "rule 'layers.*.mpl' -> 1: 'layers.0' and 5 more have no module 'mpl'; did you mean "
        "'mlp'?\n    F:3\n",
        "rule 'layers[7]' -> 1: the network has no module 'layers[7]': there are no such "
        "elements\n    F:4\n",
        "'head': rank -1 is negative; ranks begin at 0\n    F:5\n",
        "'embed': unknown key 'rnk'; did you mean 'rank'?\n    F:6\n",
        "rule 'layers.{3..1}' -> 0: the range '3..1' is empty\n    F:7\n",
        "rule 'layers.2' -> 1: all that it matches is decided by later rules\n    F:8\n    F:9\n",
        "rule 'head[0]' -> 2: the network has no module 'head[0]': there are no such "
        "elements\n    F:10\n",
        "rule 'layers.[x]' -> 1: '[x]' is no element or slice, such as [3] or [0:4]\n    F:11\n",
        "operations of 'layers.3': expected a mapping from operations to workers, as in "
        "{'softmax*': 1}; found 4\n    F:13\n",
        "rule of operations 'layer.3': 'add' -> 1: the network has no module 'layer'; did you mean "
        "'layers'?\n    F:14\n",
        "rule of parameters 'embed.wight' -> 1: 'embed' has no parameter or buffer 'wight'; did "
        "you mean 'weight'?\n    F:16\n",
        "rule of parameters 'embeds.weight' -> 1: the network has no module 'embeds'; did you mean "
        "'embed'?\n    F:17\n",
        "unknown section 'modlues'; did you mean 'modules'?\n    F:18\n",
    ):
        assert expected in faults, f"lacks {expected}\n{faults}"


def test_nothing_is_placed_where_something_is_refused() -> None:
    network = Tower()
    refused({"embed": 1, "hed": 1}, network)
    assert ranks(network) == {}


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "embed: 0\nhead: 1\nembed: 1\n")
    faults = refused(path)
    assert f"'embed' stands there twice\n    {path}:1\n    {path}:3" in faults


def test_a_rule_and_the_code_that_disagree_are_refused(tmp_path: Path) -> None:
    network = Tower()
    network.layers[2].place("MS_WORKER", 1)
    network.layers[3:5].place("MS_WORKER", 1)
    path = written(tmp_path, "layers.*: 0\n")
    faults = refused(path, network)
    assert (
        f"rule 'layers.*' -> 0: module 'layers.2' is placed on MS_WORKER 1 in the code\n"
        f"    {path}:1\n    {__file__}:" in faults
    )
    assert "module 'layers.3' is placed on MS_WORKER 1 in the code" in faults
    assert ranks(network) == {"layers.2": 1, "layers.3": 1, "layers.4": 1}


def test_placing_against_a_rule_is_refused() -> None:
    network = gs.apply_placement(Tower(), {"head": 0})
    network.head.place("MS_WORKER", 0)
    network = gs.apply_placement(Tower(), {"head": 0})
    with pytest.raises(PlacementError, match="a rule puts this module on MS_WORKER 0"):
        network.head.place("MS_WORKER", 1)


def test_placing_a_slice_against_a_rule_is_refused() -> None:
    network = gs.apply_placement(Tower(), {"layers.1": 0})
    network.layers[1:3].place("MS_WORKER", 1)
    with pytest.raises(PlacementError) as caught:
        annotations_of(network)
    assert "module 'layers.1' is placed on MS_WORKER 0 by a rule, and on 1 as part of a slice" in (
        str(caught.value)
    )


def test_one_module_under_two_names_has_one_placement() -> None:
    network = nn.ModuleDict({"a": nn.Linear(1, 1)})
    network["b"] = network["a"]
    assert "'b' is the same module as 'a'" in refused({"a": 0, "b": 1}, network)
    assert ranks(gs.apply_placement(network, {"a": 1, "b": 1})) == {"a": 1, "b": 1}


def test_one_tensor_under_two_names_has_one_owner() -> None:
    network = Tower()
    network.head.weight = network.embed.weight
    faults = refused({"parameters": {"embed.weight": 0, "head.weight": 1}}, network)
    assert "'head.weight' is the same tensor as 'embed.weight'" in faults


def test_the_loss_is_no_module_of_the_network() -> None:
    assert "under operations, as in {'(loss)': {'*': 1}}" in refused({"(loss)": 1})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("embed: 0\n*: 1\n", "is no YAML"),
        ("- embed\n", "holds no mapping"),
        ("", "holds no mapping"),
        ("!!python/object/apply:os.getcwd []: 0\n", "is no YAML"),
        ("embed: !!python/name:os.system\n", "is no YAML"),
    ],
)
def test_what_is_no_placement_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in refused(written(tmp_path, text))


def test_a_missing_file_and_a_strange_source_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "none.yaml")
    assert "the source is a list" in refused([("embed", 0)])


def test_a_planned_network_takes_no_rules() -> None:
    network = Tower()
    mark_planned(network)
    message = refused({"embed": 0}, network)
    assert "already planned" in message
    assert "test_rules.py:" in message


def test_rules_leave_training_alone() -> None:
    network = gs.apply_placement(Tower(), {"layers.*.mlp": 1})
    assert torch.equal(
        network.layers[0].mlp(torch.zeros(1, 2)), network.layers[0].mlp(torch.zeros(1, 2))
    )
