"""The paper's experiments as data: complete, consistent, and equal to the paper."""

import pytest

from fedala.errors import UserError
from fedala.methods import make
from fedala.models import cnn
from fedala.paper.experiments import choose, count_ala_parameters, preset, settings, tables

EVERY = [
    (table, column, method) for table in tables().values() for column, method in table.entries()
]


def test_every_printed_number_has_a_cell_and_every_column_has_numbers():
    from fedala.paper.experiments import _accuracies, _costs

    placed = {
        (table.name, column.name, method) for table, column, method in EVERY if not table.cost
    }
    assert placed == set(_accuracies())
    assert {method for table, _, method in EVERY if table.cost} == set(_costs())
    sizes = {table.name: sum(t is table for t, _, _ in EVERY) for table in tables().values()}
    # Table 2: 14 rows × 8 columns. Table 4: 14 × 5, and 9 methods with ALA × 2. Table 7: two
    # methods require all clients.
    assert sizes == {
        "table1": 13,
        "table2": 112,
        "table3": 14,
        "table4": 88,
        "table6": 7,
        "table7": 26,
        "ablation": 1,
    }


@pytest.mark.parametrize(
    ("table", "column", "method", "accuracy", "std"),
    [
        ("table2", "cifar100-dir", "fedavg", 31.89, 0.47),
        ("table2", "cifar100-dir", "fedala", 55.92, 0.03),
        ("table2", "cifar10-dir", "fedavg", 59.16, 0.47),
        ("table2", "cifar10-dir", "fedala", 90.67, 0.03),
        ("table2", "mnist-pathological", "fedavg", 97.93, 0.05),
        ("table2", "tiny-dir", "fedphp", 35.69, 3.26),
        ("table4", "cifar100-ala", "ditto", 56.33, 0.07),
        ("table4", "cifar100-100-clients", "fedala", 54.68, 0.57),
        ("table7", "mnist-dir", "fedala", 99.71, 0.0),
        ("table7", "cifar100-joining", "fedprox", 33.87, 2.39),
        ("table1", "p2", "fedala", 42.47, None),
        ("table6", "fasttext-p1", "fedala", 96.52, None),
        ("ablation", "tiny-frozen", "fedala", 33.81, None),
    ],
)
def test_numbers_of_the_paper(table, column, method, accuracy, std):
    [(found, place, _)] = choose([table], [column], [method])
    assert (found.printed(place, method).accuracy, found.printed(place, method).std) == (
        accuracy,
        std,
    )


def test_a_cell_in_two_tables_has_the_same_accuracy_in_both():
    seen = {}
    for table, column, method in EVERY:
        printed = table.printed(column, method)
        if printed:
            assert seen.setdefault(column.cell(method), printed.accuracy) == printed.accuracy
    assert len(seen) < sum(not table.cost for table, _, _ in EVERY)


def test_improvements_are_the_differences_to_the_same_method_without_ala():
    base = tables()["table2"]
    columns = {column.setting: column for column in base.columns}
    improved = [(table, column, method) for table, column, method in EVERY if column.with_ala]
    assert len(improved) == 18
    for table, column, method in improved:
        with_ala, without = (
            table.printed(column, method),
            base.printed(columns[column.setting], method),
        )
        assert with_ala.accuracy - without.accuracy == pytest.approx(with_ala.improvement, abs=1e-9)


def test_no_number_is_larger_than_that_of_fedala_in_table_2():
    table = tables()["table2"]
    for column in table.columns:
        numbers = {method: table.printed(column, method).accuracy for method in table.methods}
        assert max(numbers, key=numbers.get) == "fedala"
        assert all(0 < number < 100 for number in numbers.values())


def test_the_parameters_of_ala_are_those_that_the_paper_prints():
    counted = [
        (table, column)
        for table in tables().values()
        for column in table.columns
        if column.parameters
    ]
    assert len(counted) == 20
    for table, column in counted:
        assert table.parameters(column) == column.parameters


def test_the_parameters_of_ala_on_tiny_imagenet():
    assert count_ala_parameters(lambda: cnn((3, 64, 64), 200), 1) == 102_600
    assert count_ala_parameters(lambda: cnn((3, 64, 64), 200), 4) == 5_694_600


def test_every_cell_has_a_valid_config():
    for _, column, method in EVERY:
        cell = column.cell(method)
        config = cell.config()
        assert (config.rounds, config.seeds, config.shuffle, config.batch_size) == (
            2000,
            5,
            False,
            10,
        )
        assert config.lr == (0.1 if config.dataset == "mnist" or config.model != "cnn" else 0.005)
        assert config.save_models is False
        made = make(cell.method, config.set)
        assert not (made.requires_all_clients and config.join_ratio < 1)


def test_cells_have_unique_names():
    cells = {
        column.cell(method, shuffle=shuffle)
        for _, column, method in EVERY
        for shuffle in (False, True)
    }
    assert len({str(cell) for cell in cells}) == len(cells)
    column = next(c for c in tables()["table2"].columns if c.name == "mnist-pathological")
    names = [column.cell(m, rounds=300).name for m in ("fedala", "fedphp", "apple")]
    # The schedules of FedPHP and APPLE depend on the number of rounds.
    assert names == ["fedala", "fedphp,rounds=300", "apple,rounds=300"]
    assert column.cell("fedphp", rounds=preset()["rounds"]).name == "fedphp"


def test_the_defaults_of_table_1_are_the_cell_of_table_2():
    cells = [
        column.cell("fedala")
        for column in tables()["table1"].columns
        if column.name in ("s80", "p1")
    ]
    same = next(c for c in tables()["table2"].columns if c.name == "tiny-resnet18-dir").cell(
        "fedala"
    )
    assert cells == [same, same]


def test_a_method_can_be_chosen_with_ala_or_without():
    both = choose(["table4"], [], ["ditto+ala"])
    assert {column.name for _, column, _ in both} == {"tiny-ala", "cifar100-ala"}
    assert len(choose(["table4"], [], ["ditto"])) == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((["table9"], [], []), "There is no table or figure table9"),
        ((["table2"], ["cifar"], []), "There is no column cifar in table2"),
        ((["table2"], [], ["fedalla"]), "did you mean fedala"),
        ((["table7"], ["cifar100-joining"], ["apple"]), "has no cell of apple in cifar100-joining"),
    ],
)
def test_refusals(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        choose(*arguments)


def test_settings_name_known_datasets():
    assert {setting.data.name for setting in settings().values()} == {
        "mnist",
        "cifar10",
        "cifar100",
        "tiny-imagenet",
        "ag_news",
    }
