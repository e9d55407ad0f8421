"""From the jobs of benchmarks/planes.py to its table."""

from __future__ import annotations

from benchmarks.planes import OF_SEVERAL, markdown


def test_a_row_a_way_with_the_ratio_to_the_library_s_own_call() -> None:
    def job(bare: list[float], engine: list[float]) -> dict[str, object]:
        ways = {
            "bare": {"seconds": bare, "cpu_seconds": [0.001] * len(bare)},
            "engine": {"seconds": engine, "cpu_seconds": [0.002] * len(engine)},
        }
        return {"plane": "mpi", "ranks": 2, "sums": [{"bytes": 1_000_000, "ways": ways}]}

    told = markdown([job([0.001, 0.001, 0.009], [0.002, 0.003, 0.002]), job([0.004], [0.004])]).splitlines()
    assert told[2] == (
        "| mpi | 2 | 1,000,000 | bare | 2.500 [1.000, 9.000] | 1.00 [1.00, 1.00] | 400 | 1.000 [1.000, 1.000] |"
    )
    assert told[3] == (
        "| mpi | 2 | 1,000,000 | engine | 2.500 [2.000, 4.000] | 1.50 [1.00, 2.00] | 400 | 2.000 [2.000, 2.000] |"
    )


def test_planes_that_cannot_be_opened_are_named_once() -> None:
    jobs = [{"plane": "torch", "ranks": ranks, "left_out": "this torch has no Gloo"} for ranks in (2, 4)]
    assert markdown(jobs).count("torch: left out, since this torch has no Gloo") == 1


def test_planes_come_from_the_code() -> None:
    assert {"mpi", "torch"} <= set(OF_SEVERAL)
    assert not {"auto", "local"} & set(OF_SEVERAL)
