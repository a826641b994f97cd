from zoo.measure.memory_table import labels, text

PEAKS = {
    "rollout": {"total": 12_000_000, "policy/parameters": 4_000_000, "cache": 8_000_000},
    "update": {
        "total": 1_234_500_000,
        "activations": 1_200_000_000,
        "policy/gradients": 4_000_000,
        "policy/parameters": 4_000_000,
        "reference/parameters": 26_500_000,
    },
}


def test_owners_come_first_and_the_total_last():
    assert labels([PEAKS]) == [
        "policy/parameters",
        "policy/gradients",
        "reference/parameters",
        "cache",
        "activations",
        "total",
    ]


def test_a_strangers_labels_are_kept():
    peaks = {"update": {"total": 1, "judge/parameters": 1, "policy/parameters": 0, "notes": 0}}
    assert labels([peaks]) == ["policy/parameters", "judge/parameters", "notes", "total"]


def test_the_table_is_in_megabytes_and_empty_where_there_is_nothing():
    assert text(PEAKS) == "\n".join(
        [
            "memory, MB            rollout   update",
            "policy parameters         4.0      4.0",
            "policy gradients                   4.0",
            "reference parameters              26.5",
            "cache                     8.0",
            "activations                    1,200.0",
            "total                    12.0  1,234.5",
        ]
    )
